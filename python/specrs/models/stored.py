"""Weights of projections as the native pass of a CPU reads them, in NumPy's memory. Multiplies nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from specrs.arrays import FLOAT32, Array


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix `[out, in]` as codes times scales, symmetric. The products are float32, exact where scales are bf16 or
    come from fp16."""

    codes: Array
    """INT8: int8 `[out, in]`. INT4: uint8 `[out, in / 2]`; 16 bytes hold 32 inputs. Byte i has code + 8 of input i in
    its lower half and that of input 16 + i in its upper half."""
    scales: Array
    """bf16 or fp32 `[out, groups]`. All groups have the same number of inputs: a multiple of 32 for INT4, all inputs or
    a multiple of 16 for INT8."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.codes.shape[0], self.codes.shape[1] * (1 if self.codes.dtype == np.int8 else 2)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def values(self) -> Array:
        """Return the codes, `[out, in]` int8."""
        if self.codes.dtype == np.int8:
            return self.codes
        out, size = self.shape
        halves = self.codes.reshape(out, size // 32, 1, 16)
        return (np.concatenate((halves & 15, halves >> 4), axis=2).astype(np.int8) - np.int8(8)).reshape(out, size)

    def numbers(self) -> Array:
        """Return the matrix, `[out, in]` float32."""
        (out, size), groups = self.shape, self.scales.shape[1]
        scaled = self.values().reshape(out, groups, size // groups) * self.scales.astype(FLOAT32)[:, :, None]
        return scaled.reshape(out, size)


_Part = TypeVar("_Part", Array, Codes)


@dataclass(frozen=True, slots=True)
class _Parts(Generic[_Part]):
    """Projections that share an input: each `[out_i, in]`, together `[out, in]`."""

    parts: tuple[_Part, ...]
    biases: tuple[Array, ...] | None = None
    """Each `[out_i]` float32; None: the projections have none."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of parts and biases."""
        return sum(part.nbytes for part in self.parts) + sum(bias.nbytes for bias in self.biases or ())


class StackedWeight(_Parts[Array]):
    """Projections in the checkpoint's own memory, float32 or bfloat16: mapped files stay mapped."""

    __slots__ = ()


class QuantizedWeight(_Parts[Codes]):
    """Projections in INT8 or INT4."""

    __slots__ = ()


NativeWeight = StackedWeight | QuantizedWeight
"""A projection of a native model."""
