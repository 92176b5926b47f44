"""Slow and short implementations of a step and of a decoder. Tests compare the others with them; no engine runs
them."""
