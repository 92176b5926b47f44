"""Quantization of projections while they are loaded, from any checkpoint: to FP8, INT8, INT4, or GGML's blocks."""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specrs.arrays import BFLOAT16, FLOAT32, Array, aligned, bits, converted
from specrs.core import InvalidBufferError, PackedMatrix, quantize_q4_k, quantize_weight
from specrs.errors import CheckpointError
from specrs.kernels.coding import Coding
from specrs.models.gguf.blocks import GROUPED, WITH_MINIMA
from specrs.models.quantization.base import QuantizedTensors, coding_of
from specrs.models.quantization.fp8 import quantized
from specrs.models.quantization.grouped import PACKED_UNIT, Grouped, Raw, Scaled8

logger = logging.getLogger("specrs")
PROJECTIONS = (
    "_proj.weight",
    ".w1.weight",
    ".w2.weight",
    ".w3.weight",
    ".in_proj_qkv.weight",
    ".in_proj_z.weight",
    ".in_proj_qkvz.weight",
)
"""Endings of the names of projections, also those of experts. Routers have other names, and so have the projections of
a delta net to one number per head."""
INT4_GROUPS = (128, 64, 32)
"""Sizes of INT4 groups. The first that divides the number of inputs is used."""
SUPER_BLOCK = 256
"""Number of inputs in a block of Q4_K. Matrices whose number of inputs is not a multiple of it become Q8_0."""
_RANGES = {kind: (codes * 2.0**-20, codes * 65504.0) for kind, codes in (("Q8_0", 127), ("Q4_0", 8))}
_RANGES["Q4_K"] = 480 * 2.0**-24, 63 * 65504.0
"""Smallest and largest value allowed for the largest weight of a matrix, by block type. Above, fp16 overflows. Below,
fp16 holds the scale less exactly than to a thirtieth. The scale of Q4_K is an fp16 number times an integer from 32 to
63."""


class QuantizedAtLoad(QuantizedTensors):
    """A checkpoint whose projections are quantized when they are read."""

    def __init__(self, tensors: Any) -> None:
        """Wrap `tensors`, a checkpoint of any kind."""
        self.folder = tensors.folder
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Check the wrapped checkpoint: all `required` tensors, nothing else but `optional` ones. Raises
        CheckpointError."""
        self._tensors.check(required, optional)

    def is_quantized(self, name: str) -> bool:
        """Return whether the tensor `name` is a projection, which is quantized."""
        return name.endswith(PROJECTIONS)

    def mapped(self, name: str) -> Array:
        """Return the tensor `name`: projections quantized and dequantized to float32, others in the file's dtype."""
        if not self.is_quantized(name):
            plain: Array = self._tensors.mapped(name)
            return plain
        return self._numbers(name)

    @abstractmethod
    def _numbers(self, name: str) -> Array:
        """Return the projection `name`, quantized and dequantized, in float32."""


class Float8AtLoad(QuantizedAtLoad):
    """A checkpoint whose projections are quantized to FP8, with a scale for each output."""

    def raw(self, name: str) -> Raw:
        """Return the FP8 values and the scales of a projection. Raises CheckpointError for weights that are not
        finite."""
        values, scales = self._quantized(name)
        return Scaled8(values, scales, values.shape[1])

    def packed(self, name: str) -> PackedMatrix | None:
        """Return None, because native CPU passes read no FP8."""
        return None

    def coding(self, name: str) -> Coding | None:
        """Return the layout in which GPU kernels read a projection. None: they read it dequantized."""
        return coding_at_load("fp8", self._tensors.mapped(name).shape[1])

    def _numbers(self, name: str) -> Array:
        codes, scales = self._quantized(name)
        return converted(codes, FLOAT32) * scales

    def _quantized(self, name: str) -> tuple[Array, Array]:
        tensor: Array = self._tensors.mapped(name)
        if not np.isfinite(tensor).all():
            raise CheckpointError(f"{self.folder}: {name} cannot be quantized: not all of its weights are finite")
        return quantized(tensor)


class IntegersAtLoad(QuantizedAtLoad):
    """A checkpoint whose projections are quantized to INT8 by output, or to INT4 by group. Codes are the same on every
    device."""

    def __init__(self, tensors: Any, quantization: str) -> None:
        """Wrap `tensors`, a checkpoint of any kind, whose projections become `quantization`: `int8` or `int4`."""
        super().__init__(tensors)
        self._int4 = quantization == "int4"

    def packed(self, name: str) -> PackedMatrix | None:
        """Return a projection packed for native CPU passes. None for INT8 of inputs that are no multiple of 32. Raises
        CheckpointError for weights that are not finite."""
        return self.raw(name).packed()

    def raw(self, name: str) -> Grouped:
        """Return the integers and scales of a projection. Raises CheckpointError for weights that are not finite."""
        return quantized_integers(self.folder, name, self._tensors.mapped(name), int4=self._int4)

    def coding(self, name: str) -> Coding | None:
        """Return the layout in which GPU kernels read a projection. None: they read it dequantized."""
        return coding_at_load("int4" if self._int4 else "int8", self._tensors.mapped(name).shape[1])

    def _numbers(self, name: str) -> Array:
        return self.raw(name).numbers()


class BlocksAtLoad(QuantizedAtLoad):
    """A checkpoint whose projections are quantized to a block type of GGML: by the package gguf to integers by groups
    of 32 inputs, with fp16 scales, or by the core to Q4_K."""

    def __init__(self, tensors: Any, quantization: str) -> None:
        """Wrap `tensors`, a checkpoint of any kind, whose projections become `quantization`: `q8_0`, `q4_0` or
        `q4_k`."""
        super().__init__(tensors)
        self._asked = quantization

    def packed(self, name: str) -> PackedMatrix:
        """Return a projection packed for native CPU passes. Raises CheckpointError for weights that fp16 scales cannot
        hold."""
        return PackedMatrix(*self._blocks(name))

    def raw(self, name: str) -> Raw:
        """Return the integers and scales of a projection, and the minima of Q4_K. Raises CheckpointError for weights
        that fp16 scales cannot hold."""
        kind, blocks = self._blocks(name)
        return WITH_MINIMA[kind][0](blocks) if kind in WITH_MINIMA else GROUPED[kind](blocks)

    def coding(self, name: str) -> Coding | None:
        """Return the layout in which GPU kernels read a projection. None: they read it dequantized."""
        return coding_at_load(self._asked, self._tensors.mapped(name).shape[1])

    def _numbers(self, name: str) -> Array:
        kind, blocks = self._blocks(name)
        return GROUPED[kind](blocks).numbers() if kind in GROUPED else PackedMatrix(kind, blocks).numbers()

    def _blocks(self, name: str) -> tuple[str, Array]:
        """Return the block type of a projection and its blocks, uint8 `[out, bytes]`."""
        matrix = np.ascontiguousarray(converted(self._tensors.mapped(name), FLOAT32))
        size = matrix.shape[1]
        kind = block_type(self._asked, size)
        if kind != self._asked.upper():
            _log_other_type(self.folder, ".".join(name.split(".")[-2:]), size, kind)
        if size % PACKED_UNIT:
            reason = f"{kind} needs a multiple of {PACKED_UNIT} inputs, and it has {size}"
            raise CheckpointError(f"{self.folder}: {name} cannot be quantized: {reason}")
        largest, (least, most) = np.abs(matrix).max(initial=0.0), _RANGES[kind]
        if largest != 0 and not least <= largest <= most:
            reason = f"its largest weight is {largest:g}, and must be 0 or from {least:g} to {most:g}; use int8"
            raise CheckpointError(f"{self.folder}: {name} cannot be quantized to {kind}: {reason}")
        if kind == "Q4_K":
            return kind, quantize_q4_k(name, matrix)
        from gguf import GGMLQuantizationType, quants  # which takes a quarter of a second

        with np.errstate(all="ignore"):  # blocks of tiny numbers become zeros
            return kind, quants.quantize(matrix, GGMLQuantizationType[kind])


@functools.cache
def _log_other_type(folder: Path | str, projection: str, size: int, kind: str) -> None:
    """Log once, not for each layer, that the matrices `projection` become `kind`."""
    reason = f"its {size} inputs are no multiple of {SUPER_BLOCK}"
    logger.info("%s: each %s becomes %s in place of Q4_K: %s", folder, projection, kind, reason)


def block_type(quantization: str, size: int) -> str:
    """Return the block type to which `quantization` (`q8_0`, `q4_0` or `q4_k`) quantizes a matrix with `size`
    inputs."""
    return "Q8_0" if quantization == "q4_k" and size % SUPER_BLOCK else quantization.upper()


def quantized_at_load(tensors: Any, quantization: str) -> QuantizedAtLoad:
    """Return the checkpoint `tensors` with projections that are quantized to `quantization`, one of `AT_LOAD`, when
    they are read."""
    if quantization == "fp8":
        return Float8AtLoad(tensors)
    return (BlocksAtLoad if quantization.upper() in _RANGES else IntegersAtLoad)(tensors, quantization)


def int4_group(size: int) -> int:
    """Return the number of inputs per INT4 group for a matrix with `size` inputs: the first of `INT4_GROUPS` that
    divides it, else the last."""
    return next((group for group in INT4_GROUPS if size % group == 0), INT4_GROUPS[-1])


def coding_at_load(quantization: str, size: int) -> Coding | None:
    """Return the layout on a GPU of a matrix with `size` inputs that is quantized while it is loaded. None: GPU kernels
    read it dequantized."""
    if quantization == "int4":
        return coding_of(("int4", "int8"), int4_group(size), size)
    if quantization.upper() in _RANGES:
        kind = block_type(quantization, size)
        if kind == "Q4_K":
            return WITH_MINIMA[kind][1]
        return coding_of(("int8",) if kind == "Q8_0" else ("int4", "int8"), PACKED_UNIT, size)
    return coding_of((quantization,), 0, size)


def quantized_integers(folder: Path | str, name: str, matrix: Array, *, int4: bool) -> Grouped:
    """Return `matrix` `[out, in]` in INT4 by group, or in INT8 by output, symmetric, with scales that bf16 holds.

    Raises CheckpointError, which names the tensor of `folder`, for weights that are not finite, or if the inputs do not
    divide into groups.
    """
    if matrix.dtype not in (FLOAT32, BFLOAT16):
        matrix = converted(matrix, FLOAT32)
    matrix = aligned(matrix)
    out, size = matrix.shape
    group = int4_group(size) if int4 else size
    if size % group:
        reason = f"INT4 needs a multiple of {group} inputs, and it has {size}"
        raise CheckpointError(f"{folder}: {name} cannot be quantized: {reason}")
    integers, scales = np.empty((out, size), np.int8), np.empty((out, size // group), BFLOAT16)
    try:
        quantize_weight(name, bits(matrix), 7 if int4 else 127, integers, bits(scales))
    except InvalidBufferError as fault:
        raise CheckpointError(f"{folder}: {name} cannot be quantized: {fault}") from fault
    return Grouped(integers, converted(scales, FLOAT32))
