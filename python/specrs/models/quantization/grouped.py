"""Quantized matrices as NumPy arrays of integers or FP8 and scales, which all formats are converted to. Reads no
file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from specrs.arrays import FLOAT32, Array
from specrs.core import PackedMatrix

PACKED_UNIT = 32
"""Sizes of groups of a packed matrix are multiples of this."""
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the e2m1 number of each 4 bit code, so that all are integers."""
LARGEST_EXPONENT = 127 + 125
"""Largest stored exponent of MXFP4 for which 6, the largest e2m1 number, times the scale still fits fp32."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """A matrix `[out, in]` of integers: weight [o, i] is `values[o, i] * scales[o, group of i]`."""

    values: Array
    """int8 or int16 `[out, in]`: codes less their zero points."""
    scales: Array
    """float32 `[out, groups]`."""
    group_of: Array | None = None
    """int64 `[in]`, the group of each input. None: consecutive groups of equal size."""

    def spread(self) -> Array:
        """Return the scale of each input, `[out, in]`."""
        if self.group_of is not None:
            found: Array = self.scales[:, self.group_of]
            return found
        return self.scales.repeat(self.values.shape[1] // self.scales.shape[1], axis=1)

    def numbers(self) -> Array:
        """Return the dequantized matrix, `[out, in]` float32, each product rounded once."""
        with np.errstate(all="ignore"):  # the caller reports scales that are not finite
            made: Array = self.values.astype(FLOAT32) * self.spread()
        return made

    def packed(self) -> PackedMatrix | None:
        """Return the matrix packed for native CPU passes.

        Inputs of groups that are not consecutive are brought together: the matrix then has an order of inputs.

        None for groups of different sizes, or whose size is no multiple of 32 inputs, for integers beyond 8 bits, and
        for numbers that are not finite.
        """
        groups = self.scales.shape[1]
        group = self.values.shape[1] // groups
        if group % PACKED_UNIT or not self.values.size:
            return None
        values, scales, order = self.values, self.scales, None
        if self.group_of is not None:
            if (np.bincount(self.group_of, minlength=groups) != group).any():
                return None
            runs = self.group_of.reshape(groups, group)
            if (runs == runs[:, :1]).all():
                scales = scales[:, runs[:, 0]]
            else:
                order = np.argsort(self.group_of, kind="stable")
                values = values[:, order]
        low, high = int(self.values.min()), int(self.values.max())
        if low < -128 or high > 127:
            return None
        with np.errstate(all="ignore"):
            if not np.isfinite(self.scales * FLOAT32.type(max(-low, high, 1))).all():
                return None
        return PackedMatrix.grouped(np.ascontiguousarray(values, np.int16), np.ascontiguousarray(scales), order)


@dataclass(frozen=True, slots=True)
class Scaled8:
    """A matrix `[out, in]` of FP8: weight [o, i] is `values[o, i] * scales[o // outputs, i // group]`."""

    values: Array
    """e4m3 `[out, in]`, all finite."""
    scales: Array
    """float32 `[ceil(out / outputs), ceil(in / group)]`"""
    group: int
    """Inputs that share a scale."""
    outputs: int = 1
    """Outputs that share a scale."""


@dataclass(frozen=True, slots=True)
class E2M1:
    """A matrix `[out, in]` of MXFP4: weight [o, i] is the e2m1 number of `codes[o, i]`, times 2^(`exponents[o, i //
    32]` - 127)."""

    codes: Array
    """uint8 `[out, in]`."""
    exponents: Array
    """uint8 `[out, in / 32]`, at most `LARGEST_EXPONENT`."""

    def grouped(self) -> Grouped:
        """Return this matrix as integers and scales."""
        # FP4 has doubled numbers, so scales are halved.
        return Grouped(FP4[self.codes], np.ldexp(np.float32(1), self.exponents.astype(np.int32) - 128))


@dataclass(frozen=True, slots=True)
class WithMinima:
    """A matrix `[out, in]` of codes with a scale and a minimum for each group of inputs, in blocks of equal size.

    Weight [o, i] is `values[o, i]` times the scale of its group, less the group's minimum.
    """

    values: Array
    """int8 `[out, in]`."""
    scales: Array
    """float16 `[out, blocks]`."""
    minima: Array
    """float16 `[out, blocks]`."""
    bits: int
    """Number of bits in which a GPU holds a code: 4 for codes from 0 to 15, else 8."""
    factors: Array | None = None
    """int8 `[out, groups, 2]`. A group's scale is that of its block times the first factor, its minimum that of the
    block times the second. None: blocks are groups."""

    def numbers(self) -> Array:
        """Return the dequantized matrix, `[out, in]` float32, each difference rounded once."""
        (out, size), blocks = self.values.shape, self.scales.shape[1]
        with np.errstate(all="ignore"):  # the caller reports scales that are not finite
            scales, minima = self.scales.astype(FLOAT32)[..., None], self.minima.astype(FLOAT32)[..., None]
            if self.factors is not None:
                factors = self.factors.reshape(out, blocks, -1, 2)
                scales, minima = scales * factors[..., 0], minima * factors[..., 1]
            values = self.values.reshape(*scales.shape, -1)
            made: Array = values * scales[..., None] - minima[..., None]
        return made.reshape(out, size)

    def in_order(self, order: Array) -> WithMinima:
        """Return the matrix with the outputs `order`."""
        factors = None if self.factors is None else self.factors[order]
        return WithMinima(self.values[order], self.scales[order], self.minima[order], self.bits, factors)

    @property
    def group(self) -> int:
        """Number of inputs of a group."""
        groups: int = self.scales.shape[1] if self.factors is None else self.factors.shape[1]
        return int(self.values.shape[1]) // groups

    def widened(self, group: int) -> WithMinima:
        """Return the same matrix with codes of 8 bits and, if it has factors, groups of `group` inputs, which must
        divide its own."""
        factors = None if self.factors is None else self.factors.repeat(self.group // group, axis=1)
        return replace(self, bits=8, factors=factors)

    def grouped(self) -> Grouped:
        """Return the matrix as integers and scales. It must have factors, and no minima."""
        assert self.factors is not None
        each = self.factors.shape[1] // self.scales.shape[1]
        with np.errstate(all="ignore"):  # scales that are not finite are the caller's to name
            return Grouped(self.values, self.factors[..., 0] * self.scales.astype(FLOAT32).repeat(each, axis=1))


Raw: TypeAlias = Grouped | Scaled8 | E2M1 | WithMinima
"""Codes and scales of a quantized matrix, as files hold them."""


def unpack(packed: Array, bits: int, axis: int) -> Array:
    """Return the unsigned codes of `bits` bits that int32 words hold along `axis`, lowest bits first: uint8."""
    each = 32 // bits
    words = np.ascontiguousarray(np.moveaxis(packed, axis, -1)).view(np.uint8)
    if bits == 4:
        words = np.stack((words & 15, words >> 4), axis=-1)
    codes: Array = words.reshape(*words.shape[: packed.ndim - 1], packed.shape[axis] * each)
    return np.moveaxis(codes, -1, axis)
