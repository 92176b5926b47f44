"""Weights of projections in NumPy arrays, in the layouts that native CPU passes read. Multiplies nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from specrs.arrays import Array
from specrs.core import PackedMatrix

_Part = TypeVar("_Part", Array, Array | PackedMatrix)


@dataclass(frozen=True, slots=True)
class _Parts(Generic[_Part]):
    """Fused projections that share an input: matrices `[out_i, in]`, stacked to `[out, in]`."""

    parts: tuple[_Part, ...]
    biases: tuple[Array, ...] | None = None
    """Biases `[out_i]` float32. None: the projections have none."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and of inputs."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of parts and biases."""
        return sum(part.nbytes for part in self.parts) + sum(bias.nbytes for bias in self.biases or ())


class StackedWeight(_Parts[Array]):
    """Fused projections in float32 or bfloat16. Arrays may be views of mapped files."""

    __slots__ = ()


class PackedWeight(_Parts[Array | PackedMatrix]):
    """Fused projections of which some are packed integers with scales."""

    __slots__ = ()


NativeWeight = StackedWeight | PackedWeight
"""Fused projections of a native model."""
