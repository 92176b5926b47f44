"""Metadata and tensors of GGUF files of each family, as llama.cpp's converter makes them. Holds no tests.

Names come from the package `gguf`. Nothing here is shared with specrs' reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch

FILE_NAMES = {
    "mistral": "llama",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "llama4_text": "llama4",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "olmo3": "olmo2",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "lfm2_moe": "lfm2moe",
}
"""`general.architecture` by transformers' `model_type`, if the two differ."""
PERMUTED = ("llama", "mistral3", "granite", "smollm3")
"""Architectures whose GGUF files have permuted q and k."""
SHIFTED = ("gemma3", "qwen35", "qwen35moe", "qwen3next")
"""Architectures whose GGUF files store norm weights with 1 added, except those of delta nets."""
HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
ROUTERS = (
    "mlp.gate",
    "feed_forward.router",
    "mlp.shared_expert_gate",
    "mlp.router",
    "block_sparse_moe.gate",
    "router.proj",
    "feed_forward.gate",
)


def architecture_fields(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return the metadata fields of a model with this config.json, without the architecture's prefix."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    ropes = config.get("rope_parameters") or {}
    rope = ropes.get("full_attention", ropes)
    fields: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["norm_eps" if architecture.startswith("lfm2") else "rms_norm_eps"],
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if architecture not in ("granite", "phi3", "gemma4"):
        fields |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if architecture in PERMUTED:
        size = hidden // heads if architecture == "granite" else config["head_dim"]
        fields |= {"vocab_size": config["vocab_size"], "rope.dimension_count": size}
    fields |= _scaling(rope)
    if config.get("num_experts_per_tok"):
        count = config.get("num_experts") or config["num_local_experts"]
        fields |= {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}
    if architecture in ("qwen35moe", "qwen3next"):
        fields["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if architecture == "qwen35moe":
        del fields["feed_forward_length"]
    if architecture in ("qwen3moe", "qwen35moe", "qwen3next"):
        fields["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if architecture in ("gpt-oss", "llama4"):
        fields["expert_feed_forward_length"] = config["intermediate_size"]
    if architecture == "llama4":
        fields["feed_forward_length"] = config["intermediate_size_mlp"]
        fields["interleave_moe_layer_step"] = config["interleave_moe_layer_step"]
    if architecture in ("gpt-oss", "gemma3", "phi3"):
        fields["attention.sliding_window"] = config["sliding_window"] or 0
    if architecture == "olmo2" and config.get("sliding_window"):
        pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
        fields |= {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": pattern}
        fields["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
    if architecture == "phi3":
        fields |= _phi3(config, rope)
    if architecture == "gemma4":
        fields |= _gemma4(config, ropes)
    if architecture in HYBRIDS:
        fields |= _hybrid(config, rope)
    if architecture.startswith("lfm2"):
        fields |= _lfm2(config, architecture)
    if architecture == "granite":
        fields |= {
            "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
    return fields


def _gemma4(config: dict[str, Any], ropes: dict[str, Any]) -> dict[str, Any]:
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    shared, layers, width = config["num_kv_shared_layers"], len(windows), config["intermediate_size"]
    # transformers writes what differs from the fields of all layers only.
    full = {"head_dim": config["head_dim"]} | config.get("per_layer_config", {}).get(str(windows.index(False)), {})
    fields: dict[str, Any] = {
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"] or 0,
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windows,
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
    }
    if config["use_double_wide_mlp"]:
        fields["feed_forward_length"] = [width] * (layers - shared) + [2 * width] * shared
    if "num_key_value_heads" in full:
        plain = config["num_key_value_heads"]
        fields["attention.head_count_kv"] = [plain if window else full["num_key_value_heads"] for window in windows]
    if config["final_logit_softcapping"]:
        fields["final_logit_softcapping"] = config["final_logit_softcapping"]
    if config["enable_moe_block"]:
        fields |= {"expert_count": config["num_experts"], "expert_used_count": config["top_k_experts"]}
        fields["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return fields


def _lfm2(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    heads = config["num_key_value_heads"]
    fields = {
        "vocab_size": config["vocab_size"],
        "shortconv.l_cache": config["conv_L_cache"],
        "attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in config["layer_types"]],
    }
    if architecture == "lfm2":
        multiple = config["block_multiple_of"]
        fields["feed_forward_length"] = (2 * config["intermediate_size"] // 3 + multiple - 1) // multiple * multiple
        return fields
    return fields | {
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_gating_func": 2,
        "expert_weights_scale": config["routed_scaling_factor"],
    }


def _hybrid(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    kinds = [kind == "linear_attention" for kind in config["layer_types"]]
    every = kinds.index(False) + 1
    heads = config["linear_num_value_heads"]
    fields: dict[str, Any] = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "full_attention_interval": every,
        "rope.dimension_count": int(config["head_dim"] * rope.get("partial_rotary_factor", 0.25)),
    }
    if kinds != [(i + 1) % every != 0 for i in range(len(kinds))]:
        fields["attention.recurrent_layers"] = kinds
    if "mrope_section" in rope:
        fields["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    return fields


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type")
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if kind != "yarn":
        return {}
    fields = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
        "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim"),
        "rope.scaling.yarn_attn_factor": rope.get("attention_factor"),
        "attention.temperature_scale": rope.get("llama_4_scaling_beta"),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _phi3(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    share, positions = rope.get("partial_rotary_factor", 1.0), config["max_position_embeddings"]
    original = config["original_max_position_embeddings"]
    fields = {
        "rope.dimension_count": int(share * config["hidden_size"]) // config["num_attention_heads"],
        "rope.scaling.original_context_length": original,
    }
    if "long_factor" in rope:
        scale = positions / original
        fields["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return fields


def file_tensors(
    config: dict[str, Any], architecture: str, tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and float32 numbers of each tensor in the GGUF file of a checkpoint with these `tensors`."""
    (known,) = [arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(known, config["num_hidden_layers"])
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        for part, numbers in _parts(config, architecture, name, tensor.float()):
            at = part.split(".experts.")
            if len(at) == 2 and at[1][0].isdigit():
                expert, _, leaf = at[1].partition(".")
                stacks.setdefault(f"{at[0]}.experts.{leaf}", {})[int(expert)] = numbers
            else:
                yield _file_name(names, part), numbers.contiguous().numpy()
    for part, experts in stacks.items():
        stacked = torch.stack([experts[i] for i in range(len(experts))])
        yield _file_name(names, part), stacked.numpy()
    rope = config.get("rope_parameters") or {}
    if architecture == "gemma4":
        full = rope["full_attention"]
        place = str(config["layer_types"].index("full_attention"))
        size = config.get("per_layer_config", {}).get(place, {}).get("head_dim", config["head_dim"])
        turned = int(size * full["partial_rotary_factor"] / 2)
        yield "rope_freqs.weight", np.array([1.0] * turned + [1e30] * (size // 2 - turned), np.float32)
    for field, kind in (
        ("long_factor", gguf.MODEL_TENSOR.ROPE_FACTORS_LONG),
        ("short_factor", gguf.MODEL_TENSOR.ROPE_FACTORS_SHORT),
    ):
        if field in rope:
            yield f"{gguf.TENSOR_NAMES[kind]}.weight", np.array(rope[field], np.float32)


def _file_name(names: gguf.TensorNameMap, name: str) -> str:
    # Mixtral's stacks have the name of the authors' layout.
    name = name.replace("model.layers.", "layers.").replace("block_sparse_moe.experts", "feed_forward.experts")
    for known in (f"model.{name}", name):
        found = names.get_name(known, try_suffixes=(".weight", ".bias", ".scale"))
        if found is not None:
            return str(found)
    raise KeyError(name)


def _parts(
    config: dict[str, Any], architecture: str, name: str, numbers: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and values of each tensor that llama.cpp's converter makes of one tensor of a checkpoint."""
    if architecture in SHIFTED and name.endswith("norm.weight") and "linear_attn" not in name:
        numbers = numbers + 1
    if name.endswith("in_proj_qkvz.weight"):
        for part, rows in zip(("qkv", "z"), by_kind(config, numbers), strict=True):
            yield name.replace("qkvz", part), rows
        return
    if name.endswith("conv.conv.weight"):
        numbers = numbers.squeeze(1)
    if name.endswith("shared_expert_gate.weight") and architecture == "qwen35moe":
        numbers = numbers.squeeze(0)
    if architecture in HYBRIDS and "linear_attn" in name:
        name, numbers = _of_delta_net(config, architecture, name, numbers)
    if architecture in PERMUTED and name.split(".")[-2] in ("q_proj", "k_proj"):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        halves = numbers.view(heads, 2, numbers.shape[0] // heads // 2, *numbers.shape[1:])
        numbers = halves.transpose(1, 2).reshape(numbers.shape)
    if name.endswith("router.scale"):
        yield f"{name.removesuffix('.scale')}.proj.scale", numbers
    elif name.endswith("router.per_expert_scale"):
        yield f"{name.removesuffix('router.per_expert_scale')}experts.down_proj.scale", numbers
    elif architecture == "gemma4" and not name.endswith(".weight"):
        yield f"{name}.weight", numbers
    elif name.endswith("expert_bias"):
        yield f"{name}.bias", numbers
    elif architecture == "llama4" and ".experts." in name:
        halves = numbers.transpose(1, 2).chunk(2, 1) if "gate_up" in name else (numbers.transpose(1, 2),)
        for part, half in zip(("gate", "up") if "gate_up" in name else ("down",), halves, strict=True):
            yield f"{name.rsplit('.', 1)[0]}.{part}_proj.weight", half
    elif architecture != "gpt-oss":
        yield name, numbers
    elif name.endswith("sinks"):
        yield f"{name}.weight", numbers
    elif ".experts." not in name:
        yield name, numbers
    else:
        bias = name.endswith("_bias")
        stem, kind = (name.removesuffix("_bias"), "bias") if bias else (name, "weight")
        numbers = numbers if bias else numbers.transpose(1, 2)
        if stem.endswith("down_proj"):
            yield f"{stem}.{kind}", numbers
        else:
            yield f"{stem.replace('gate_up', 'gate')}.{kind}", numbers[:, ::2]
            yield f"{stem.replace('gate_up', 'up')}.{kind}", numbers[:, 1::2]


def _of_delta_net(
    config: dict[str, Any], architecture: str, name: str, numbers: torch.Tensor
) -> tuple[str, torch.Tensor]:
    leaf = name.split("linear_attn.")[1]
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dim, before = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]
    if leaf == "A_log":
        numbers = -torch.exp(numbers)
    elif leaf == "dt_bias":
        name = name.replace("dt_bias", "dt_proj.bias")
    elif leaf == "conv1d.weight":
        numbers = numbers.squeeze(1)
    if architecture == "qwen3next" or leaf == "norm.weight":
        return name, numbers
    if leaf == "out_proj.weight":
        return name, by_turns(numbers.T, keys, heads, dim).T
    if leaf in ("in_proj_qkv.weight", "conv1d.weight"):
        return name, torch.cat((numbers[:before], by_turns(numbers[before:], keys, heads, dim)))
    return name, by_turns(numbers, keys, heads, dim if leaf == "in_proj_z.weight" else 1)


def by_kind(config: dict[str, Any], rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of q, k and v of all heads, and the rows of z. In `rows`, all of a key head's rows follow one
    another."""
    keys, dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    q, k, v, z = rows.view(keys, -1, rows.shape[1]).split([dim, dim, values, values], dim=1)
    return torch.cat([part.reshape(-1, rows.shape[1]) for part in (q, k, v)]), z.reshape(-1, rows.shape[1])


def by_turns(rows: torch.Tensor, keys: int, heads: int, dim: int) -> torch.Tensor:
    """Reorder rows of value heads, `dim` rows each: first the first head of every key head, then the second, and so
    on."""
    return rows.reshape(keys, heads // keys, dim, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def rounded(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors rounded to what GGUF blocks of `kind` hold.

    Blocks lie along inputs, so a file may have outputs in any order and in several tensors.
    """
    given = gguf.GGMLQuantizationType[kind]

    def numbers(matrix: torch.Tensor) -> torch.Tensor:
        blocks = gguf.quants.quantize(matrix.contiguous().numpy(), given)
        return torch.from_numpy(np.array(gguf.quants.dequantize(blocks, given), np.float32).reshape(matrix.shape))

    made = {}
    for name, tensor in tensors.items():
        # Inputs come first in gpt-oss and Llama 4, and last in Gemma 4, whose experts are no part of an `mlp`.
        stacked = tensor.ndim == 3 and not name.endswith(("conv1d.weight", "conv.conv.weight"))
        if stacked and ".mlp.experts." not in name and ".feed_forward.experts." not in name:
            made[name] = numbers(tensor)
        elif stacked:
            made[name] = numbers(tensor.transpose(1, 2)).transpose(1, 2).contiguous()
        elif is_matrix(name, tensor):
            made[name] = numbers(tensor)
        else:
            made[name] = tensor
    return made


def is_matrix(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a GGUF file stores the checkpoint's two-dimensional tensor `name` in blocks, if it has blocks at
    all. False for three-dimensional stacks of experts, although files store them in blocks, too."""
    return tensor.ndim == 2 and not name.removesuffix(".weight").endswith(ROUTERS) and not name.endswith("_bias")
