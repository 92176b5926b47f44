"""Base classes that read, fuse and lay out the tensors of a decoder. Norms are computed here with NumPy; subclasses
decide what arrays and projections become."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic

import numpy as np
from tqdm import tqdm

from specrs.arrays import FLOAT32, FLOAT64, Array, converted
from specrs.kernels.frequencies import Powers, rounded_powers, signed_frequencies
from specrs.kernels.kv_scales import UNSCALED
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import (
    AdditionWeights,
    D,
    DecoderWeights,
    DeltaWeights,
    ExpertWeights,
    LayerEmbeddingWeights,
    LayerWeights,
    ParallelNorms,
    RouterScales,
    SharedWeights,
    T,
    W,
)
from specrs.models.experts import Experts
from specrs.models.kv_dtypes import read_kv_scales
from specrs.models.rope import Rope, frequencies
from specrs.models.tensors import (
    EMBEDDING,
    EXPERT_BIAS,
    EXPERT_SCALES,
    FINAL_NORM,
    LAYER_EMBEDDING,
    LM_HEAD,
    PARALLEL_NORMS,
    ROUTER_SCALE,
    Readable,
    attention_inputs,
    norm_names,
    optional_shapes,
    state_block,
    state_inputs,
    tensor_shapes,
)
from specrs.models.varied_layers import LayerSizes


class LayerReader(ABC, Generic[T, W]):
    """Reads, fuses and lays out the tensors of decoder layers."""

    checkpoint: Readable
    """Source of the tensors."""
    kv_codes = False
    """True if K and V are cached in FP8, so that their scales are read."""

    def layer(self, prefix: str, c: ModelConfig, own: LayerSizes | None = None) -> LayerWeights[T, W]:
        """Return the decoder layer whose tensor names begin with `prefix`. `own` has its sizes; None: those of `c`."""
        sizes = c.plain_sizes if own is None else own
        attention = prefix + "self_attn."
        before, after, before_mlp, after_mlp = (
            None if name is None else self.place(self.norm(prefix + name, c)) for name in norm_names(c)
        )
        none = self.place(np.empty(0, self.vector_dtype))
        qkv = ("qkv",) if c.fused_projections else attention_inputs(sizes)
        gate_up, down, experts = self._mlp(prefix, c)
        return LayerWeights(
            input_norm=none if before is None else before,
            attention_output_norm=after,
            post_attention_norm=none if before_mlp is None else before_mlp,
            mlp_output_norm=after_mlp,
            qkv=self.linear([attention + f"{x}_proj" for x in qkv], bias=c.qkv_bias),
            qk_norm=self.place(self.qk_norm(attention, c, sizes)) if c.qk_norm else None,
            o=self.linear([attention + "o_proj"], bias=c.o_bias),
            gate_up=gate_up,
            down=down,
            experts=experts,
            sinks=self.read(attention + "sinks") if c.sinks else None,
            kv_scales=read_kv_scales(self.checkpoint, attention) if self.kv_codes else UNSCALED,
            addition=None if c.layer_embedding is None else self.addition(prefix, c),
            scalar=float(self.vector(f"{prefix}layer_scalar")[0]) if c.layer_scalars else 1.0,
        )

    def addition(self, prefix: str, c: ModelConfig) -> AdditionWeights[T, W]:
        """Return the weights with which the layer adds its embedding of a token to the residual stream."""
        return AdditionWeights(
            gate=self.linear([f"{prefix}per_layer_input_gate"], bias=False),
            projection=self.linear([f"{prefix}per_layer_projection"], bias=False),
            norm=self.place(self.norm(f"{prefix}post_per_layer_input_norm", c)),
        )

    def _mlp(self, prefix: str, c: ModelConfig) -> tuple[W, W, ExpertWeights[T, W] | None]:
        """Return the MLP and the experts of the layer whose tensor names begin with `prefix`: gate and up, down (both
        empty without an MLP), and experts (None: there are none)."""
        experts = None
        if c.experts is not None and f"{prefix}{c.experts.block}{c.experts.router}.weight" in self.checkpoint:
            experts = self.experts(prefix, c.experts)
            if c.experts.biased_choice:
                bias = self.checkpoint.read(f"{prefix}{c.experts.block}{EXPERT_BIAS}", self._wide)
                experts = replace(experts, bias=self.place(bias))
            if not c.experts.parallel_mlp:
                return self.nothing(), self.nothing(), experts
            experts = replace(experts, norms=self.parallel_norms(prefix, c))
        mlp = prefix + "mlp."
        names = ("gate_up",) if c.fused_projections else ("gate", "up")
        gate_up = self.linear([f"{mlp}{name}_proj" for name in names], bias=c.mlp_bias)
        return gate_up, self.linear([mlp + "down_proj"], bias=c.mlp_bias), experts

    def parallel_norms(self, prefix: str, c: ModelConfig) -> ParallelNorms[T]:
        """Return the norms of MLP and experts of the layer whose tensor names begin with `prefix`."""
        return ParallelNorms(*(self.place(self.norm(f"{prefix}{name}", c)) for name in PARALLEL_NORMS))

    def router_scales(self, block: str, experts: Experts) -> RouterScales[T] | None:
        """Return the factors of the router of the experts whose tensor names begin with `block`; None if it has
        none."""
        if not experts.scaled_router:
            return None
        return RouterScales(*(self.place(self.vector(f"{block}{name}")) for name in (ROUTER_SCALE, EXPERT_SCALES)))

    def shared_expert(self, block: str, experts: Experts) -> SharedWeights[W] | None:
        """Return the expert that every row uses, of the experts whose tensor names begin with `block`. None: there is
        none."""
        if experts.shared is None:
            return None
        name = f"{block}shared_expert"
        return SharedWeights(
            gate=self.linear([f"{name}_gate"], bias=False) if experts.shared_gate else None,
            gate_up=self.linear([f"{name}.gate_proj", f"{name}.up_proj"], bias=False),
            down=self.linear([f"{name}.down_proj"], bias=False),
        )

    def state_layer(self, prefix: str, c: ModelConfig) -> LayerWeights[T, W]:
        """Return the layer with a delta net or a short convolution whose tensor names begin with `prefix`."""
        assert c.states is not None
        net = prefix + state_block(c.states)
        gate_up, down, experts = self._mlp(prefix, c)
        before, _, before_mlp, _ = norm_names(c)
        layer = LayerWeights(
            input_norm=self.place(self.norm(f"{prefix}{before}", c)),
            post_attention_norm=self.place(self.norm(f"{prefix}{before_mlp}", c)),
            qkv=self.linear([net + name for name in state_inputs(c.states)], bias=False),
            qk_norm=None,
            o=self.linear([net + "out_proj"], bias=False),
            gate_up=gate_up,
            down=down,
            experts=experts,
        )
        if c.delta is None:
            return replace(layer, conv=self.convolution(net + "conv.weight"))
        wide = self._wide
        delta = DeltaWeights(
            conv=self.convolution(net + "conv1d.weight"),
            a_log=self.place(self.checkpoint.read(net + "A_log", wide)),
            dt_bias=self.place(self.checkpoint.read(net + "dt_bias", wide)),
            # This norm alone has no offset.
            norm=self.place(self.checkpoint.read(net + "norm.weight", wide)),
        )
        return replace(layer, delta=delta)

    def convolution(self, name: str) -> T:
        """Return the weights of a convolution of single channels, `[kernel, channels]`."""
        return self.place(np.ascontiguousarray(self.checkpoint.read(name, self._wide)[:, 0].T))

    @property
    def _wide(self) -> np.dtype[Any]:
        """Dtype of the weights with which states are computed, and experts chosen."""
        return FLOAT64 if self.vector_dtype == FLOAT64 else FLOAT32

    def qk_norm(self, attention: str, c: ModelConfig, sizes: LayerSizes) -> Array:
        """Return the norms of queries and keys, `[heads + kv_heads, head_dim]`, as `LayerWeights.qk_norm` describes."""
        q = self.norm(attention + "q_norm", c)
        if sizes.source is not None:
            return np.tile(q, (c.num_heads, 1))
        k = self.norm(attention + "k_norm", c)
        if c.qk_norm_whole:
            return np.concatenate((q, k)).reshape(-1, sizes.head_dim)
        parts = [np.tile(q, (c.num_heads, 1)), np.tile(k, (sizes.num_kv_heads, 1))]
        if c.value_norm:
            parts.append(np.ones((sizes.num_kv_heads, sizes.head_dim), k.dtype))
        return np.concatenate(parts)

    def norm(self, name: str, c: ModelConfig) -> Array:
        """Return the weights of the norm `name`, with the configuration's `norm_offset` added."""
        weight = self.vector(f"{name}.weight")
        return _computed(weight, lambda wide: wide + c.norm_offset) if c.norm_offset else weight

    def vector(self, name: str) -> Array:
        """Return the small tensor `name` as `vector_dtype`."""
        return self.checkpoint.read(name, self.vector_dtype)

    @property
    @abstractmethod
    def vector_dtype(self) -> np.dtype[Any]:
        """Dtype in which norms are stored."""

    @abstractmethod
    def place(self, array: Array) -> T:
        """Return `array` on the model's device, with its dtype unchanged."""

    @abstractmethod
    def read(self, name: str) -> T:
        """Return the tensor `name`, which is not a projection, on the model's device."""

    @abstractmethod
    def matrix(self, name: str) -> T:
        """Return the embedding or LM head `name` on the model's device."""

    @abstractmethod
    def linear(self, names: list[str], *, bias: bool) -> W:
        """Return the projections `names`, which share an input, fused into one."""

    @abstractmethod
    def experts(self, prefix: str, experts: Experts) -> ExpertWeights[T, W]:
        """Return the router and experts of the layer whose tensor names begin with `prefix`."""

    @abstractmethod
    def nothing(self) -> W:
        """Return an empty projection, for layers that do not have one."""

    def powers(self) -> Powers:
        """Return the function that computes powers of theta for RoPE frequencies: see `kernels.frequencies`."""
        return rounded_powers

    def signed(self, rope: Rope, rotary_dim: int) -> T:
        """Return the signed RoPE frequencies of `rope`, `[rotary_dim]` float32."""
        return self.place(signed_frequencies(frequencies(rope, rotary_dim, self.powers())))


class ModelReader(LayerReader[T, W], Generic[T, W, D]):
    """A `LayerReader` of all tensors of one model, or of one rank's part of it."""

    config: ModelConfig
    """Configuration of the whole model."""
    held: ModelConfig
    """Configuration with the heads and features that this rank holds."""
    dtype: D
    """Dtype of activations."""
    cache_dtype: D | None = None
    """Dtype of K and V in the cache. None: `dtype`."""

    def load(self) -> DecoderWeights[T, W, D]:
        """Check and read all tensors. Raises CheckpointError for tensors that are missing, unknown or misshapen."""
        c = self.config
        self.check()
        embedding = self.matrix(EMBEDDING)
        head = embedding if c.tie_word_embeddings else self.matrix(LM_HEAD)
        turns = [(rope, c.rotary_dim_of(i)) for i, rope in enumerate(c.ropes)]
        known = dict.fromkeys(turns)
        rotaries = {(rope, dim): None if rope is None else self.signed(rope, dim) for rope, dim in known}
        layers = tqdm(range(c.num_layers), desc="Loading layers", delay=2.0, disable=None)
        final_norm = self.norm(FINAL_NORM.removesuffix(".weight"), c)
        return DecoderWeights(
            config=self.held,
            dtype=self.dtype,
            embedding=embedding,
            layers=tuple(self._layer(i) for i in layers),
            final_norm=self.place(_computed(final_norm, lambda wide: wide / c.logits_scaling)),
            lm_head=self.lm_head(head),
            rotary=self.signed((c.rope_theta, c.rope_scaling), c.rotary_dim),
            rotaries=tuple(rotaries[turn] for turn in turns),
            layer_embedding=None if c.layer_embedding is None else self.layer_embedding(),
            cache_dtype=self.cache_dtype,
        )

    def _layer(self, i: int) -> LayerWeights[T, W]:
        prefix, c = f"model.layers.{i}.", self.held
        if c.has_state(i):
            return self.state_layer(prefix, c)
        sizes = c.sizes_of(i)
        layer = self.layer(prefix, c, sizes)
        if c.rotated_norm and c.rope_of(i) is not None:
            ones = np.ones((c.num_heads + c.num_kv_heads, c.head_dim), self.vector_dtype)
            layer = replace(layer, qk_norm=self.place(ones))
        if sizes.source is None or not self.kv_codes:
            return layer
        # Codes have the scales with which the source writes them.
        return replace(layer, kv_scales=read_kv_scales(self.checkpoint, f"model.layers.{sizes.source}.self_attn."))

    def layer_embedding(self) -> LayerEmbeddingWeights[T, W]:
        """Return the weights of the embeddings that layers add."""
        return LayerEmbeddingWeights(
            table=self.matrix(LAYER_EMBEDDING),
            projection=self.linear(["model.per_layer_model_projection"], bias=False),
            norm=self.place(self.norm("model.per_layer_projection_norm", self.config)),
        )

    def check(self) -> None:
        """Check the names and shapes of all tensors. Raises CheckpointError for tensors that are missing, unknown or
        misshapen."""
        self.checkpoint.check(tensor_shapes(self.config), optional_shapes(self.config))

    @abstractmethod
    def lm_head(self, weight: T) -> W:
        """Return the LM head whose weights are `weight`."""


def _computed(array: Array, compute: Callable[[Array], Array]) -> Array:
    """Apply `compute` to the array in float32 or wider, and round the result once to the array's dtype."""
    wide = FLOAT64 if array.dtype == FLOAT64 else FLOAT32
    return converted(compute(converted(array, wide)), array.dtype)
