"""The CPU backend: one call of `specrs.core.CpuIteration` for each step."""
