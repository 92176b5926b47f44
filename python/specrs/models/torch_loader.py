"""From a folder or hub id to a model that torch computes. Knows the names of tensors; reads files through `loader`."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from specrs.arrays import Array
from specrs.kernels.coded_weight import CodedWeight, fuse
from specrs.kernels.frequencies import Powers
from specrs.kernels.kv_codes import FRACTIONS
from specrs.kernels.linear import DenseWeight, Weight, dense_weight
from specrs.kernels.rotary import torch_powers
from specrs.models.coded import coded_weight, shard_codes
from specrs.models.config import ModelConfig
from specrs.models.dense import Dense
from specrs.models.dense_weights import ExpertWeights
from specrs.models.experts import Experts
from specrs.models.layer_reader import LayerReader, ModelReader
from specrs.models.loader import open_checkpoint, resolve_dtype, with_own_head
from specrs.models.quantization.at_load import Float8AtLoad, IntegersAtLoad
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.shards import Shard, check_divides
from specrs.models.tensors import EMBEDDING, LM_HEAD, Tensors
from specrs.models.torch_arrays import NUMPY_DTYPES, TORCH_DTYPES, to_torch
from specrs.models.torch_tensors import TorchTensors, torch_tensors
from specrs.models.torch_weights import TorchExperts, TorchWeights
from specrs.parallel.ranks import Ranks

logger = logging.getLogger("specrs")


def load_model(
    source: str | Path,
    *,
    dtype: str | torch.dtype | np.dtype[Any] = "auto",
    device: torch.device | str | Ranks = "cpu",
    revision: str | None = None,
    load_format: str = "auto",
    max_model_len: int | None = None,
    quantization: str | None = None,
    cache_dtype: np.dtype[Any] | None = None,
) -> Dense:
    """Load the model of a folder, hub id or GGUF file; every tensor is checked before the first is read.

    If `device` is this rank of several, it is the rank's part of the model, whose passes run on all ranks at once.

    `max_model_len` is that of the engine, which LongRoPE depends on; None: the model's.
    With `load_format` `dummy` only its config.json is read, and weights are random numbers, the same each time.

    `dtype` is float32, float64, bfloat16 or auto: the checkpoint's dtype on a GPU; on a CPU float32 (float64 for a
    float64 checkpoint), because many CPUs have no bf16 products and those that do gain less than the text may change.
    `cache_dtype` is the type of K and V in the cache; None: `dtype`.

    On a GPU codes of a quantized checkpoint stay codes where kernels read them; elsewhere they become numbers, exact in
    float32. `quantization` `fp8`, `int8` or `int4` quantizes the projections of one that is not.
    Scales of K and V that are cached as codes are the checkpoint's, 1 where it has none.

    Raises CheckpointError, or UnsupportedModelError for what is not implemented.
    """
    ranks = device if isinstance(device, Ranks) else None
    device = device.device if isinstance(device, Ranks) else torch.device(device)
    config, checkpoint = open_checkpoint(source, revision, load_format)
    config = config.for_length(max_model_len)
    if quantization == "fp8":
        checkpoint = Float8AtLoad(checkpoint)
    elif quantization is not None:
        checkpoint = IntegersAtLoad(checkpoint, quantization)
    resolved = TORCH_DTYPES[resolve_dtype(str(dtype).removeprefix("torch."), config, device.type)]
    shard = None
    if ranks is not None:
        check_divides(config, str(source), "tensor_parallel_size", ranks.size)
        shard = Shard(ranks.rank, ranks.size)
    if device.type == "cuda" and isinstance(checkpoint, QuantizedTensors):
        loader: Loader = CodedLoader(config, checkpoint, resolved, device, shard)
    else:
        loader = Loader(config, checkpoint, resolved, device, shard)
    loader.cache_dtype = None if cache_dtype is None else TORCH_DTYPES[cache_dtype]
    return Dense(loader.load(), ranks=ranks)


def load_tensors(config: ModelConfig, tensors: TorchTensors, dtype: torch.dtype, device: torch.device) -> Dense:
    """Return a model of `config` from wherever its tensors are, under the names of a checkpoint."""

    def has_same_head() -> bool:
        head, embedding = (tensors.tensor(name, dtype, device) for name in (LM_HEAD, EMBEDDING))
        return head.data_ptr() == embedding.data_ptr() or torch.equal(head, embedding)

    config = with_own_head(config, tensors, has_same_head)
    resolved = TORCH_DTYPES[resolve_dtype(str(dtype).removeprefix("torch."), config, device.type)]
    return Dense(Loader(config, tensors, resolved, device).load())


class TorchReader(LayerReader[Tensor, Weight]):
    """Fuses and packs the tensors of decoder layers for torch's models."""

    checkpoint: TorchTensors

    def __init__(self, checkpoint: TorchTensors, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device

    @property
    def vector_dtype(self) -> np.dtype[Any]:
        """See `LayerReader`; like what follows."""
        return NUMPY_DTYPES[self.dtype]

    def powers(self) -> Powers:
        """See `LayerReader`: those of transformers, which torch computes, too."""
        return torch_powers

    def place(self, array: Array) -> Tensor:
        """See `LayerReader`."""
        return to_torch(array).to(self.device)

    def read(self, name: str) -> Tensor:
        """See `LayerReader`."""
        return self.checkpoint.tensor(name, self.dtype, self.device)

    def matrix(self, name: str) -> Tensor:
        """See `LayerReader`."""
        return self.read(name)

    def experts(self, prefix: str, experts: Experts) -> TorchExperts:
        """Return the experts of a layer, and their router, as numbers."""
        block, (gate, up, down) = prefix + experts.block, experts.projections
        names = [f"{block}.experts.{i}." for i in range(experts.count)]
        parts = [[name + gate, name + up] for name in names], [[name + down] for name in names]
        gate_up, outputs = (self.stack(of, "weight") for of in parts)
        biases = (self.stack(parts[0], "bias"), self.stack(parts[1], "bias")) if experts.biases else None
        packed = [
            [
                dense_weight(weight, None if biases is None else biases[i][j])
                for j, weight in enumerate(stacked.unbind(0))
            ]
            for i, stacked in enumerate((gate_up, outputs))
        ]
        in_place = all(isinstance(weight, DenseWeight) for weights in packed for weight in weights)
        router = f"{block}.{experts.router}"
        return ExpertWeights(
            router=dense_weight(self.read(f"{router}.weight"), self.read(f"{router}.bias") if experts.biases else None),
            gate_up=tuple(packed[0]),
            down=tuple(packed[1]),
            stacked=(gate_up, outputs) if in_place else None,
            stacked_biases=biases if in_place else None,
        )

    def stack(self, names: list[list[str]], kind: str) -> Tensor:
        """Return weights `[experts, out, in]` or biases `[experts, out]` of each expert's projections above each
        other."""
        stacked = torch.empty(0)
        for i, of_expert in enumerate(names):
            weight = torch.cat([self.read(f"{name}.{kind}") for name in of_expert])
            if i == 0:
                stacked = weight.new_empty((len(names), *weight.shape))
            stacked[i] = weight
        return stacked

    def nothing(self) -> Weight:
        """See `LayerReader`."""
        return dense_weight(torch.empty((0, 0), dtype=self.dtype, device=self.device))

    def linear(self, names: list[str], *, bias: bool) -> Weight:
        """See `LayerReader`."""
        weight = torch.cat([self.read(f"{name}.weight") for name in names])
        return dense_weight(weight, torch.cat([self.read(f"{name}.bias") for name in names]) if bias else None)


class Loader(TorchReader, ModelReader[Tensor, Weight, torch.dtype]):
    """A `TorchReader` of all tensors of one model, or of one rank's part of it."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Tensors | TorchTensors,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        """`config` and `checkpoint` are those of the whole model; None: `shard` is all of it."""
        own = hasattr(checkpoint, "tensor")
        tensors = cast("TorchTensors", checkpoint) if own else torch_tensors(cast("Tensors", checkpoint), config, shard)
        super().__init__(tensors, dtype, device)
        self.config = config
        self.held = config if shard is None else shard.of_config(config)

    def load(self) -> TorchWeights:
        """See `ModelReader`."""
        self.kv_codes = self.cache_dtype in FRACTIONS
        made = super().load()
        return TorchWeights(**{field.name: getattr(made, field.name) for field in fields(made)}, device=self.device)

    def lm_head(self, weight: Tensor) -> Weight:
        """See `ModelReader`."""
        return dense_weight(weight.float() if self.dtype == torch.bfloat16 and self.device.type == "cpu" else weight)


class CodedLoader(Loader):
    """Leaves codes as they are where the kernels of a GPU read them, and makes numbers of others."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: QuantizedTensors,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        super().__init__(config, checkpoint, dtype, device, shard)
        self.codes, self.shard = checkpoint, shard
        self.num_codes, self.code_bytes = 0, 0

    def load(self) -> TorchWeights:
        """See `ModelReader`."""
        weights = super().load()
        logger.info(
            "%s: %d matrices of %d layers stay codes, %.2f GiB; others are %s",
            self.checkpoint.folder,
            self.num_codes,
            self.config.num_layers,
            self.code_bytes / 2**30,
            str(self.dtype).removeprefix("torch."),
        )
        return weights

    def linear(self, names: list[str], *, bias: bool) -> Weight:
        """See `LayerReader`."""
        coded = [self.coded(f"{name}.weight") for name in names]
        parts = [part.to(self.device) for part in coded if part is not None]
        biases = torch.cat([self.read(f"{name}.bias") for name in names]) if bias else None
        fused = fuse(parts, biases) if len(parts) == len(names) else None
        if fused is None:
            return super().linear(names, bias=bias)
        self.num_codes, self.code_bytes = self.num_codes + 1, self.code_bytes + fused.num_bytes
        return fused

    def coded(self, name: str) -> CodedWeight | None:
        """Return the codes of a weight that are held here; None: it becomes numbers."""
        whole = coded_weight(self.codes.raw(name)) if self.codes.is_quantized(name) else None
        return whole if whole is None or self.shard is None else shard_codes(self.shard, name, whole, self.config)
