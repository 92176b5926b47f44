"""Checkpoints of quantized weights: which formats there are, and how each is read."""
