"""Finds the tensors of a transformers checkpoint in a GGUF file: their names, their experts, and the order of their
rows."""

from __future__ import annotations

import re
from typing import NamedTuple

from specrs.models.config import ModelConfig
from specrs.models.gguf.architectures import Architecture
from specrs.models.gguf.file import GGUFFile
from specrs.models.gguf.rope import FACTORS, LONG_FACTORS
from specrs.models.tensors import norm_names

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""Tensors that hold a projection of all experts, in the order of `ExpertFields.projections`."""
_SINKS = "attn_sinks.weight"


class Place(NamedTuple):
    """Place of a checkpoint's tensor in a GGUF file."""

    name: str
    """Name of the tensor in the GGUF file."""
    expert: int | None = None
    """Index of the expert in the tensor's first dimension; None: the whole tensor."""
    heads: int | None = None
    """Number of heads whose rows are stored as pairs that RoPE rotates; None: rows are in the checkpoint's order."""


def places(file: GGUFFile, architecture: Architecture, c: ModelConfig) -> dict[str, Place]:
    """Return the place of each tensor of `file`, by the name that a checkpoint of `c` gives it.

    Unknown tensors keep their names.
    """
    layer = _layer_names(architecture, c)
    found: dict[str, Place] = {}
    for name, info in file.tensors.items():
        if name in (FACTORS, *LONG_FACTORS.values()):
            continue
        stem, _, kind = name.rpartition(".")
        split = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if split is None:
            found[f"{_TOP[stem]}.{kind}" if stem in _TOP else name] = Place(name)
            continue
        prefix, leaf = f"model.layers.{split[1]}.", split[2]
        if c.experts is not None and leaf in _EXPERTS:
            experts, projection = f"{prefix}{c.experts.block}.experts", c.experts.projections[_EXPERTS.index(leaf)]
            for expert in range(info.shape[0]):
                found[f"{experts}.{expert}.{projection}.{kind}"] = Place(name, expert)
        elif c.sinks and f"{leaf}.{kind}" == _SINKS:
            found[f"{prefix}self_attn.sinks"] = Place(name)
        elif leaf in layer:
            heads = {"attn_q": c.num_heads, "attn_k": c.num_kv_heads}.get(leaf)
            found[f"{prefix}{layer[leaf]}.{kind}"] = Place(name, heads=heads if architecture.interleaved else None)
        else:
            found[name] = Place(name)
    return found


def _layer_names(architecture: Architecture, c: ModelConfig) -> dict[str, str]:
    """Return the checkpoint's names of a layer's tensors, by their names in GGUF files."""
    norms = ("attn_norm", "post_attention_norm", architecture.mlp_norm, "post_ffw_norm")
    names = _LAYER | {norm: name for norm, name in zip(norms, norm_names(c), strict=True) if name is not None}
    if c.fused_projections:
        names |= _FUSED
    if c.experts is not None:
        names["ffn_gate_inp"] = f"{c.experts.block}.{c.experts.router}"
    return names
