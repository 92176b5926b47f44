"""Projections rounded to FP8 as they are loaded, whatever checkpoint they come from: what a GPU would compute with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specrs.errors import CheckpointError
from specrs.kernels.coded_weight import CodedWeight
from specrs.kernels.linear import Codes
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.quantization.fp8 import coded_by_output, quantized

PROJECTIONS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""How names of layers' projections end, experts' too; those of routers do not."""


class Float8AtLoad(QuantizedTensors):
    """A checkpoint whose layers' projections have the numbers of FP8 with a scale for each output."""

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

    def mapped(self, name: str) -> Tensor:
        """See `QuantizedTensors`."""
        if not self.is_quantized(name):
            plain: Tensor = self._tensors.mapped(name)
            return plain
        codes, scales = self._quantized(name)
        return codes.float() * scales

    def coded(self, name: str) -> CodedWeight | None:
        """See `QuantizedTensors`."""
        return coded_by_output(*self._quantized(name))

    def _quantized(self, name: str) -> tuple[Tensor, Tensor]:
        tensor: Tensor = self._tensors.mapped(name)
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{self.folder}: {name} cannot be quantized: not all of its weights are finite")
        return quantized(tensor)

    def codes(self, name: str) -> Codes | None:
        """See `QuantizedTensors`."""
        return None

    def coded_bits(self, name: str) -> int | None:
        """See `QuantizedTensors`."""
        return 8
