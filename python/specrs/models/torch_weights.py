"""Weights of a decoder as torch tensors, and the facts that follow from them. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from specrs.arrays import Array
from specrs.kernels.linear import Weight
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.base import TorchModel
from specrs.models.decoder_weights import DecoderFacts, DecoderWeights, ExpertWeights, LayerWeights
from specrs.models.kv_cache import KVCache
from specrs.models.torch_arrays import NUMPY_DTYPES, to_torch
from specrs.parallel.ranks import Ranks

CPU = torch.device("cpu")
TorchExperts: TypeAlias = ExpertWeights[Tensor, Weight]
TorchLayer: TypeAlias = LayerWeights[Tensor, Weight]


@dataclass(frozen=True, slots=True)
class TorchWeights(DecoderWeights[Tensor, Weight, torch.dtype]):
    """Weights of a decoder on one device, or one rank's part of them. On a CPU, the LM head of a bf16 model is stored
    as fp32; `TorchDecoder.compute_logits` says why."""

    device: torch.device = CPU
    """Device that holds the weights."""


def has_fp8_rows(weights: TorchWeights) -> bool:
    """Return whether some layer rounds rows to FP8 before every product."""
    return any(w.fp8_rows for w in _quantized(weights))


def has_fp8_wide_rows(weights: TorchWeights) -> bool:
    """Return whether some layer rounds rows to FP8 before its products of many rows."""
    return any(w.fp8_rows or w.fp8_wide_rows for w in _quantized(weights))


def _quantized(weights: TorchWeights) -> list[QuantizedWeight]:
    projections = [w for layer in weights.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return [w for w in projections if isinstance(w, QuantizedWeight)]


def with_fp8_rows(weights: TorchWeights, *, wide_only: bool = False) -> TorchWeights:
    """Return the same weights, whose FP8 matrices are multiplied with rows rounded to FP8. With `wide_only`, rows are
    rounded only in products of many rows, and only if the device multiplies FP8 numbers."""

    def of(w: Weight) -> Weight:
        if not isinstance(w, QuantizedWeight) or w.coding.kind != "fp8":
            return w
        return replace(w, fp8_wide_rows=True) if wide_only else replace(w, fp8_rows=True)

    made = [replace(w, qkv=of(w.qkv), o=of(w.o), gate_up=of(w.gate_up), down=of(w.down)) for w in weights.layers]
    return replace(weights, layers=tuple(made))


class TorchHeld:
    """Members `dtype`, `cache_dtype` and `device` for decoders and heads whose weights are torch tensors."""

    weights: Any

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of activations, and of the KV cache unless that is quantized to FP8."""
        return NUMPY_DTYPES[self.weights.dtype]

    @property
    def cache_dtype(self) -> np.dtype[Any]:
        """Dtype of K and V in the cache."""
        return NUMPY_DTYPES[self._cached]

    @property
    def device(self) -> torch.device:
        """The device that holds the weights."""
        device: torch.device = self.weights.device
        return device

    @property
    def _cached(self) -> torch.dtype:
        cached: torch.dtype = self.weights.cache_dtype or self.weights.dtype
        return cached


class TorchFacts(TorchHeld, DecoderFacts, TorchModel):
    """Facts of `TorchModel` that follow from a decoder's configuration and weights."""

    weights: TorchWeights
    ranks: Ranks | None
    """Tensor parallel ranks, each with a part of the weights and of the KV cache. None: there is one rank."""

    @property
    def device_name(self) -> str:
        """Device that holds the weights: `cpu`, or `cuda:N`."""
        return str(self.weights.device)

    def place(self, array: Array) -> Tensor:
        """Return a matrix of an adapter as a tensor in the model's dtype. On a CPU passes read it. For a GPU it is
        page-locked memory of the host, from which steps copy it into a slot."""
        return self.held(to_torch(array).to(self.weights.dtype))

    def held(self, matrix: Tensor) -> Tensor:
        """Return a matrix of an adapter in the memory that `place` describes. `matrix` is in host memory, in the
        model's dtype."""
        return matrix if self.weights.device.type in ("cpu", "meta") else matrix.pin_memory()

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Return a zeroed cache of `num_blocks` blocks of `block_size` positions, and a scratch block."""
        return KVCache.allocate(self.config, num_blocks, block_size, self._cached, self.device, self.kv_groups)
