"""Scales of K and V where a cache holds them as codes. Plain numbers: needs no torch."""

from __future__ import annotations

from typing import NamedTuple


class KVScales(NamedTuple):
    """What the codes of a layer are multiplied by, greater than 0."""

    k: float
    v: float


UNSCALED = KVScales(1.0, 1.0)
