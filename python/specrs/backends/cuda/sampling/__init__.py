"""Sampling on a GPU by torch ops: draws and adjustments of logits for which no kernel exists."""
