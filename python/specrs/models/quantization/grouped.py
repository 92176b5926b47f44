"""Codes and scales as quantized files hold them, in numpy: the common forms of their formats. Knows no file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from specrs.arrays import BFLOAT16, FLOAT32, Array, converted
from specrs.models.stored import Codes

INT4_UNIT, INT8_UNIT = 32, 16
"""Inputs that a group of the native pass is a multiple of."""
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the numbers of e2m1, by their codes."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """A matrix `[out, in]`: weight [o, i] is `values[o, i] * scales[o, group of i]`."""

    values: Array
    """int8 or int16 `[out, in]`: codes less their zero points."""
    scales: Array
    """float32 `[out, groups]`"""
    group_of: Array | None = None
    """int64 `[in]`: each input's group; None: groups of the same number of inputs, one after the other."""

    def spread(self) -> Array:
        """Return the scales by input, `[out, in]`."""
        if self.group_of is not None:
            found: Array = self.scales[:, self.group_of]
            return found
        return self.scales.repeat(self.values.shape[1] // self.scales.shape[1], axis=1)

    def numbers(self) -> Array:
        """Return the matrix, `[out, in]` float32, each product rounded once."""
        with np.errstate(all="ignore"):  # scales that are not finite are the caller's to name
            made: Array = self.values.astype(FLOAT32) * self.spread()
        return made

    def codes(self) -> Codes | None:
        """Return the same numbers as the native pass reads them; None where none of its layouts holds them."""
        (out, size), groups = self.values.shape, self.scales.shape[1]
        group = size // groups
        if self.group_of is not None:
            return None
        low, high = int(self.values.min()), int(self.values.max())
        rounded = converted(self.scales, BFLOAT16)
        fits = np.array_equal(converted(rounded, FLOAT32), self.scales)
        scales = rounded if fits else np.ascontiguousarray(self.scales)
        if low >= -8 and high <= 7 and group % INT4_UNIT == 0:
            halves = (self.values + 8).astype(np.uint8).reshape(out, size // 32, 2, 16)
            return Codes((halves[:, :, 0] | halves[:, :, 1] << 4).reshape(out, size // 2), scales)
        if low >= -128 and high <= 127 and (groups == 1 or group % INT8_UNIT == 0):
            return Codes(np.ascontiguousarray(self.values.astype(np.int8, copy=False)), scales)
        return None


@dataclass(frozen=True, slots=True)
class Scaled8:
    """A matrix `[out, in]` of FP8: weight [o, i] is `values[o, i] * scales[o // outputs, i // group]`."""

    values: Array
    """e4m3 `[out, in]`, all finite."""
    scales: Array
    """float32 `[ceil(out / outputs), ceil(in / group)]`"""
    group: int
    outputs: int = 1


Raw: TypeAlias = Grouped | Scaled8
"""What a file holds of a quantized matrix."""


def unpack(packed: Array, bits: int, axis: int) -> Array:
    """Return the unsigned codes of `bits` bits in int32 words, lowest first, along `axis`: uint8."""
    each = 32 // bits
    words = np.ascontiguousarray(np.moveaxis(packed, axis, -1)).view(np.uint8)
    if bits == 4:
        words = np.stack((words & 15, words >> 4), axis=-1)
    codes: Array = words.reshape(*words.shape[: packed.ndim - 1], packed.shape[axis] * each)
    return np.moveaxis(codes, -1, axis)
