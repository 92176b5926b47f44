"""Names and shapes of a model's tensors in a checkpoint, and protocols of their sources. Reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specrs.arrays import Array
from specrs.models.config import ModelConfig
from specrs.models.delta_net import DeltaNet
from specrs.models.short_conv import ShortConv
from specrs.models.varied_layers import LayerSizes

EMBEDDING, LM_HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
"""Embeddings of single layers, `[vocab, layers * size]`."""
ROUTER_SCALE, EXPERT_SCALES = "router.scale", "router.per_expert_scale"
"""Factors of a router's input `[hidden]` and of the weights of chosen experts `[experts]`, after `Experts.block`."""
EXPERT_BIAS = "expert_bias"
"""Numbers added to sigmoids for the choice of experts, `[experts]`, after `Experts.block`."""
PARALLEL_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
"""Norms of the MLP's output, of the experts' input and of their output in layers that have both."""


class Named(Protocol):
    """Source of tensors that knows their names and checks their shapes."""

    @property
    def folder(self) -> Path | str:
        """Folder or name of the checkpoint, as messages name it."""

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
    h = c.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocab_size, h), FINAL_NORM: (h,)}
    if not c.tie_word_embeddings:
        shapes[LM_HEAD] = (c.vocab_size, h)
    if c.layer_embedding is not None:
        size = c.layer_embedding.size
        shapes[LAYER_EMBEDDING] = (c.layer_embedding.vocab_size, c.num_layers * size)
        shapes["model.per_layer_model_projection.weight"] = (c.num_layers * size, h)
        shapes["model.per_layer_projection_norm.weight"] = (size,)
    for layer in range(c.num_layers):
        prefix, sizes = f"model.layers.{layer}.", c.sizes_of(layer)
        q, kv = c.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        sparse = c.experts is not None and c.experts.layers[layer]
        parallel = c.experts is not None and c.experts.parallel_mlp
        has_state = c.has_state(layer)
        if c.states is not None and has_state:
            block = prefix + state_block(c.states)
            shapes |= {f"{block}{name}": shape for name, shape in state_shapes(c.states, h).items()}
        if c.experts is not None and sparse:
            block, e = prefix + c.experts.block, c.experts.intermediate_size
            parts = {c.experts.router: (c.experts.count, h)}
            for expert in range(c.experts.count):
                for name, shape in zip(c.experts.projections, ((e, h), (e, h), (h, e)), strict=True):
                    parts[f"experts.{expert}.{name}"] = shape
            if c.experts.shared is not None:
                parts["shared_expert.down_proj"] = (h, c.experts.shared)
                if c.experts.shared_gate:
                    parts["shared_expert_gate"] = (1, h)
                parts |= {f"shared_expert.{name}_proj": (c.experts.shared, h) for name in ("gate", "up")}
            for name, shape in parts.items():
                shapes[f"{block}{name}.weight"] = shape
                if c.experts.biases:
                    shapes[f"{block}{name}.bias"] = shape[:1]
            if c.experts.scaled_router:
                shapes |= {f"{block}{ROUTER_SCALE}": (h,), f"{block}{EXPERT_SCALES}": (c.experts.count,)}
            if c.experts.biased_choice:
                shapes[f"{block}{EXPERT_BIAS}"] = (c.experts.count,)
            if c.experts.parallel_mlp:
                shapes |= {f"{prefix}{name}.weight": (h,) for name in PARALLEL_NORMS}
        for name, (rows, columns, bias) in _projections(c, sizes).items():
            if (sparse and not parallel and name.startswith("mlp.")) or (has_state and name.startswith("self_attn.")):
                continue
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes |= {f"{prefix}{name}.weight": (h,) for name in norm_names(c) if name is not None}
        if c.sinks:
            shapes[f"{prefix}self_attn.sinks"] = (c.num_heads,)
        if c.qk_norm and not has_state:
            norms = [("q", q if c.qk_norm_whole else sizes.head_dim)]
            if sizes.source is None:
                norms.append(("k", kv if c.qk_norm_whole else sizes.head_dim))
            shapes |= {f"{prefix}self_attn.{x}_norm.weight": (n,) for x, n in norms}
        if c.layer_embedding is not None:
            size = c.layer_embedding.size
            shapes[f"{prefix}per_layer_input_gate.weight"] = (size, h)
            shapes[f"{prefix}per_layer_projection.weight"] = (h, size)
            shapes[f"{prefix}post_per_layer_input_norm.weight"] = (h,)
        if c.layer_scalars:
            shapes[f"{prefix}layer_scalar"] = (1,)
    return shapes


def _projections(c: ModelConfig, sizes: LayerSizes) -> dict[str, tuple[int, int, bool]]:
    """Return outputs, inputs and bias of the projections of attention and MLP in a layer of `sizes`."""
    h, q, kv, i = (
        c.hidden_size,
        c.num_heads * sizes.head_dim,
        sizes.num_kv_heads * sizes.head_dim,
        sizes.intermediate_size,
    )
    kinds = {"q": q * (1 + c.output_gate), "k": kv, "v": kv}
    qkv, gate_up = [(x, kinds[x]) for x in attention_inputs(sizes)], [("gate", i), ("up", i)]
    if c.fused_projections:
        qkv, gate_up = [("qkv", q + 2 * kv)], [("gate_up", 2 * i)]
    return {
        **{f"self_attn.{name}_proj": (rows, h, c.qkv_bias) for name, rows in qkv},
        "self_attn.o_proj": (h, q, c.o_bias),
        **{f"mlp.{name}_proj": (rows, h, c.mlp_bias) for name, rows in gate_up},
        "mlp.down_proj": (h, i, c.mlp_bias),
    }


def attention_inputs(sizes: LayerSizes) -> str:
    """Return the names of the projections that attention's input has in a layer: q, k and v, or some of them."""
    if sizes.source is not None:
        return "q"
    return "qk" if sizes.keys_are_values else "qkv"


def optional_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of tensors that a checkpoint of `c` may hold beyond those of `tensor_shapes`: an LM head,
    and keys and values of layers that attend to another layer's, which are not read."""
    shapes: dict[str, tuple[int, ...]] = {LM_HEAD: (c.vocab_size, c.hidden_size)}
    for layer, sizes in enumerate(c.varied):
        if sizes.source is not None:
            attention, kv = f"model.layers.{layer}.self_attn.", sizes.num_kv_heads * sizes.head_dim
            shapes |= {f"{attention}{x}_proj.weight": (kv, c.hidden_size) for x in "kv"}
            shapes[f"{attention}k_norm.weight"] = (sizes.head_dim,)
    return shapes


def state_block(states: DeltaNet | ShortConv) -> str:
    """Return the beginning, within a layer, of the names of the tensors that replace attention's."""
    return "linear_attn." if isinstance(states, DeltaNet) else "conv."


def state_inputs(d: DeltaNet | ShortConv) -> dict[str, int]:
    """Return the names of the input projections of a delta net or short convolution, in the order in which
    `LayerWeights.qkv` fuses them, with their numbers of outputs."""
    if isinstance(d, ShortConv):
        return {"in_proj": d.outputs}
    if d.by_key_head:
        return {"in_proj_qkvz": d.conv_dim + d.inner, "in_proj_ba": 2 * d.value_heads}
    heads = d.value_heads
    return {"in_proj_qkv": d.conv_dim, "in_proj_z": d.inner, "in_proj_b": heads, "in_proj_a": heads}


def state_shapes(d: DeltaNet | ShortConv, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of a delta net or short convolution, after `state_block`."""
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, hidden) for name, rows in state_inputs(d).items()}
    shapes["out_proj.weight"] = (hidden, d.inner)
    if isinstance(d, ShortConv):
        return shapes | {"conv.weight": (d.channels, 1, d.kernel)}
    return shapes | {
        "conv1d.weight": (d.conv_dim, 1, d.kernel),
        "A_log": (d.value_heads,),
        "dt_bias": (d.value_heads,),
        "norm.weight": (d.value_dim,),
    }


def norm_names(c: ModelConfig) -> tuple[str | None, str | None, str | None, str | None]:
    """Return the names of a layer's four norms: of attention's input and output, and of the MLP's input and output.
    None: it has no such norm."""
    if c.norms == "before":
        return "input_layernorm", None, "post_attention_layernorm", None
    after = "post_attention_layernorm", "post_feedforward_layernorm"
    before = ("input_layernorm", "pre_feedforward_layernorm") if c.norms == "around" else (None, None)
    return before[0], after[0], before[1], after[1]
