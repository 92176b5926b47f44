"""The weights of a dense decoder, and what they say of it. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specrs.kernels.coded_weight import CodedWeight
from specrs.kernels.kv_codes import UNSCALED, KVScales
from specrs.kernels.linear import Weight
from specrs.models.base import Model
from specrs.models.config import ModelConfig
from specrs.models.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of a layer."""

    router: Weight
    """hidden -> experts"""
    gate_up: tuple[Weight, ...]
    """Of each expert, as of an MLP; like `down`."""
    down: tuple[Weight, ...]
    stacked: tuple[Tensor, Tensor] | None = None
    """The memory of `gate_up` and `down`, `[experts, out, in]`, as the kernels of a GPU read it; None where they are
    packed for a CPU."""
    stacked_biases: tuple[Tensor, Tensor] | None = None
    """That of their biases, `[experts, out]`; None: there are none."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections that share an input are one matrix: q, k, v above each other, and gate, up."""

    input_norm: Tensor
    """[hidden], before attention, like `post_attention_norm` before the MLP; [0] where norms are behind alone."""
    qkv: Weight
    """hidden -> (heads + 2 * kv_heads) * head_dim"""
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]: the query norm for each query head, then the key norm for each KV head. With
    `qk_norm_whole` the same shape, weights of one norm over all query heads and one over all KV heads."""
    o: Weight
    """heads * head_dim -> hidden"""
    post_attention_norm: Tensor
    """[hidden]"""
    gate_up: Weight
    """hidden -> 2 * intermediate; of a layer with experts nothing, like `down`."""
    down: Weight
    """intermediate -> hidden"""
    attention_output_norm: Tensor | None = None
    """[hidden], of what attention adds to the residual stream, like `mlp_output_norm` of what the MLP adds."""
    mlp_output_norm: Tensor | None = None
    experts: ExpertWeights | None = None
    sinks: Tensor | None = None
    """[heads], see `ModelConfig.sinks`."""
    kv_scales: KVScales = UNSCALED
    """Of its K and V where they are cached as codes."""


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """Weights of a dense decoder on one device, or one rank's part of them."""

    config: ModelConfig
    """With the heads and features that are here."""
    dtype: torch.dtype
    device: torch.device
    embedding: Tensor
    """[vocab, hidden]; of a rank its rows, see `models.shards`, as of the LM head."""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """[hidden], divided by `logits_scaling`: so are final states, and with them logits."""
    lm_head: Weight
    """hidden -> vocab; fp32 on a CPU also for bf16 models, see `Dense.compute_logits`."""
    rotary: Tensor
    """[rotary_dim] fp32, signed frequencies."""
    rotaries: tuple[Tensor | None, ...] = ()
    """Of each layer; None: none, (): `rotary` of all."""
    cache_dtype: torch.dtype | None = None
    """Of K and V in the cache; None: `dtype`."""


def has_fp8_rows(weights: DenseWeights) -> bool:
    """Whether products of some layer are of rows rounded to FP8."""
    projections = [w for layer in weights.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return any(isinstance(w, CodedWeight) and w.fp8_rows for w in projections)


def with_fp8_rows(weights: DenseWeights) -> DenseWeights:
    """The same weights; those in FP8 are multiplied with rows rounded to FP8."""

    def of(w: Weight) -> Weight:
        return replace(w, fp8_rows=True) if isinstance(w, CodedWeight) and w.coding.kind == "fp8" else w

    made = [replace(w, qkv=of(w.qkv), o=of(w.o), gate_up=of(w.gate_up), down=of(w.down)) for w in weights.layers]
    return replace(weights, layers=tuple(made))


class DenseFacts(Model):
    """What a dense model is, whatever computes it."""

    weights: DenseWeights

    @property
    def config(self) -> ModelConfig:
        """As config.json has it."""
        return self.weights.config

    @property
    def dtype(self) -> torch.dtype:
        """See `Model`; like what follows."""
        return self.weights.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of K and V in the cache."""
        return self.weights.cache_dtype or self.weights.dtype

    @property
    def device(self) -> torch.device:
        """See `Model`."""
        return self.weights.device

    @property
    def vocab_size(self) -> int:
        """See `Model`."""
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        """See `Model`."""
        return self.config.num_layers

    @property
    def max_position_embeddings(self) -> int:
        """See `Model`."""
        return self.config.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """See `Model`."""
        return self.config.eos_token_ids

    @property
    def num_parameters(self) -> int:
        """See ModelConfig.num_parameters."""
        return self.config.num_parameters

    @property
    def attention_ratio(self) -> float:
        """See `ModelConfig.attention_ratio`."""
        return self.config.attention_ratio

    @property
    def rope_magnitude(self) -> float:
        """What cos and sin of its angles are multiplied by."""
        return self.config.rope_magnitude

    @property
    def sliding_window(self) -> int | None:
        """See `Model`."""
        windows = [size for size in self.config.windows if size is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @property
    def ends_in_window(self) -> bool:
        """See `Model`."""
        return bool(self.config.windows) and self.config.windows[-1] is not None

    def bytes_per_block(self, block_size: int) -> int:
        """See `Model`."""
        return KVCache.bytes_per_block(self.config, block_size, self.cache_dtype, self.kv_groups)

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """See `Model`."""
        return KVCache.allocate(self.config, num_blocks, block_size, self.cache_dtype, self.device, self.kv_groups)
