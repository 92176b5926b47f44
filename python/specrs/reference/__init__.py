"""Slow and short implementations of a step and of a decoder. Tests compare runners and models with them; no engine runs
them."""
