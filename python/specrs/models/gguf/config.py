"""Converts the metadata of a GGUF file to the fields of a config.json."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from specrs.errors import CheckpointError
from specrs.models.delta_net import LINEAR
from specrs.models.experts import SHARED_SIZE
from specrs.models.gguf.architectures import Architecture, architecture_of
from specrs.models.gguf.fields import Fields
from specrs.models.gguf.file import GGUFFile
from specrs.models.gguf.names import EXPERT_BIASES
from specrs.models.gguf.rope import rope_object
from specrs.models.gguf.types import PLAIN
from specrs.models.gguf.vocabulary import end_ids
from specrs.models.layers import FULL, SLIDING
from specrs.models.query_scaling import FIELD
from specrs.models.registry import ExpertFields, Family
from specrs.models.short_conv import CONV

_CHUNK, _MAVERICK_EXPERTS = 8192, 128
"""Size of chunks in tokens, and number of experts of the one model that does not norm queries and keys, in Llama 4."""
_SIGMOID = 2
"""Number in a file for routers that take the sigmoid."""
_GEMMA3_27B_LAYERS = 62
"""Number of layers of Gemma 3 27B. Only this size does not divide attention scores by the root of the head's size."""


def raw_config(file: GGUFFile) -> dict[str, Any]:
    """Return the fields that the config.json of the model in `file` has, for `models.config.parse_config`.

    Raises CheckpointError for a field that is missing or is no size, UnsupportedModelError for a value that is not
    implemented.
    """
    architecture, prefix = architecture_of(file), file.metadata["general.architecture"]
    family, values = architecture.family, Fields(file, prefix)
    heads, hidden = values.size("attention.head_count"), values.size("embedding_length")
    layers, positions = _num_layers(values, family), values.size("context_length")
    head_dim = values.size("attention.key_length", max(1, hidden // heads))
    rotary_dim = values.size("rope.dimension_count", head_dim)
    values.check_equal("attention.value_length", head_dim)
    if not family.partial_rotary:
        values.check_equal("rope.dimension_count", head_dim)
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: token_embd.weight is missing")
    vocab = file.tensors["token_embd.weight"].shape[0]
    values.check_equal("vocab_size", vocab)
    raw: dict[str, Any] = {
        "architectures": [architecture.name],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        family.eps_field: values.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": positions,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype({info.kind for info in file.tensors.values()}),
        "eos_token_id": end_ids(file.metadata),
        "sliding_window": None,
    }
    rope = rope_object(values, family, rotary_dim, positions)
    if family.local_rope_theta is not None:
        theta = rope["rope_theta"] if architecture.one_theta else family.local_rope_theta
        if architecture.attention_factor and rope.get("rope_type") == "yarn":
            rope |= _attention_factor(values)
        local = values.number("rope.freq_base_swa", theta)
        rope = {"full_attention": rope, "sliding_attention": {"rope_theta": local}}
    elif "rope.freq_base_swa" in values:
        values.check_equal("rope.freq_base_swa", values.get("rope.freq_base"))
    if family.query_scaling:
        rope[FIELD] = _beta(values, rope)
    raw["rope_parameters"] = rope
    if family.original_positions is not None:
        raw["original_max_position_embeddings"] = values.size("rope.scaling.original_context_length", positions)
    if family.partial_rotary:
        raw["partial_rotary_factor"] = rotary_dim / head_dim
    if family.multipliers:
        raw |= _multipliers(values)
    if family.query_pre_attn_scalar is not None:
        raw["query_pre_attn_scalar"] = hidden // heads if layers == _GEMMA3_27B_LAYERS else head_dim
    if family.delta_net:
        raw |= _delta_net(values, layers)
    raw |= _windows(values, architecture, layers)
    if family.varied_layers:
        raw |= _varied(values, raw, head_dim)
    elif family.short_conv:
        raw |= _short_conv(values, layers)
    else:
        raw |= _sizes(values, heads, family.experts)
    raw |= _llama4(values, family) if family.unrotated_scaling else _experts(values, family.experts)
    raw |= _biases(file, architecture)
    values.check_all_read()
    return raw


def _attention_factor(values: Fields) -> dict[str, Any]:
    """Return the factor of queries and keys for YaRN. Without the field it is derived from the scaling's factor."""
    name = "rope.scaling.yarn_attn_factor"
    return {"attention_factor": values.number(name)} if name in values else {}


def _beta(values: Fields, rope: dict[str, Any]) -> float:
    """Return the `beta` of query scaling. Its length is that of the RoPE object `rope`, as in llama.cpp, so another
    `temperature_length` is rejected."""
    length = rope.get("original_max_position_embeddings")
    if values.get("attention.temperature_length", 0) not in (0, length):
        raise values.unsupported("attention.temperature_length", f"{length}, as rope.scaling.original_context_length")
    return values.number("attention.temperature_scale")


def _num_layers(values: Fields, family: Family) -> int:
    """Return the number of layers without those of an MTP head, which `block_count` includes."""
    blocks = values.size("block_count")
    heads = values.get("nextn_predict_layers", 0) if family.delta_net else 0
    if type(heads) is not int or not 0 <= heads < blocks:
        raise values.unsupported("nextn_predict_layers", f"a number of layers below block_count={blocks}")
    return blocks - heads


def _delta_net(values: Fields, layers: int) -> dict[str, Any]:
    """Return the fields of config.json for the sizes of gated delta nets and the layers that have one."""
    heads, inner = values.size("ssm.time_step_rank"), values.size("ssm.inner_size")
    if inner % heads:
        raise values.unsupported("ssm.inner_size", f"a multiple of ssm.time_step_rank={heads}")
    values.raw("rope.dimension_sections")  # positions of images, which are those of the text for text
    raw: dict[str, Any] = {
        "linear_num_key_heads": values.size("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": values.size("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": values.size("ssm.conv_kernel"),
        "full_attention_interval": values.size("full_attention_interval", 4),
    }
    kinds = values.raw("attention.recurrent_layers")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) < layers or any(type(kind) is not bool for kind in kinds):
            raise values.unsupported("attention.recurrent_layers", f"true or false for each of {layers} layers")
        raw["layer_types"] = [LINEAR if kind else FULL for kind in kinds[:layers]]
    return raw


def _short_conv(values: Fields, layers: int) -> dict[str, Any]:
    """Return the fields of config.json for layers with a short convolution, which have no KV heads, and for KV heads
    and the MLP's size, which files have after its adjustment."""
    counts = values.raw("attention.head_count_kv")
    counts = counts if isinstance(counts, list) else [counts] * layers
    if len(counts) != layers or any(type(n) is not int or n < 0 for n in counts) or len({0, *counts}) != 2:
        raise values.unsupported("attention.head_count_kv", f"0 or one other number for each of {layers} layers")
    return {
        "num_key_value_heads": max(counts),
        "layer_types": [FULL if count else CONV for count in counts],
        "conv_L_cache": values.size("shortconv.l_cache"),
        "intermediate_size": values.size("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
    }


def _sizes(values: Fields, heads: int, fields: ExpertFields | None) -> dict[str, Any]:
    """Return the number of KV heads and the size of the MLP, if the model has one in every layer."""
    raw = {"num_key_value_heads": values.size("attention.head_count_kv", heads)}
    return raw if fields is not None else raw | {"intermediate_size": values.size("feed_forward_length")}


def _varied(values: Fields, raw: dict[str, Any], full_dim: int) -> dict[str, Any]:
    """Return the fields of config.json for layers of different sizes, which may share keys and values and add
    embeddings. `raw` has the fields so far, `full_dim` is the size of a head in layers without a window."""
    kinds, layers, tensors = raw["layer_types"], raw["num_hidden_layers"], values.file.tensors
    dims = {FULL: full_dim, SLIDING: values.size("attention.key_length_swa", full_dim)}
    for field in ("attention.value_length_swa", "rope.dimension_count_swa"):
        values.check_equal(field, dims[SLIDING])
    kv_heads = values.sizes("attention.head_count_kv", layers)
    widths = values.sizes("feed_forward_length", layers)
    shared = values.get("attention.shared_kv_layers", 0)
    if type(shared) is not int or not 0 <= shared < layers:
        raise values.unsupported("attention.shared_kv_layers", f"a number of layers below block_count={layers}")
    first, width = layers - shared, widths[0]
    double = shared > 0 and widths[first:] == [2 * width] * shared
    if widths != [width] * first + [width * (1 + double)] * shared:
        raise values.unsupported("feed_forward_length", "one size, and it or its double in layers that share keys")
    size = values.get("embedding_length_per_layer_input", 0)
    table = tensors.get("per_layer_token_embd.weight")
    if size and table is None:
        raise CheckpointError(f"{values.file.path}: per_layer_token_embd.weight is missing")
    cap = values.get("final_logit_softcapping", 0)
    own_keys = [i for i in range(first) if kinds[i] == FULL]
    plain = dims[SLIDING], kv_heads[kinds.index(SLIDING) if SLIDING in kinds else 0]
    own = {i: (dims[kind], count) for i, (kind, count) in enumerate(zip(kinds, kv_heads, strict=True))}
    return {
        "head_dim": plain[0],
        "num_key_value_heads": plain[1],
        "per_layer_config": {
            str(i): {"head_dim": dim, "num_key_value_heads": count}
            for i, (dim, count) in own.items()
            if (dim, count) != plain
        },
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in tensors for i in own_keys),
        "num_kv_shared_layers": shared,
        "intermediate_size": width,
        "use_double_wide_mlp": double,
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": raw["vocab_size"] if table is None else table.shape[0],
        "final_logit_softcapping": values.number("final_logit_softcapping") if cap else None,
    }


def _experts(values: Fields, fields: ExpertFields | None) -> dict[str, Any]:
    """Return the number of experts, their size, and the number that each row uses; nothing without experts. If no layer
    has an MLP, `intermediate_size` is the size of an expert."""
    if fields is None or (fields.enabled is not None and values.get("expert_count", 0) == 0):
        return {}
    raw: dict[str, Any] = {
        fields.count: values.size("expert_count"),
        fields.per_tok: values.size("expert_used_count"),
    }
    if fields.enabled is not None:
        return raw | {fields.enabled: True, fields.intermediate_size: values.size("expert_feed_forward_length")}
    if fields.intermediate_size != "intermediate_size":
        # In files of such a family, weights of chosen experts add up to 1. Without an MLP's size, no layer has an MLP.
        size = values.size("expert_feed_forward_length")
        raw |= {"norm_topk_prob": True, "intermediate_size": values.size("feed_forward_length", size)}
        if fields.shared_intermediate_size is not None:
            raw[SHARED_SIZE] = values.size("expert_shared_feed_forward_length", size)
            if values.get("expert_shared_count", 1) != 1:
                raise values.unsupported("expert_shared_count", "1")
        if fields.first_dense is not None:
            raw |= _lfm2_experts(values)
        return raw | {fields.intermediate_size: size}
    of = "expert_feed_forward_length" if "expert_feed_forward_length" in values else "feed_forward_length"
    values.check_equal("feed_forward_length", values.size(of))
    return raw | {"intermediate_size": values.size(of)}


def _lfm2_experts(values: Fields) -> dict[str, Any]:
    """Return the fields of config.json for the routing of LFM2's experts, and for the layers that have them. Raises
    UnsupportedModelError for routers that do not take the sigmoid."""
    if values.get("expert_gating_func", 0) != _SIGMOID:
        raise values.unsupported("expert_gating_func", f"{_SIGMOID}, which is the sigmoid")
    scale = values.get("expert_weights_scale", 0.0)
    return {
        "num_dense_layers": values.get("leading_dense_block_count", 0),
        "routed_scaling_factor": 1.0 if scale == 0.0 else scale,
        "use_expert_bias": any(name.endswith(f".{EXPERT_BIASES}") for name in values.file.tensors),
    }


def _llama4(values: Fields, family: Family) -> dict[str, Any]:
    """Return the fields of config.json for Llama 4's experts, and those that files lack because they are constants in
    llama.cpp.

    Every fourth layer sees all positions and has no RoPE. Chunks have 8,192 tokens. Only Maverick, with 128 experts,
    does not norm queries and keys. Raises UnsupportedModelError for another size of chunks, and for routers that do not
    take the sigmoid.
    """
    experts, count = family.experts, values.size("expert_count")
    assert experts is not None
    values.check_equal("attention.sliding_window", _CHUNK)
    if values.get("expert_gating_func", 0) not in (0, _SIGMOID):
        raise values.unsupported("expert_gating_func", f"{_SIGMOID}, which is the sigmoid")
    return {
        experts.count: count,
        experts.per_tok: values.size("expert_used_count"),
        experts.intermediate_size: values.size("expert_feed_forward_length"),
        family.intermediate_field: values.size("feed_forward_length"),
        "interleave_moe_layer_step": values.size("interleave_moe_layer_step"),
        "attention_chunk_size": _CHUNK,
        "floor_scale": _CHUNK,
        "attn_scale": 0.1,
        "no_rope_layer_interval": 4,
        "use_qk_norm": count != _MAVERICK_EXPERTS,
    }


def _windows(values: Fields, architecture: Architecture, layers: int) -> dict[str, Any]:
    """Return the fields of config.json for the size of the sliding window and the layers that have one."""
    period, window = architecture.window_period, values.get("attention.sliding_window", 0)
    if period is None:
        if architecture.family.windows != "chunks":
            values.check_equal("attention.sliding_window", 0)
        return {}
    if window == 0 and type(window) is int:
        return {"layer_types": [FULL] * layers} if period else {}
    size = values.size("attention.sliding_window")
    if not period:
        return {"sliding_window": size}
    pattern = values.raw("attention.sliding_window_pattern", period)
    if type(pattern) is int and pattern >= 0:
        pattern = [pattern == 0 or (layer + 1) % pattern != 0 for layer in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers or any(type(has) is not bool for has in pattern):
        allowed = f"a number of layers, or true or false for each of {layers} layers"
        raise values.unsupported("attention.sliding_window_pattern", allowed)
    return {"sliding_window": size, "layer_types": [SLIDING if has else FULL for has in pattern]}


def _dtype(kinds: Set[str]) -> str:
    """Return the checkpoint's dtype for tensors of the types `kinds`. It is bfloat16 for quantized tensors, whose
    blocks have numbers beyond the range of float16."""
    if "BF16" in kinds or kinds - PLAIN.keys():
        return "bfloat16"
    return "float16" if "F16" in kinds else "float32"


def _multipliers(values: Fields) -> dict[str, Any]:
    """Return the multipliers of Granite. Raises UnsupportedModelError for a model without RoPE."""
    if values.get("rope.scaling.finetuned", True) is not True:
        raise values.unsupported("rope.scaling.finetuned", "true, because false is a model without RoPE")
    return {
        "attention_multiplier": values.number("attention.scale"),
        "embedding_multiplier": values.number("embedding_scale"),
        "residual_multiplier": values.number("residual_scale"),
        "logits_scaling": values.number("logit_scale"),
    }


def _biases(file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    """Return which projections have biases, for families in which that varies."""
    has = {
        "attention_bias": any(name.endswith("attn_q.bias") for name in file.tensors),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in file.tensors),
    }
    if architecture.family.qkv_bias:
        del has["attention_bias"]
    return {field: value for field, value in has.items() if value}
