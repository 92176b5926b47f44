"""Speculative decoding with draft models as real software. Importing this does not import torch."""
