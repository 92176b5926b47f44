"""Names and shapes of a model's tensors in a checkpoint, and protocols of their sources. Reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specrs.arrays import Array
from specrs.models.config import ModelConfig
from specrs.models.delta_net import DeltaNet

EMBEDDING, LM_HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class Named(Protocol):
    """Source of tensors that knows their names and checks their shapes."""

    @property
    def folder(self) -> Path | str:
        """Name of the source in messages."""

    def __contains__(self, name: str) -> bool: ...

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]], /) -> None:
        """Raise CheckpointError if a `required` tensor is missing or has another shape, or if one is neither required
        nor `optional`."""


class Readable(Named, Protocol):
    """Source of tensors that it copies or maps into host memory, converted to a dtype."""

    def read(self, name: str, dtype: np.dtype[Any], /) -> Array:
        """Return the tensor `name` as `dtype` in host memory, which may be a mapped file."""


class Tensors(Readable, Protocol):
    """Source of tensors that also gives them in its own dtype, as arrays in host memory."""

    def mapped(self, name: str) -> Array:
        """Return the tensor `name` in place and in the source's dtype. Pages of a file are read when they are touched.
        Writes do not reach the file."""


def tensor_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that a checkpoint of `c` must hold."""
    h, q, kv, i = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocab_size, h), FINAL_NORM: (h,)}
    if not c.tie_word_embeddings:
        shapes[LM_HEAD] = (c.vocab_size, h)
    qkv, gate_up = [("q", q * (1 + c.output_gate)), ("k", kv), ("v", kv)], [("gate", i), ("up", i)]
    if c.fused_projections:
        qkv, gate_up = [("qkv", q + 2 * kv)], [("gate_up", 2 * i)]
    projections = {
        **{f"self_attn.{name}_proj": (rows, h, c.qkv_bias) for name, rows in qkv},
        "self_attn.o_proj": (h, q, c.o_bias),
        **{f"mlp.{name}_proj": (rows, h, c.mlp_bias) for name, rows in gate_up},
        "mlp.down_proj": (h, i, c.mlp_bias),
    }
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}."
        sparse = c.experts is not None and c.experts.layers[layer]
        delta = c.delta is not None and c.delta.layers[layer]
        if c.delta is not None and delta:
            shapes |= {f"{prefix}linear_attn.{name}": shape for name, shape in delta_shapes(c.delta, h).items()}
        if c.experts is not None and sparse:
            block, e = prefix + c.experts.block, c.experts.intermediate_size
            parts = {c.experts.router: (c.experts.count, h)}
            for expert in range(c.experts.count):
                for name, shape in zip(c.experts.projections, ((e, h), (e, h), (h, e)), strict=True):
                    parts[f"experts.{expert}.{name}"] = shape
            if c.experts.shared is not None:
                parts |= {"shared_expert_gate": (1, h), "shared_expert.down_proj": (h, c.experts.shared)}
                parts |= {f"shared_expert.{name}_proj": (c.experts.shared, h) for name in ("gate", "up")}
            for name, shape in parts.items():
                shapes[f"{block}.{name}.weight"] = shape
                if c.experts.biases:
                    shapes[f"{block}.{name}.bias"] = shape[:1]
        for name, (rows, columns, bias) in projections.items():
            if (sparse and name.startswith("mlp.")) or (delta and name.startswith("self_attn.")):
                continue
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes |= {f"{prefix}{name}.weight": (h,) for name in norm_names(c) if name is not None}
        if c.sinks:
            shapes[f"{prefix}self_attn.sinks"] = (c.num_heads,)
        if c.qk_norm and not delta:
            sizes = (q, kv) if c.qk_norm_whole else (c.head_dim, c.head_dim)
            shapes |= {f"{prefix}self_attn.{x}_norm.weight": (n,) for x, n in zip("qk", sizes, strict=True)}
    return shapes


def delta_inputs(d: DeltaNet) -> dict[str, int]:
    """Return the names of a delta net's input projections, in the order in which `LayerWeights.qkv` fuses them, with
    their numbers of outputs."""
    if d.by_key_head:
        return {"in_proj_qkvz": d.conv_dim + d.inner, "in_proj_ba": 2 * d.value_heads}
    heads = d.value_heads
    return {"in_proj_qkv": d.conv_dim, "in_proj_z": d.inner, "in_proj_b": heads, "in_proj_a": heads}


def delta_shapes(d: DeltaNet, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of a gated delta net, after `linear_attn.`."""
    return {
        **{f"{name}.weight": (rows, hidden) for name, rows in delta_inputs(d).items()},
        "conv1d.weight": (d.conv_dim, 1, d.kernel),
        "A_log": (d.value_heads,),
        "dt_bias": (d.value_heads,),
        "norm.weight": (d.value_dim,),
        "out_proj.weight": (hidden, d.inner),
    }


def norm_names(c: ModelConfig) -> tuple[str | None, str | None, str | None, str | None]:
    """Return the names of a layer's four norms: of attention's input and output, and of the MLP's input and output.
    None: it has no such norm."""
    if c.norms == "before":
        return "input_layernorm", None, "post_attention_layernorm", None
    after = "post_attention_layernorm", "post_feedforward_layernorm"
    before = ("input_layernorm", "pre_feedforward_layernorm") if c.norms == "around" else (None, None)
    return before[0], after[0], before[1], after[1]
