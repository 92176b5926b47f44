"""Sampling on a GPU by torch: draws and adjustments for which there is no kernel."""
