"""Reads, fuses and lays out the tensors of a decoder, whatever holds them. Small work on norms is done in numpy here; a
subclass says what arrays and projections become."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic

import numpy as np
from tqdm import tqdm

from specrs.arrays import FLOAT32, FLOAT64, Array, converted
from specrs.kernels.frequencies import Powers, rounded_powers, signed_frequencies
from specrs.kernels.kv_scales import UNSCALED
from specrs.models.config import ModelConfig
from specrs.models.dense_weights import D, DenseWeights, ExpertWeights, LayerWeights, T, W
from specrs.models.experts import Experts
from specrs.models.kv_dtypes import read_kv_scales
from specrs.models.rope import Rope, frequencies
from specrs.models.tensors import EMBEDDING, FINAL_NORM, LM_HEAD, Readable, norm_names, tensor_shapes


class LayerReader(ABC, Generic[T, W]):
    """Reads, fuses and lays out the tensors of decoder layers."""

    checkpoint: Readable
    kv_codes = False
    """Whether K and V are cached as codes, which have scales."""

    def layer(self, prefix: str, c: ModelConfig) -> LayerWeights[T, W]:
        """Return the decoder layer whose names begin with `prefix`."""
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        before, after, before_mlp, after_mlp = (
            None if name is None else self.place(self.norm(prefix + name, c)) for name in norm_names(c)
        )
        sparse = c.experts is not None and f"{prefix}{c.experts.block}.{c.experts.router}.weight" in self.checkpoint
        none = self.place(np.empty(0, self.vector_dtype))
        qkv, gate_up = (("qkv",), ("gate_up",)) if c.fused_projections else ("qkv", ("gate", "up"))
        return LayerWeights(
            input_norm=none if before is None else before,
            attention_output_norm=after,
            post_attention_norm=none if before_mlp is None else before_mlp,
            mlp_output_norm=after_mlp,
            qkv=self.linear([attention + f"{x}_proj" for x in qkv], bias=c.qkv_bias),
            qk_norm=self.place(self.qk_norm(attention, c)) if c.qk_norm else None,
            o=self.linear([attention + "o_proj"], bias=c.o_bias),
            gate_up=self.nothing() if sparse else self.linear([mlp + f"{x}_proj" for x in gate_up], bias=c.mlp_bias),
            down=self.nothing() if sparse else self.linear([mlp + "down_proj"], bias=c.mlp_bias),
            experts=self.experts(prefix, c.experts) if c.experts is not None and sparse else None,
            sinks=self.read(attention + "sinks") if c.sinks else None,
            kv_scales=read_kv_scales(self.checkpoint, attention) if self.kv_codes else UNSCALED,
        )

    def qk_norm(self, attention: str, c: ModelConfig) -> Array:
        """Return the norms of queries and keys, `[heads + kv_heads, head_dim]`; see `LayerWeights`."""
        q, k = self.norm(attention + "q_norm", c), self.norm(attention + "k_norm", c)
        if c.qk_norm_whole:
            return np.concatenate((q, k)).reshape(-1, c.head_dim)
        return np.concatenate((np.tile(q, (c.num_heads, 1)), np.tile(k, (c.num_kv_heads, 1))))

    def norm(self, name: str, c: ModelConfig) -> Array:
        """Return the weights of the norm `name`."""
        weight = self.vector(f"{name}.weight")
        return _computed(weight, lambda wide: wide + c.norm_offset) if c.norm_offset else weight

    def vector(self, name: str) -> Array:
        """Return a small tensor as `vector_dtype`."""
        return self.checkpoint.read(name, self.vector_dtype)

    @property
    @abstractmethod
    def vector_dtype(self) -> np.dtype[Any]:
        """Type of norms."""

    @abstractmethod
    def place(self, array: Array) -> T:
        """Return `array` where the model is, of the same type."""

    @abstractmethod
    def read(self, name: str) -> T:
        """Return the tensor `name`, which is no projection, where the model is."""

    @abstractmethod
    def matrix(self, name: str) -> T:
        """Return the matrix `name`, an embedding or the LM head, where the model is."""

    @abstractmethod
    def linear(self, names: list[str], *, bias: bool) -> W:
        """Return the projections `names`, which share an input, as one."""

    @abstractmethod
    def experts(self, prefix: str, experts: Experts) -> ExpertWeights[T, W]:
        """Return the experts of a layer, and their router."""

    @abstractmethod
    def nothing(self) -> W:
        """Return what stands in place of a projection that a layer does not have."""

    def powers(self) -> Powers:
        """Return what makes the powers of theta that frequencies are of; see `kernels.frequencies`."""
        return rounded_powers

    def signed(self, rope: Rope, rotary_dim: int) -> T:
        """Return signed frequencies, `[rotary_dim]` float32."""
        return self.place(signed_frequencies(frequencies(rope, rotary_dim, self.powers())))


class ModelReader(LayerReader[T, W], Generic[T, W, D]):
    """A `LayerReader` of all tensors of one model, or of one rank's part of it."""

    config: ModelConfig
    """The whole model's."""
    held: ModelConfig
    """With the heads and features that are here."""
    dtype: D
    cache_dtype: D | None = None
    """See `DenseWeights`."""

    def load(self) -> DenseWeights[T, W, D]:
        """Read everything. Raises as the checkpoint's `check`."""
        c = self.config
        self.check()
        embedding = self.matrix(EMBEDDING)
        head = embedding if c.tie_word_embeddings else self.matrix(LM_HEAD)
        rotaries = {rope: None if rope is None else self.signed(rope, c.rotary_dim) for rope in c.ropes}
        layers = tqdm(range(c.num_layers), desc="Loading layers", delay=2.0, disable=None)
        final_norm = self.norm(FINAL_NORM.removesuffix(".weight"), c)
        return DenseWeights(
            config=self.held,
            dtype=self.dtype,
            embedding=embedding,
            layers=tuple(self.layer(f"model.layers.{i}.", self.held) for i in layers),
            final_norm=self.place(_computed(final_norm, lambda wide: wide / c.logits_scaling)),
            lm_head=self.lm_head(head),
            rotary=self.signed((c.rope_theta, c.rope_scaling), c.rotary_dim),
            rotaries=tuple(rotaries[rope] for rope in c.ropes),
            cache_dtype=self.cache_dtype,
        )

    def check(self) -> None:
        """Check names and shapes. Raises CheckpointError."""
        c = self.config
        self.checkpoint.check(tensor_shapes(c), {LM_HEAD: (c.vocab_size, c.hidden_size)})

    @abstractmethod
    def lm_head(self, weight: T) -> W:
        """Return the LM head, of its matrix."""


def _computed(array: Array, compute: Callable[[Array], Array]) -> Array:
    """Return what `compute` makes of `array` in float32 at least, rounded once to the type of `array`."""
    wide = FLOAT64 if array.dtype == FLOAT64 else FLOAT32
    return converted(compute(converted(array, wide)), array.dtype)
