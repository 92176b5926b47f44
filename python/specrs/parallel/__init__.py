"""Ranks: processes that compute one model together. Knows no models, no requests and no scheduler."""
