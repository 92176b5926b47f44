"""Loader of models that torch computes, from a folder, hub id or GGUF file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from specrs.arrays import Array
from specrs.kernels.frequencies import Powers
from specrs.kernels.kv_codes import FRACTIONS
from specrs.kernels.linear import DenseWeight, Weight, dense_weight
from specrs.kernels.rotary import torch_powers
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import ExpertWeights
from specrs.models.experts import Experts
from specrs.models.layer_reader import LayerReader, ModelReader
from specrs.models.loader import DeviceDtypes, open_checkpoint, resolve_dtype, with_own_head
from specrs.models.quantization.at_load import quantized_at_load
from specrs.models.shards import Shard, check_divides
from specrs.models.tensors import EMBEDDING, LM_HEAD, Tensors
from specrs.models.torch_arrays import NUMPY_DTYPES, TORCH_DTYPES, to_torch
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_tensors import TorchTensors, torch_tensors
from specrs.models.torch_weights import TorchExperts, TorchWeights
from specrs.parallel.ranks import Ranks


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
) -> TorchDecoder:
    """Load the model of a folder, hub id or GGUF file onto a CPU. Checks all tensors before it reads the first.

    Args:
        dtype: float32, float64, bfloat16 or auto. auto is float32, or float64 for a float64 checkpoint: many CPUs have
            no bf16 products, and the others gain less than text may change.
        device: the CPU, or this rank of several. A rank loads its part of the model. Passes run on all ranks at once.
        load_format: with `dummy`, only config.json is read, and weights are random, the same each time.
        max_model_len: longest text of the engine in tokens, on which LongRoPE depends. None: the model's.
        quantization: one of `AT_LOAD` quantizes the projections of an unquantized checkpoint. None: no change.
        cache_dtype: dtype of K and V in the cache. None: `dtype`. An FP8 cache uses the checkpoint's KV scales, or 1.

    Quantized weights are dequantized in float32 and rounded to `dtype`. Raises CheckpointError, or
    UnsupportedModelError for what is not implemented.
    """
    ranks = device if isinstance(device, Ranks) else None
    device = device.device if isinstance(device, Ranks) else torch.device(device)
    config, checkpoint = open_model(source, revision, load_format, max_model_len, quantization)
    resolved = TORCH_DTYPES[resolve_dtype(str(dtype).removeprefix("torch."), config)]
    loader = Loader(config, checkpoint, resolved, device, shard_of(config, source, ranks))
    loader.cache_dtype = None if cache_dtype is None else TORCH_DTYPES[cache_dtype]
    return TorchDecoder(loader.load(), ranks=ranks)


def open_model(
    source: str | Path, revision: str | None, load_format: str, max_model_len: int | None, quantization: str | None
) -> tuple[ModelConfig, Tensors]:
    """Open a checkpoint for torch models: return its configuration, and its tensors, quantized to `quantization` as
    they are read. Reads no tensor.

    Raises CheckpointError if a file is missing or malformed, or UnsupportedModelError for what is not implemented.
    """
    config, checkpoint = open_checkpoint(source, revision, load_format)
    config = config.for_length(max_model_len)
    if quantization is None:
        return config, checkpoint
    return config, quantized_at_load(checkpoint, quantization)


def shard_of(config: ModelConfig, source: str | Path, ranks: Ranks | None) -> Shard | None:
    """Return the part of a model that this rank holds; None without ranks.

    Raises UnsupportedConfigError if the model cannot be split over this number of ranks.
    """
    if ranks is None:
        return None
    check_divides(config, str(source), "tensor_parallel_size", ranks.size)
    return Shard(ranks.rank, ranks.size)


def load_tensors(
    config: ModelConfig, tensors: TorchTensors, dtype: torch.dtype, device: torch.device, dtypes: DeviceDtypes
) -> TorchDecoder:
    """Return a model of `config` whose tensors come from any source with a checkpoint's names.

    Raises UnsupportedModelError for a `dtype` that is not among `dtypes`, the dtypes in which `device` computes.
    """

    def has_same_head() -> bool:
        head, embedding = (tensors.tensor(name, dtype, device) for name in (LM_HEAD, EMBEDDING))
        return head.data_ptr() == embedding.data_ptr() or torch.equal(head, embedding)

    config = with_own_head(config, tensors, has_same_head)
    resolved = TORCH_DTYPES[resolve_dtype(str(dtype).removeprefix("torch."), config, dtypes)]
    return TorchDecoder(Loader(config, tensors, resolved, device).load())


class TorchReader(LayerReader[Tensor, Weight]):
    """Reads, fuses and packs the tensors of decoder layers for torch models."""

    checkpoint: TorchTensors

    def __init__(self, checkpoint: TorchTensors, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device

    @property
    def vector_dtype(self) -> np.dtype[Any]:
        """Dtype of norms: the model's."""
        return NUMPY_DTYPES[self.dtype]

    def powers(self) -> Powers:
        """Return torch's powers of theta, which transformers uses too."""
        return torch_powers

    def place(self, array: Array) -> Tensor:
        """Return `array` as a tensor on the model's device, with its dtype unchanged."""
        return to_torch(array).to(self.device)

    def read(self, name: str) -> Tensor:
        """Return the tensor `name` in the model's dtype on its device."""
        return self.checkpoint.tensor(name, self.dtype, self.device)

    def matrix(self, name: str) -> Tensor:
        """Return the embedding or LM head `name` in the model's dtype on its device."""
        return self.read(name)

    def experts(self, prefix: str, experts: Experts) -> TorchExperts:
        """Return the router and experts of the layer whose tensor names begin with `prefix`, dequantized."""
        block, (gate, up, down) = prefix + experts.block, experts.projections
        names = [f"{block}experts.{i}." for i in range(experts.count)]
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
        router = f"{block}{experts.router}"
        return ExpertWeights(
            router=dense_weight(self.read(f"{router}.weight"), self.read(f"{router}.bias") if experts.biases else None),
            gate_up=tuple(packed[0]),
            down=tuple(packed[1]),
            stacked=(gate_up, outputs) if in_place else None,
            stacked_biases=biases if in_place else None,
            shared=self.shared_expert(block, experts),
            scales=self.router_scales(block, experts),
        )

    def stack(self, names: list[list[str]], kind: str) -> Tensor:
        """Return the weights `[experts, out, in]` or biases `[experts, out]` of experts. `names` has, for each expert,
        projections to be concatenated by rows. `kind` is `weight` or `bias`."""
        stacked = torch.empty(0)
        for i, of_expert in enumerate(names):
            weight = torch.cat([self.read(f"{name}.{kind}") for name in of_expert])
            if i == 0:
                stacked = weight.new_empty((len(names), *weight.shape))
            stacked[i] = weight
        return stacked

    def nothing(self) -> Weight:
        """Return an empty projection, for layers that do not have one."""
        return dense_weight(torch.empty((0, 0), dtype=self.dtype, device=self.device))

    def linear(self, names: list[str], *, bias: bool) -> Weight:
        """Return the projections `names`, which share an input, fused by rows into one."""
        weight = torch.cat([self.read(f"{name}.weight") for name in names])
        return dense_weight(weight, torch.cat([self.read(f"{name}.bias") for name in names]) if bias else None)


class Loader(TorchReader, ModelReader[Tensor, Weight, torch.dtype]):
    """Reads all tensors of one model, or of one rank's part of it."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Tensors | TorchTensors,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        """Prepare to read `checkpoint`. `checkpoint` and `config` are those of the whole model, also with `shard`.
        `shard`: the part to load; None: the whole model."""
        own = hasattr(checkpoint, "tensor")
        tensors = cast("TorchTensors", checkpoint) if own else torch_tensors(cast("Tensors", checkpoint), config, shard)
        super().__init__(tensors, dtype, device)
        self.config = config
        self.held = config if shard is None else shard.of_config(config)

    def load(self) -> TorchWeights:
        """Check and read all tensors. Raises CheckpointError for tensors that are missing, unknown or misshapen."""
        self.kv_codes = self.cache_dtype in FRACTIONS
        made = super().load()
        return TorchWeights(**{field.name: getattr(made, field.name) for field in fields(made)}, device=self.device)

    def lm_head(self, weight: Tensor) -> Weight:
        """Return the LM head whose weights are `weight`, in fp32 for a bf16 model on a CPU."""
        return dense_weight(weight.float() if self.dtype == torch.bfloat16 and self.device.type == "cpu" else weight)
