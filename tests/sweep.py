"""How many generated cases a sweep tries: a third of them, the same in every run; all with `SPECRS_SWEEP=full`; or as
many as it says."""

import itertools
import os
from collections.abc import Iterable
from typing import Any

from hypothesis import HealthCheck, settings


def stride(cases: int) -> int:
    """Step of a loop that could test each of its cases and tests one of `cases`; all with `SPECRS_SWEEP=full`."""
    return 1 if os.environ.get("SPECRS_SWEEP") == "full" else cases


def some(every: int, *values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """One in `every` combinations of `values`, for `pytest.mark.parametrize`; all with `SPECRS_SWEEP=full`. Each value
    occurs in one of them at least."""
    combinations = list(itertools.product(*values))
    chosen = combinations[:: stride(every)]
    for one, all_of_it in zip(zip(*chosen, strict=True), zip(*combinations, strict=True), strict=True):
        assert {*map(repr, one)} == {*map(repr, all_of_it)}, f"one in {every} combinations leaves out a value"
    return chosen


def sweep(examples: int, **more: Any) -> settings:
    """Settings of a slow property with `examples` cases. More of them, by `SPECRS_SWEEP`, are drawn at random."""
    asked = os.environ.get("SPECRS_SWEEP", "")
    count = -(-examples // 3) if asked == "" else examples if asked == "full" else int(asked)
    derandomize, unchecked = count <= examples, list(HealthCheck)
    return settings(max_examples=count, deadline=None, derandomize=derandomize, suppress_health_check=unchecked, **more)
