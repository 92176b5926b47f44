"""Types of GGML whose numbers are a code times a scale: their blocks as codes and scales.

The package `gguf` makes numbers of other types, and tests compare with its numbers of these.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specrs.arrays import FLOAT16, FLOAT32, Array
from specrs.models.quantization.grouped import Grouped


def _halves(scales: Array) -> Array:
    """Return fp16 numbers from their bytes `[.., 2]`: float32 `[..]`."""
    found: Array = np.ascontiguousarray(scales).view(FLOAT16)[..., 0].astype(FLOAT32)
    return found


def _signed(codes: Array) -> Array:
    """Return bytes as int8."""
    return np.ascontiguousarray(codes).view(np.int8)


def _nibbles(packed: Array) -> Array:
    """Return of bytes `[.., n]` the lower halves, then the upper ones: int8 `[.., 2 n]`."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1).astype(np.int8)


def q8_0(blocks: Array) -> Grouped:
    """32 numbers in 34 bytes: an fp16 scale, int8 codes."""
    of = blocks.reshape(len(blocks), -1, 34)
    return Grouped(_signed(of[..., 2:]).reshape(len(blocks), -1), _halves(of[..., :2]))


def q4_0(blocks: Array) -> Grouped:
    """32 numbers in 18 bytes: an fp16 scale, codes plus 8, of which byte i has those of numbers i and 16 + i."""
    of = blocks.reshape(len(blocks), -1, 18)
    return Grouped((_nibbles(of[..., 2:]) - np.int8(8)).reshape(len(blocks), -1), _halves(of[..., :2]))


def q6_k(blocks: Array) -> Grouped:
    """256 numbers in 210 bytes: 128 bytes of lower halves, 64 of two upper bits, 16 int8 scales, an fp16 scale of them.

    A half of 128 numbers is four runs of 32: bytes 0 to 31 and 32 to 63 hold the lower halves of runs 0 and 1 below
    those of runs 2 and 3; byte i of 32 has the upper bits of number i of each run.
    """
    of = blocks.reshape(len(blocks), -1, 210)
    low = of[..., :128].reshape(*of.shape[:2], 2, 2, 32)
    low = np.concatenate((low & 15, low >> 4), axis=-2)
    high = of[..., 128:192].reshape(*of.shape[:2], 2, 1, 32)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2)
    values = (low | high << 4).astype(np.int8) - np.int8(32)
    with np.errstate(all="ignore"):  # scales that are not finite are the caller's to name
        scales = _signed(of[..., 192:208]).astype(FLOAT32) * _halves(of[..., 208:])[..., None]
    return Grouped(values.reshape(len(blocks), -1), scales.reshape(len(blocks), -1))


GROUPED: dict[str, Callable[[Array], Grouped]] = {"Q8_0": q8_0, "Q4_0": q4_0, "Q6_K": q6_k}
"""By GGML's name."""
