"""Acceptance rates of published measurements (Qwen3-32B with Qwen3-1.7B, greedy). Measures nothing."""

from __future__ import annotations

RATES: dict[str, tuple[float, ...]] = {
    "mt-bench": (0.80, 0.60, 0.47, 0.41, 0.25, 0.17, 0.20, 0.14),
    "instructcoder": (0.72, 0.52, 0.34, 0.27, 0.21, 0.11),
}
"""Unconditional acceptance by position. `1 +` the sum of the first K is the acceptance length at K."""


def rates(name: str, k: int) -> list[float]:
    """Return the first `k` rates of a data set, in descending order as an engine takes them. Raises KeyError for a
    name that is not in `RATES`."""
    return sorted(RATES[name][:k], reverse=True)
