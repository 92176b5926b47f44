"""Finds the tensors of a transformers checkpoint in a GGUF file: their names, their experts, and the order of their
rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from specrs.arrays import FLOAT64, Array
from specrs.models.config import ModelConfig
from specrs.models.delta_net import DeltaNet
from specrs.models.gguf.architectures import Architecture
from specrs.models.gguf.file import GGUFFile
from specrs.models.gguf.rope import FACTORS, LONG_FACTORS
from specrs.models.tensors import EXPERT_BIAS, EXPERT_SCALES, PARALLEL_NORMS, ROUTER_SCALE, norm_names
from specrs.models.wrappers import HEAD

_TOP = {"token_embd": "model.embed_tokens", "output": "lm_head"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_EMBEDDING = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
"""Tensors of the embeddings that layers add, by their names in GGUF files."""
_ADDITION = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
"""Tensors with which a layer adds its embedding, by their names in GGUF files."""
_SHORT_CONV = {"shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj"}
"""Projections of a short convolution, by their names in GGUF files."""
_FILTERS = "shortconv.conv.weight"
"""Weights of a short convolution, `[channels, kernel]`."""
_SCALAR = "layer_output_scale.weight"
_ROUTER_SCALES = {"ffn_gate_inp.scale": ROUTER_SCALE, "ffn_down_exps.scale": EXPERT_SCALES}
"""Factors of a router, after the block of experts, by their names in GGUF files."""
_PARALLEL_NORMS = ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2")
"""Norms of layers with both MLP and experts, in the order of `PARALLEL_NORMS`."""
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""Tensors that hold a projection of all experts, in the order of `ExpertFields.projections`."""
_GATE_UP_EXPERTS = "ffn_gate_up_exps"
"""Tensor that holds the gate and up projection of all experts, of each all gate features first."""
_SHARED_EXPERT = {
    "ffn_gate_shexp": "shared_expert.gate_proj",
    "ffn_up_shexp": "shared_expert.up_proj",
    "ffn_down_shexp": "shared_expert.down_proj",
    "ffn_gate_inp_shexp": "shared_expert_gate",
}
"""Tensors of an expert that every row uses, after the block of experts, by their names in GGUF files."""
EXPERT_BIASES = "exp_probs_b.bias"
"""Numbers added to sigmoids for the choice of experts, `[experts]`."""
_SINKS = "attn_sinks.weight"
_DELTA_NET = {
    "attn_qkv.weight": "in_proj_qkv.weight",
    "attn_gate.weight": "in_proj_z.weight",
    "ssm_beta.weight": "in_proj_b.weight",
    "ssm_alpha.weight": "in_proj_a.weight",
    "ssm_conv1d.weight": "conv1d.weight",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_norm.weight": "norm.weight",
    "ssm_out.weight": "out_proj.weight",
}
"""Tensors of a gated delta net after `linear_attn.`, by their names in GGUF files."""
_BY_KEY_HEAD = {
    "ssm_in.weight": ("in_proj_qkv.weight", "in_proj_z.weight"),
    "ssm_ba.weight": ("in_proj_b.weight", "in_proj_a.weight"),
}
"""Tensors of a gated delta net whose rows a GGUF file groups by key head, with the two tensors of a checkpoint that
each of them combines."""
_MTP = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "lm_head",
}
"""Tensors of an MTP head besides its layer, after `mtp.`, by their names in GGUF files."""


class Place(NamedTuple):
    """Place of a checkpoint's tensor in a GGUF file."""

    name: str
    """Name of the tensor in the GGUF file."""
    shape: tuple[int, ...]
    """Shape of the checkpoint's tensor."""
    expert: int | None = None
    """Index of the expert in the tensor's first dimension; None: the whole tensor."""
    rows: Array | None = None
    """Index of each of the checkpoint's rows in the file's tensor, or in its expert. None: the rows are the same."""
    computed: Callable[[Array], Array] | None = None
    """Function that converts the elements of the GGUF tensor to those of the checkpoint's tensor. None: they are
    equal."""


def places(file: GGUFFile, architecture: Architecture, c: ModelConfig) -> dict[str, Place]:
    """Return the place of each tensor of `file`, by the name that a checkpoint of `c` gives it.

    Tensors of an MTP head have names that begin with `HEAD`. Unknown tensors keep their names, and tensors of a wrong
    shape keep their shapes.
    """
    found: dict[str, Place] = {}
    top = _TOP | {architecture.final_norm: "model.norm"}
    if c.layer_embedding is not None:
        top |= _LAYER_EMBEDDING
    for name, info in file.tensors.items():
        if name in (FACTORS, *LONG_FACTORS.values()):
            continue
        split = re.fullmatch(r"blk\.(\d+)\.([\w.]+)", name)
        if split is None:
            stem, _, kind = name.rpartition(".")
            found[f"{top[stem]}.{kind}" if stem in top else name] = Place(name, info.shape)
            continue
        layer, leaf = int(split[1]), split[2]
        in_head = c.delta is not None and layer >= c.num_layers
        stem, _, kind = leaf.rpartition(".")
        if in_head and stem in _MTP:
            found[f"{HEAD}{_MTP[stem]}.{kind}"] = Place(name, info.shape)
            continue
        prefix = f"{HEAD}layers.{layer - c.num_layers}." if in_head else f"model.layers.{layer}."
        of_layer = list(_of_layer(name, leaf, info.shape, architecture, c))
        for own, place in of_layer:
            found[prefix + own] = place
        if not of_layer:
            found[name] = Place(name, info.shape)
    return found


def _of_layer(
    name: str, leaf: str, shape: tuple[int, ...], architecture: Architecture, c: ModelConfig
) -> Iterator[tuple[str, Place]]:
    """Yield names within a layer, and places, of the checkpoint's tensors in the file's tensor `name`, which is called
    `leaf` within the layer. Yields nothing for an unknown tensor."""
    stem, _, kind = leaf.rpartition(".")
    names = _layer_names(architecture, c)
    if c.delta is not None and leaf in _DELTA_NET:
        yield f"linear_attn.{_DELTA_NET[leaf]}", _of_delta_net(name, leaf, shape, architecture, c.delta)
    elif c.delta is not None and architecture.delta_net == "by key head" and leaf in _BY_KEY_HEAD:
        parts = _by_key_head(c.delta, leaf == "ssm_in.weight")
        fits = shape[0] == sum(map(len, parts))
        for own, part in zip(_BY_KEY_HEAD[leaf], parts, strict=True):
            yield f"linear_attn.{own}", Place(name, (len(part), *shape[1:]), rows=part) if fits else Place(name, shape)
    elif c.experts is not None and c.experts.scaled_router and leaf in _ROUTER_SCALES:
        yield f"{c.experts.block}{_ROUTER_SCALES[leaf]}", Place(name, shape)
    elif c.experts is not None and c.experts.biased_choice and leaf == EXPERT_BIASES:
        yield f"{c.experts.block}{EXPERT_BIAS}", Place(name, shape)
    elif c.experts is not None and stem in _EXPERTS:
        projection = c.experts.projections[_EXPERTS.index(stem)]
        for expert in range(shape[0]):
            yield f"{c.experts.block}experts.{expert}.{projection}.{kind}", Place(name, shape[1:], expert)
    elif c.experts is not None and stem == _GATE_UP_EXPERTS and len(shape) == 3 and shape[1] % 2 == 0:
        for projection, half in zip(c.experts.projections, np.split(np.arange(shape[1]), 2), strict=False):
            for expert in range(shape[0]):
                place = Place(name, (len(half), shape[2]), expert, half)
                yield f"{c.experts.block}experts.{expert}.{projection}.{kind}", place
    elif c.experts is not None and c.experts.shared is not None and stem in _SHARED_EXPERT:
        whole = (1, *shape) if len(shape) == 1 else shape
        yield f"{c.experts.block}{_SHARED_EXPERT[stem]}.{kind}", Place(name, whole)
    elif c.conv is not None and leaf == _FILTERS:
        yield "conv.conv.weight", Place(name, (shape[0], 1, shape[1]) if len(shape) == 2 else shape)
    elif c.sinks and leaf == _SINKS:
        yield "self_attn.sinks", Place(name, shape)
    elif c.layer_scalars and leaf == _SCALAR:
        yield "layer_scalar", Place(name, shape)
    elif stem in names:
        heads = {"attn_q": c.num_heads, "attn_k": c.num_kv_heads}.get(stem) if architecture.interleaved else None
        order = None if heads is None or shape[0] % (2 * heads) else _halves(heads, shape[0])
        yield f"{names[stem]}.{kind}", Place(name, shape, rows=order)


def _of_delta_net(name: str, leaf: str, shape: tuple[int, ...], architecture: Architecture, d: DeltaNet) -> Place:
    """Return the place of a tensor of a gated delta net."""
    firsts = {"attn_qkv.weight": (d.conv_dim - d.inner, d.value_dim), "attn_gate.weight": (0, d.value_dim)}
    firsts["ssm_conv1d.weight"] = firsts["attn_qkv.weight"]
    firsts |= dict.fromkeys(("ssm_beta.weight", "ssm_alpha.weight", "ssm_dt.bias", "ssm_a"), (0, 1))
    rows = None
    if architecture.delta_net == "turned" and leaf in firsts and d.key_heads < d.value_heads:
        rows = _turned(d.key_heads, d.value_heads, *firsts[leaf])
        rows = rows if len(rows) == shape[0] else None
    if leaf == "ssm_conv1d.weight" and len(shape) == 2:
        return Place(name, (shape[0], 1, shape[1]), rows=rows)
    return Place(name, shape, rows=rows, computed=_logarithm if leaf == "ssm_a" else None)


@lru_cache(maxsize=16)
def _halves(heads: int, rows: int) -> Array:
    """Return the order of q or k rows in which RoPE rotates halves of a head. Files have pairs of neighbours."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).transpose(0, 2, 1).reshape(-1)


@lru_cache(maxsize=16)
def _turned(key_heads: int, value_heads: int, first: int, dim: int) -> Array:
    """Return the order of rows in which all value heads of a key head lie together, after `first` rows that stay. A
    value head has `dim` rows. Files have the first value head of every key head, then the second of every key head."""
    turned = np.arange(value_heads * dim).reshape(value_heads // key_heads, key_heads, dim).transpose(1, 0, 2)
    return np.concatenate((np.arange(first), first + turned.reshape(-1)))


@lru_cache(maxsize=4)
def _by_key_head(d: DeltaNet, features: bool) -> tuple[Array, Array]:
    """Return the rows of two tensors in one whose rows lie by key head: of q, k and v, and of z (`features`), or of b
    and of a."""
    shared = d.value_heads // d.key_heads
    values = shared * d.value_dim
    bounds = [d.key_dim, 2 * d.key_dim, 2 * d.key_dim + values] if features else [shared]
    rows = np.arange(d.conv_dim + d.inner if features else 2 * d.value_heads).reshape(d.key_heads, -1)
    *first, second = (part.reshape(-1) for part in np.split(rows, bounds, axis=1))
    return np.concatenate(first), second


def _logarithm(rates: Array) -> Array:
    """Return A_log. `rates`: the values -exp(A_log) that a GGUF file stores. The result is NaN where a value is not
    below 0."""
    with np.errstate(all="ignore"):
        logarithms: Array = np.log(-rates.astype(FLOAT64))
    return logarithms


def _layer_names(architecture: Architecture, c: ModelConfig) -> dict[str, str]:
    """Return the checkpoint's names of a layer's tensors, by their names in GGUF files."""
    norms = ("attn_norm", "post_attention_norm", architecture.mlp_norm, "post_ffw_norm")
    names = _LAYER | {norm: name for norm, name in zip(norms, norm_names(c), strict=True) if name is not None}
    if c.fused_projections:
        names |= _FUSED
    if c.experts is not None:
        names["ffn_gate_inp"] = f"{c.experts.block}{c.experts.router}"
        if c.experts.parallel_mlp:
            names |= dict(zip(_PARALLEL_NORMS, PARALLEL_NORMS, strict=True))
    if c.layer_embedding is not None:
        names |= _ADDITION
    if c.conv is not None:
        names |= _SHORT_CONV
    return names
