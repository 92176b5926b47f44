"""Scales of K and V in a quantized cache. Plain numbers: needs no torch."""

from __future__ import annotations

from typing import NamedTuple


class KVScales(NamedTuple):
    """Scales of a layer's FP8 keys and values, above 0. An element of K or V is its code in the cache times the
    scale."""

    k: float
    v: float


UNSCALED = KVScales(1.0, 1.0)
