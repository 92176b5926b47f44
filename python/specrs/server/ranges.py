"""Pydantic fields for sampling parameters in request bodies, with the ranges that `SamplingParams` declares."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from specrs.options import Integer, Number, options_of
from specrs.sampling import SamplingParams

MAX_INTEGER = 2**31 - 1
"""Largest integer in a body for parameters that `SamplingParams` does not bound."""


def ranged(name: str, *, low: int | None = None) -> Any:
    """Make a pydantic field that has the range of the sampling parameter `name`. Its default is None.

    `low` replaces the least value, for a field that gives one more value a meaning of its own.
    """
    values = options_of(SamplingParams)[name].values
    match values:
        case Integer(low=least, high=most):
            return Field(None, ge=least if low is None else low, le=MAX_INTEGER if most is None else most)
        case Number(low=least, high=most, open_low=True):
            return Field(None, gt=least, le=most)
        case Number(low=least, high=most):
            return Field(None, ge=least, le=most)
    raise TypeError(f"{name}: {values} has no range")
