"""Projections quantized as they are loaded, whatever checkpoint they come from: to FP8, or to INT8 or INT4 codes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specrs.arrays import BFLOAT16, FLOAT32, Array, aligned, bits, converted
from specrs.core import InvalidBufferError, quantize_weight
from specrs.errors import CheckpointError
from specrs.models.quantization.base import QuantizedTensors, bits_of
from specrs.models.quantization.fp8 import quantized
from specrs.models.quantization.grouped import Grouped, Raw, Scaled8
from specrs.models.stored import Codes

PROJECTIONS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""How names of layers' projections end, experts' too; those of routers do not."""
INT4_GROUPS = (128, 64, 32)
"""INT4 has groups of the largest of them that divides the inputs."""


class QuantizedAtLoad(QuantizedTensors):
    """A checkpoint whose layers' projections have the numbers of another kind."""

    def __init__(self, tensors: Any) -> None:
        """`tensors` is a checkpoint, whatever kind."""
        self.folder = tensors.folder
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """See `QuantizedTensors`; like what follows."""
        self._tensors.check(required, optional)

    def is_quantized(self, name: str) -> bool:
        """See `QuantizedTensors`."""
        return name.endswith(PROJECTIONS)

    def mapped(self, name: str) -> Array:
        """See `QuantizedTensors`."""
        if not self.is_quantized(name):
            plain: Array = self._tensors.mapped(name)
            return plain
        return self._numbers(name)

    @abstractmethod
    def _numbers(self, name: str) -> Array:
        """`mapped`, of a projection."""


class Float8AtLoad(QuantizedAtLoad):
    """FP8 with a scale for each output."""

    def raw(self, name: str) -> Raw:
        """See `QuantizedTensors`; like what follows."""
        values, scales = self._quantized(name)
        return Scaled8(values, scales, values.shape[1])

    def codes(self, name: str) -> Codes | None:
        """None: the native pass reads no FP8."""
        return None

    def coded_bits(self, name: str) -> int | None:
        """See `QuantizedTensors`."""
        return 8

    def _numbers(self, name: str) -> Array:
        codes, scales = self._quantized(name)
        return converted(codes, FLOAT32) * scales

    def _quantized(self, name: str) -> tuple[Array, Array]:
        tensor: Array = self._tensors.mapped(name)
        if not np.isfinite(tensor).all():
            raise CheckpointError(f"{self.folder}: {name} cannot be quantized: not all of its weights are finite")
        return quantized(tensor)


class IntegersAtLoad(QuantizedAtLoad):
    """INT8 by output, or INT4 by group: the same codes on every device."""

    def __init__(self, tensors: Any, quantization: str) -> None:
        """`quantization` is `int8` or `int4`."""
        super().__init__(tensors)
        self._int4 = quantization == "int4"

    def codes(self, name: str) -> Codes:
        """See `QuantizedTensors`; like what follows. Raises CheckpointError for weights that are not finite."""
        return quantized_codes(self.folder, name, self._tensors.mapped(name), int4=self._int4)

    def raw(self, name: str) -> Raw:
        """See `QuantizedTensors`."""
        codes = self.codes(name)
        return Grouped(codes.values(), converted(codes.scales, FLOAT32))

    def coded_bits(self, name: str) -> int | None:
        """See `QuantizedTensors`."""
        return bits_at_load("int4" if self._int4 else "int8", self._tensors.mapped(name).shape[1])

    def _numbers(self, name: str) -> Array:
        return self.codes(name).numbers()


def int4_group(size: int) -> int:
    """Inputs of a group, of `size` inputs."""
    return next((group for group in INT4_GROUPS if size % group == 0), INT4_GROUPS[-1])


def bits_at_load(quantization: str, size: int) -> int | None:
    """Bits of a weight of `size` inputs on a GPU; None where it becomes numbers."""
    if quantization == "int4":
        return bits_of(("int4", "int8"), int4_group(size), size)
    return bits_of((quantization,), 0, size)


def quantized_codes(folder: Path | str, name: str, matrix: Array, *, int4: bool) -> Codes:
    """Return `matrix` `[out, in]` in INT4 by group, or in INT8 by output, symmetric, with scales of bf16.

    Raises CheckpointError naming the tensor of `folder` for weights that are not finite, or inputs that make no groups.
    """
    if matrix.dtype not in (FLOAT32, BFLOAT16):
        matrix = converted(matrix, FLOAT32)
    matrix = aligned(matrix)
    out, size = matrix.shape
    if int4:
        codes, groups = np.empty((out, size // 2), np.uint8), size // int4_group(size)
    else:
        codes, groups = np.empty((out, size), np.int8), 1
    scales = np.empty((out, groups), BFLOAT16)
    try:
        quantize_weight(name, bits(matrix), codes, bits(scales))
    except InvalidBufferError as fault:
        raise CheckpointError(f"{folder}: {name} cannot be quantized: {fault}") from fault
    return Codes(codes, scales)
