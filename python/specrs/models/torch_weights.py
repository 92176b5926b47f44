"""The weights of a dense decoder as torch holds them, and what they say of it. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from specrs.arrays import Array
from specrs.kernels.coded_weight import CodedWeight
from specrs.kernels.linear import Weight
from specrs.models.base import TorchModel
from specrs.models.dense_weights import DenseFacts, DenseWeights, ExpertWeights, LayerWeights
from specrs.models.kv_cache import KVCache
from specrs.models.torch_arrays import NUMPY_DTYPES, to_torch

CPU = torch.device("cpu")
TorchExperts: TypeAlias = ExpertWeights[Tensor, Weight]
TorchLayer: TypeAlias = LayerWeights[Tensor, Weight]


@dataclass(frozen=True, slots=True)
class TorchWeights(DenseWeights[Tensor, Weight, torch.dtype]):
    """Weights of a dense decoder on one device, or one rank's part of them. The LM head of a bf16 model on a CPU is
    fp32, see `Dense.compute_logits`."""

    device: torch.device = CPU


def has_fp8_rows(weights: TorchWeights) -> bool:
    """Whether products of some layer are of rows rounded to FP8."""
    projections = [w for layer in weights.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return any(isinstance(w, CodedWeight) and w.fp8_rows for w in projections)


def with_fp8_rows(weights: TorchWeights) -> TorchWeights:
    """Return the same weights; those in FP8 are multiplied with rows rounded to FP8."""

    def of(w: Weight) -> Weight:
        return replace(w, fp8_rows=True) if isinstance(w, CodedWeight) and w.coding.kind == "fp8" else w

    made = [replace(w, qkv=of(w.qkv), o=of(w.o), gate_up=of(w.gate_up), down=of(w.down)) for w in weights.layers]
    return replace(weights, layers=tuple(made))


class TorchFacts(DenseFacts, TorchModel):
    """What a dense decoder is that torch computes."""

    weights: TorchWeights

    @property
    def dtype(self) -> np.dtype[Any]:
        """See `Model`; like what follows."""
        return NUMPY_DTYPES[self.weights.dtype]

    @property
    def cache_dtype(self) -> np.dtype[Any]:
        """See `DenseFacts`."""
        return NUMPY_DTYPES[self._cached]

    @property
    def device(self) -> torch.device:
        """See `TorchModel`."""
        return self.weights.device

    @property
    def device_type(self) -> str:
        """See `Model`."""
        return self.weights.device.type

    def place(self, array: Array) -> Tensor:
        """See `DenseFacts`."""
        return to_torch(array).to(self.weights.device, self.weights.dtype)

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """See `Model`."""
        return KVCache.allocate(self.config, num_blocks, block_size, self._cached, self.device, self.kv_groups)

    @property
    def _cached(self) -> torch.dtype:
        return self.weights.cache_dtype or self.weights.dtype
