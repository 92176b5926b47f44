"""Weights of a decoder in arrays of any library, and the facts that follow from its configuration. Computes nothing.

T is the type of arrays: NumPy arrays for native passes, torch tensors elsewhere. W is the type of projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from specrs.arrays import Array
from specrs.kernels.kv_scales import UNSCALED, KVScales
from specrs.models.base import Model
from specrs.models.config import ModelConfig
from specrs.models.kv_dtypes import kv_block_bytes
from specrs.models.kv_groups import group_sizes
from specrs.models.stored import NativeWeight

T = TypeVar("T")
W = TypeVar("W")
D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class SharedWeights(Generic[W]):
    """Expert of one layer that every row uses."""

    gate: W | None
    """Projection hidden -> 1. The expert's output is multiplied by its sigmoid. None: it is added as it is."""
    gate_up: W
    """Fused gate and up projection: hidden -> 2 * intermediate."""
    down: W
    """Down projection: intermediate -> hidden."""


@dataclass(frozen=True, slots=True)
class ParallelNorms(Generic[T]):
    """Norms of a layer that has an MLP as well as experts, each `[hidden]`. To the residual stream h the layer adds
    `N(mlp_output(MLP) + expert_output(experts(expert_input(h))))`. MLP is the output of the MLP, which has a norm of
    its own before it. N is `LayerWeights.mlp_output_norm`."""

    mlp_output: T
    expert_input: T
    expert_output: T


@dataclass(frozen=True, slots=True)
class RouterScales(Generic[T]):
    """Factors of a router that reads the residual stream h itself. Its input is `norm(h) * hidden / sqrt(size of h)`,
    and the norm has no weights."""

    hidden: T
    """Factor of the router's input, [hidden]."""
    experts: T
    """Factor of the weight of each chosen expert, [experts]."""


@dataclass(frozen=True, slots=True)
class ExpertWeights(Generic[T, W]):
    """Router and experts of one layer."""

    router: W
    """Projection hidden -> number of experts."""
    gate_up: tuple[W, ...]
    """Gate and up projection of each expert, fused: hidden -> 2 * intermediate."""
    down: tuple[W, ...]
    """Down projection of each expert: intermediate -> hidden."""
    stacked: tuple[T, T] | None = None
    """All of `gate_up` and all of `down` as two tensors `[experts, out, in]` over the same memory, for GPU kernels.
    None if experts have memory of their own, or are quantized."""
    stacked_biases: tuple[T, T] | None = None
    """Biases of `gate_up` and `down` as two tensors `[experts, out]`. None: there are no biases."""
    shared: SharedWeights[W] | None = None
    """Expert that every row uses in addition. None: there is none."""
    scales: RouterScales[T] | None = None
    """Factors of a router that reads the residual stream. None: the router reads the same normed rows as the
    experts."""
    bias: T | None = None
    """Numbers added to sigmoids for the choice of experts, [experts], float32 or float64. None: the largest logits are
    chosen."""
    norms: ParallelNorms[T] | None = None
    """Norms of MLP and experts. None: the layer has experts and no MLP."""
    stacked_quantized: tuple[W, W] | None = None
    """All of `gate_up` and all of `down` as two quantized weights `[experts * out, in]` over the same memory, for GPU
    kernels. None if experts are not quantized."""


@dataclass(frozen=True, slots=True)
class DeltaWeights(Generic[T]):
    """Weights of a gated delta net besides its projections."""

    conv: T
    """Weights of the convolution, [kernel, conv_dim]; the last row is for the row's own input."""
    a_log: T
    """Logarithm of the decay's factor of each value head, [value_heads], float32 or float64."""
    dt_bias: T
    """Number added to a before its softplus, [value_heads], float32 or float64."""
    norm: T
    """Norm of each value head's output before the gate, [value_dim], float32 or float64."""


@dataclass(frozen=True, slots=True)
class AdditionWeights(Generic[T, W]):
    """Weights with which a layer adds its embedding of the row's token to the residual stream h: `h += norm(projection
    (gelu(gate h) * embedding))`."""

    gate: W
    """Projection hidden -> size."""
    projection: W
    """Projection size -> hidden."""
    norm: T
    """[hidden]"""


@dataclass(frozen=True, slots=True)
class LayerEmbeddingWeights(Generic[T, W]):
    """Weights of the embeddings of single layers. For the scaled embedding e of a token, layer i's is `(norm(projection
    e / sqrt(hidden))[i] + table[token][i] * sqrt(size)) / sqrt(2)`."""

    table: T
    """[vocab, layers * size]"""
    projection: W
    """Projection hidden -> layers * size."""
    norm: T
    """Norm of each layer's part of the projection, [size]."""


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[T, W]):
    """Weights of one layer. Projections that share an input are fused by rows: q, k and v; gate and up."""

    input_norm: T
    """Norm before attention, [hidden]. [0] if the layer has no norm there."""
    qkv: W
    """Fused q, k and v projection: hidden -> (heads + 2 * kv_heads) * head_dim. Some layers project only q, or q and k:
    see `LayerSizes`. With `output_gate`, each query is followed by its gate. In a layer with a state, it is the input
    projection of what replaces attention: see `tensors.state_inputs`."""
    qk_norm: T | None
    """[heads + kv_heads, head_dim]: the query norm repeated for each query head, then the key norm for each KV head.
    With `qk_norm_whole`, the weights of one norm over all query heads and one over all KV heads, in the same shape.
    With `value_norm`, rows of 1 for the value heads follow. A layer without keys has rows for its query heads alone."""
    o: W
    """Output projection of attention, heads * head_dim -> hidden, or of what replaces it."""
    post_attention_norm: T
    """Norm before the MLP, [hidden]. [0] if the layer has no norm there."""
    gate_up: W
    """Fused gate and up projection: hidden -> 2 * intermediate. Empty in a layer without an MLP."""
    down: W
    """Down projection: intermediate -> hidden. Empty in a layer without an MLP."""
    attention_output_norm: T | None = None
    """Norm of attention's output before it is added to the residual stream, [hidden]. None: there is none."""
    mlp_output_norm: T | None = None
    """Norm of the MLP's output before it is added to the residual stream, [hidden]. None: there is none."""
    experts: ExpertWeights[T, W] | None = None
    """Router and experts. None: the layer has an MLP alone."""
    sinks: T | None = None
    """Attention sink of each query head, [heads]: a score that takes its share of the softmax and adds nothing. None:
    there are none."""
    kv_scales: KVScales = UNSCALED
    """Scales of K and V in a quantized KV cache."""
    delta: DeltaWeights[T] | None = None
    """Weights of the gated delta net that replaces attention. None: the layer has none."""
    conv: T | None = None
    """Weights of the short convolution that replaces attention, [kernel, channels], float32 or float64; the last row
    is for the row's own input. None: the layer has none."""
    addition: AdditionWeights[T, W] | None = None
    """Weights with which the layer adds its embedding of the row's token. None: it adds none."""
    scalar: float = 1.0
    """Factor on the layer's output, residual stream included."""


@dataclass(frozen=True, slots=True)
class DecoderWeights(Generic[T, W, D]):
    """Weights of a decoder, or one rank's part of them. D is the type of dtypes, NumPy's or torch's."""

    config: ModelConfig
    """Configuration with the heads and features that this rank holds."""
    dtype: D
    """Dtype of activations."""
    embedding: T
    """[vocab, hidden]. A rank holds its rows only (see `models.shards`), as it does of the LM head."""
    layers: tuple[LayerWeights[T, W], ...]
    final_norm: T
    """[hidden], divided by `logits_scaling`, which scales final states and so logits."""
    lm_head: W
    """Projection hidden -> vocab."""
    rotary: T
    """Signed RoPE frequencies, [rotary_dim] float32."""
    rotaries: tuple[T | None, ...] = ()
    """Signed RoPE frequencies of each layer; None: no RoPE. Empty: all layers use `rotary`."""
    cache_dtype: D | None = None
    """Dtype of K and V in the cache. None: `dtype`."""
    layer_embedding: LayerEmbeddingWeights[T, W] | None = None
    """Weights of the embeddings of single layers. None: there are none."""
    target_ids: T | None = None
    """[ids] int64, ascending: token id of each output of `lm_head`. None: output i is for id i."""


NativeLayer = LayerWeights[Array, NativeWeight]
NativeExperts = ExpertWeights[Array, NativeWeight]
NativeWeights = DecoderWeights[Array, NativeWeight, np.dtype[Any]]
"""Weights that native CPU passes read."""


class NumpyHeld:
    """Members `dtype` and `cache_dtype` for native decoders and heads, whose weights are NumPy arrays."""

    weights: Any

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of activations, and of the KV cache unless that is quantized to FP8."""
        dtype: np.dtype[Any] = self.weights.dtype
        return dtype

    @property
    def cache_dtype(self) -> np.dtype[Any]:
        """Dtype of K and V in the cache."""
        return self.dtype if self.weights.cache_dtype is None else self.weights.cache_dtype


class DecoderFacts(Model):
    """Facts of `Model` that follow from a decoder's configuration, for native and torch decoders."""

    weights: DecoderWeights[Any, Any, Any]

    @property
    def config(self) -> ModelConfig:
        """Configuration as config.json has it; on a rank, with the heads and features that the rank holds."""
        return self.weights.config

    @property
    def cache_dtype(self) -> np.dtype[Any]:
        """Dtype of K and V in the cache."""
        raise NotImplementedError

    @property
    def kv_group_sizes(self) -> Sequence[int]:
        """Numbers of layers per KV group that `with_kv_groups` accepts. Empty for layers of different sizes: blocks of
        all groups have one size."""
        return () if self.config.varied else group_sizes(self.config.windows)

    def place(self, array: Array) -> Any:
        """Return a matrix of an adapter in the model's dtype, in host memory."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Number of token ids. Rows have as many logits, unless `target_ids` says otherwise."""
        return self.config.vocab_size

    @property
    def target_ids(self) -> Any:
        """Token id of each logit, an int64 array or tensor, ascending. None: logit i is for id i."""
        return self.weights.target_ids

    def with_ids(self, ids: Array) -> DecoderFacts:
        """Return the model with logits of `ids` `[n]` int64, ascending, only. It can still be fed any id. Copies their
        rows of the LM head."""
        raise NotImplementedError

    @property
    def has_lm_head(self) -> bool:
        """False for a checkpoint of a base model, whose logits mean nothing."""
        return self.config.has_lm_head

    @property
    def hidden_size(self) -> int:
        """Number of features of a final hidden state."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.config.num_layers

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes of states of a running request, and further bytes for each of its drafts. (0, 0) if all layers have
        attention."""
        return self.config.state_bytes

    @property
    def max_position_embeddings(self) -> int:
        """Number of positions that the model was trained for."""
        return self.config.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a text."""
        return self.config.eos_token_ids

    @property
    def num_parameters(self) -> int:
        """Number of weights that a pass over one row reads."""
        ids = self.target_ids
        return (self.config if ids is None else replace(self.config, vocab_size=len(ids))).num_parameters

    @property
    def attention_ratio(self) -> float:
        """Multiplications of attention per context position, divided by those of one token's matrix products."""
        return self.config.attention_ratio

    @property
    def rope_magnitude(self) -> float:
        """Factor on the cos and sin of RoPE angles with the configuration's `rope_scaling`."""
        return self.config.rope_magnitude

    @property
    def sliding_window(self) -> int | None:
        """Largest sliding window in tokens if every layer has one. None if some layer attends to all positions."""
        windows = [size for size in self.config.windows if size is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @property
    def ends_in_window(self) -> bool:
        """True if the last layer uses a sliding window, so that a NaN outside it does not reach the last row of a
        chunk."""
        return bool(self.config.windows) and self.config.windows[-1] is not None

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of K and V in one block: of all layers, or of the layers of one KV group."""
        return kv_block_bytes(self.config, block_size, self.cache_dtype.itemsize, self.kv_groups)
