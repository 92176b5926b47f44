"""Verification rules, which accept draft tokens by flat rows of logits. Knows no models and no caches."""
