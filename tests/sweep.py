"""Number of generated cases that a sweep tries: a third, the same in every run; all with `SPECRS_SWEEP=full`; or as
many as it says."""

import itertools
import os
from collections.abc import Iterable
from typing import Any

from hypothesis import HealthCheck, settings


def stride(cases: int) -> int:
    """Return the step of a loop that tests one of `cases` cases; 1 with `SPECRS_SWEEP=full`."""
    return 1 if os.environ.get("SPECRS_SWEEP") == "full" else cases


def some(every: int, *values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return one in `every` combinations of `values`, for `pytest.mark.parametrize`; all with `SPECRS_SWEEP=full`.
    Fails if a value is in none of them."""
    combinations = list(itertools.product(*values))
    chosen = combinations[:: stride(every)]
    for one, all_of_it in zip(zip(*chosen, strict=True), zip(*combinations, strict=True), strict=True):
        assert {*map(repr, one)} == {*map(repr, all_of_it)}, f"one in {every} combinations leaves out a value"
    return chosen


def sweep(examples: int, **more: Any) -> settings:
    """Return hypothesis settings of a slow property: a third of `examples` cases, all of them with `SPECRS_SWEEP=full`,
    or as many as it says. More than `examples` are drawn at random; otherwise every run has the same cases."""
    asked = os.environ.get("SPECRS_SWEEP", "")
    count = -(-examples // 3) if asked == "" else examples if asked == "full" else int(asked)
    derandomize, unchecked = count <= examples, list(HealthCheck)
    return settings(max_examples=count, deadline=None, derandomize=derandomize, suppress_health_check=unchecked, **more)
