"""What accepts tokens: the verification rules over flat logits rows. Knows no models and no caches."""
