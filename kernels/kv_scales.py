"""Scales of K and V where a cache holds them as codes. Plain numbers: needs no torch."""

from __future__ import annotations

from typing import NamedTuple


class KVScales(NamedTuple):
    """Factors of a layer's FP8 keys and values: a cached number is its code times the factor, which is above 0."""

    k: float
    v: float


UNSCALED = KVScales(1.0, 1.0)
