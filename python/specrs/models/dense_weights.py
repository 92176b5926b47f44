"""The weights of a dense decoder, whatever holds them, and what they say of it. Computes nothing.

T is the type of arrays: numpy's for the native pass of a CPU, torch's tensors elsewhere. W is the type of projections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from specrs.arrays import Array
from specrs.kernels.kv_scales import UNSCALED, KVScales
from specrs.models.base import Model
from specrs.models.config import ModelConfig
from specrs.models.kv_dtypes import kv_block_bytes
from specrs.models.stored import NativeWeight

T = TypeVar("T")
W = TypeVar("W")
D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class ExpertWeights(Generic[T, W]):
    """The experts of a layer."""

    router: W
    """hidden -> experts"""
    gate_up: tuple[W, ...]
    """Of each expert, as of an MLP; like `down`."""
    down: tuple[W, ...]
    stacked: tuple[T, T] | None = None
    """The memory of `gate_up` and `down`, `[experts, out, in]`, as the kernels of a GPU read it; None elsewhere."""
    stacked_biases: tuple[T, T] | None = None
    """The memory of their biases, `[experts, out]`; None: there are none."""


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[T, W]):
    """One layer. Projections that share an input are one matrix: q, k, v above each other, and gate, up."""

    input_norm: T
    """[hidden], before attention, like `post_attention_norm` before the MLP; [0] where norms come after alone."""
    qkv: W
    """hidden -> (heads + 2 * kv_heads) * head_dim"""
    qk_norm: T | None
    """[heads + kv_heads, head_dim]: the query norm for each query head, then the key norm for each KV head. With
    `qk_norm_whole` the same shape, weights of one norm over all query heads and one over all KV heads."""
    o: W
    """heads * head_dim -> hidden"""
    post_attention_norm: T
    """[hidden]"""
    gate_up: W
    """hidden -> 2 * intermediate; of a layer with experts nothing, like `down`."""
    down: W
    """intermediate -> hidden"""
    attention_output_norm: T | None = None
    """[hidden], of what attention adds to the residual stream, like `mlp_output_norm` of what the MLP adds."""
    mlp_output_norm: T | None = None
    experts: ExpertWeights[T, W] | None = None
    sinks: T | None = None
    """[heads], see `ModelConfig.sinks`."""
    kv_scales: KVScales = UNSCALED
    """Of its K and V where they are cached as codes."""


@dataclass(frozen=True, slots=True)
class DenseWeights(Generic[T, W, D]):
    """Weights of a dense decoder, or one rank's part of them. D is the type of dtypes, numpy's or torch's."""

    config: ModelConfig
    """With the heads and features that are here."""
    dtype: D
    """Type of activations."""
    embedding: T
    """[vocab, hidden]; of a rank its rows, see `models.shards`, as of the LM head."""
    layers: tuple[LayerWeights[T, W], ...]
    final_norm: T
    """[hidden], divided by `logits_scaling`: so are final states, and with them logits."""
    lm_head: W
    """hidden -> vocab"""
    rotary: T
    """[rotary_dim] float32, signed frequencies."""
    rotaries: tuple[T | None, ...] = ()
    """Of each layer; None: none, (): `rotary` of all."""
    cache_dtype: D | None = None
    """Type of K and V in the cache; None: `dtype`."""


NativeLayer = LayerWeights[Array, NativeWeight]
NativeExperts = ExpertWeights[Array, NativeWeight]
NativeWeights = DenseWeights[Array, NativeWeight, np.dtype[Any]]
"""What the native pass of a CPU reads."""


class DenseFacts(Model):
    """What a dense decoder is, whatever computes it."""

    weights: DenseWeights[Any, Any, Any]

    @property
    def config(self) -> ModelConfig:
        """As config.json has it."""
        return self.weights.config

    @property
    def cache_dtype(self) -> np.dtype[Any]:
        """Type of K and V in the cache."""
        raise NotImplementedError

    def with_kv_groups(self, size: int) -> DenseFacts:
        """Return the same with its layers in KV groups of at most `size`, one of `group_sizes`."""
        raise NotImplementedError

    def place(self, array: Array) -> Any:
        """Return `array` in the model's dtype, where its weights are."""
        raise NotImplementedError

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
        return kv_block_bytes(self.config, block_size, self.cache_dtype.itemsize, self.kv_groups)
