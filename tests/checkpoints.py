"""Small random checkpoints and tokenizers for tests. Holds no tests; trains nothing; downloads nothing.

Import as `from checkpoints import make_checkpoint`. The folders under tests/ are packages and tests/ is not, so pytest
puts tests/ itself on the path. If tests/ were a package, the repository root would be on the path, and transformers'
search for the distribution `kernels` would find this repository's folder of that name.
"""

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.6,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": None},
    "ministral3": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 9},
    "seed_oss": {},
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 64},
    "granite": _GRANITE,
    "smollm3": {"no_rope_layer_interval": 2},
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    # A limit that gates and values of small models reach.
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9, "swiglu_limit": 0.7},
    "gemma3_text": {"sliding_window": 9, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
    # Layers with and without RoPE and experts. Queries of the latter grow from position 6 on.
    "llama4_text": {
        "num_local_experts": 5,
        "intermediate_size_mlp": 64,
        "attention_chunk_size": 9,
        "no_rope_layer_interval": 2,
        "interleave_moe_layer_step": 2,
        "floor_scale": 7,
        "attn_scale": 0.6,
    },
}
"""For each family, transformers' `model_type` and the config fields of a small test model, which has layers of each
kind and multipliers other than 1."""

_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    # Fewer key heads than value heads, so that mistakes of their order show.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": _DELTA_NET | _SHARED_EXPERT,
    "qwen3_next": _DELTA_NET | _SHARED_EXPERT,
    # An MLP whose size is not the one in config.json.
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "routed_scaling_factor": 1.75,
    },
}
"""Model families whose layers have states, in the form of `FAMILIES`."""

_GEMMA4_KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
_GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 32}
GEMMA4: dict[str, dict[str, Any]] = {
    # Both kinds of layers share keys and values, from layers 1 and 2.
    "gemma4": {
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "sliding_window": 8,
    },
    "gemma4, keys are values": {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "sliding_window": 8,
    },
    "gemma4, all of it": {
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "sliding_window": 8,
    },
    "gemma4, experts": {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "sliding_window": 8,
        **_GEMMA4_EXPERTS,
    },
    "gemma4, experts and embeddings": {
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "sliding_window": 8,
        **_GEMMA4_EXPERTS,
    },
}
"""Fields of small models of Gemma 4."""


def make_gemma4(path: Path, variant: str = "gemma4", **fields: Any) -> Path:
    """Write a random checkpoint of Gemma 4's text model under `path` (created) and return `path`. Heads have 16
    features, and 32 in layers without a window."""
    sizes: dict[str, Any] = {"vocab": 61, "hidden": 64, "intermediate": 96, "head_dim": 16, "kv_heads": 2}
    given = {"final_logit_softcapping": 5.0, "global_head_dim": 32, "layer_types": list(_GEMMA4_KINDS)} | GEMMA4[
        variant
    ]
    given = sizes | {"layers": len(_GEMMA4_KINDS)} | given | fields
    given.setdefault("vocab_size_per_layer_input", given["vocab"])
    return make_checkpoint(path, "gemma4_text", **given)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""A scaling whose three regimes (kept, interpolated, divided) all occur for a head of 48 dimensions."""


YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + i / 40 for i in range(24)],
    "long_factor": [1.0 + i / 3 for i in range(24)],
}
"""A RoPE scaling of the type `longrope` for a head of 48 dimensions."""


MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 7,
    "llama_4_scaling_beta": 0.6,
}
"""RoPE of Ministral 3 whose queries grow from position 7 on, by several factors in a short text."""


def make_checkpoint(
    path: Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    tie: bool = True,
    kv_heads: int = 3,
    group: int = 2,
    head_dim: int = 48,
    vocab: int = 211,
    hidden: int = 96,
    intermediate: int = 160,
    layers: int = 2,
    max_position_embeddings: int = 512,
    initializer_range: float = 0.2,
    dtype: torch.dtype = torch.float32,
    eos_token_id: int | list[int] = 0,
    rope_parameters: dict[str, Any] | None = None,
    max_shard_size: str = "50GB",
    with_tokenizer: bool = True,
    **config_fields: Any,
) -> Path:
    """Write a random checkpoint of `family` under `path` (created) and return `path`.

    `kv_heads * group` query heads; weights are normal(0, `initializer_range`) from `seed`. Norm weights and biases
    are random too: at their usual 1 and 0 a loader that drops or swaps them would pass. `config_fields` go to the
    transformers config as they are. `eos_token_id` is written to config.json and generation_config.json.
    """
    rope = rope_parameters or {"rope_type": "default", "rope_theta": 1e4}
    if family in ("gemma3_text", "olmo3") and "rope_type" in rope:
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
    if family == "ministral3" and rope_parameters is None:
        rope = MINISTRAL_ROPE
    if family == "gemma4_text" and rope_parameters is None:
        rope = {
            "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        }
    if family in ("qwen3_5_text", "qwen3_5_moe_text") and "mrope_section" not in rope:
        half = int(head_dim * rope.get("partial_rotary_factor", 0.25)) // 2
        rope = rope | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    config = CONFIG_MAPPING[family](
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        tie_word_embeddings=tie,
        rope_parameters=rope,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=0,
        **((FAMILIES | HYBRIDS).get(family, {}) | config_fields),
    )
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * initializer_range
            parameter.copy_(1 + noise if _is_factor(name) else noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + torch.randn(buffer.shape, generator=generator) * initializer_range)
            if name.endswith("expert_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * initializer_range)
    path.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    if with_tokenizer:
        write_tokenizer(path, vocab)
    return path


def _is_factor(name: str) -> bool:
    """Return whether the tensor `name` has a norm's weights, or factors of a router."""
    return re.search(r"norm(_\d)?\.weight$|router\.\w*scale$", name) is not None


def make_eagle3(
    path: Path,
    target: Path,
    layout: str = "llama",
    *,
    seed: int = 0,
    layer: str = "llama",
    vocab: int | None = None,
    hidden: int | None = None,
    intermediate: int = 72,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 20,
    layer_ids: list[int] | None = None,
    own_embedding: bool = False,
    initializer_range: float = 0.2,
    dtype: torch.dtype = torch.float32,
    **flags: Any,
) -> Path:
    """Write a random EAGLE-3 head for the checkpoint at `target` under `path` (created) and return `path`.

    `layout` is `llama` (`LlamaForCausalLMEagle3`, `midlayer.*`) or `speculators` (`layers.0.*`, with `layer` `llama` or
    `qwen3`). `vocab` ids are drafted, a random choice of the target's with a table `d2t`; None: all, without a table
    and with the target's LM head. If `hidden` differs from the target's hidden size, the head has an embedding and an
    LM head of its own. `layer_ids` None leaves them out, so that the default holds. `flags` are `norm_before_residual`,
    `norm_before_fc`, `fc_norm`, `norm_output`, or other fields of config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    size, n, full = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    width = size if hidden is None else hidden
    ids = sorted({2, n // 2, n - 3}) if layer_ids is None else sorted(layer_ids)
    fields: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": full,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
    }
    own = {"draft_vocab_size": full if vocab is None else vocab, "target_hidden_size": size} | flags
    if layer_ids is not None:
        own["eagle_aux_hidden_state_layer_ids"] = layer_ids
    if layout == "llama":
        raw = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"} | fields | own
    else:
        raw = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]} | own
        raw = {"norm_before_residual": False} | raw | {"transformer_layer_config": {"model_type": layer} | fields}
    prefix = "midlayer." if layout == "llama" else "layers.0."
    shapes = {
        "fc.weight": (width, len(ids) * size),
        "norm.weight": (width,),
        f"{prefix}self_attn.q_proj.weight": (heads * head_dim, 2 * width),
        f"{prefix}self_attn.k_proj.weight": (kv_heads * head_dim, 2 * width),
        f"{prefix}self_attn.v_proj.weight": (kv_heads * head_dim, 2 * width),
        f"{prefix}self_attn.o_proj.weight": (width, heads * head_dim),
        f"{prefix}mlp.gate_proj.weight": (intermediate, width),
        f"{prefix}mlp.up_proj.weight": (intermediate, width),
        f"{prefix}mlp.down_proj.weight": (width, intermediate),
    }
    shapes |= {f"{prefix}{name}.weight": (width,) for name in ("hidden_norm", "input_layernorm")}
    shapes[f"{prefix}post_attention_layernorm.weight"] = (width,)
    if layer == "qwen3":
        shapes |= {f"{prefix}self_attn.{x}_norm.weight": (head_dim,) for x in "qk"}
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (len(ids) * size,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (size,) for i in range(len(ids))}
    if own_embedding or width != size:
        shapes["embed_tokens.weight"] = (full, width)
    if vocab is not None or width != size:
        shapes["lm_head.weight"] = (own["draft_vocab_size"], width)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator) * initializer_range
        tensors[name] = (1 + noise if "norm" in name else noise).to(dtype)
    if vocab is not None:
        kept = torch.randperm(full, generator=generator)[:vocab].sort().values
        tensors["d2t"] = kept - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(full, dtype=torch.bool).index_fill_(0, kept, True)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def perturb_checkpoint(source: Path, path: Path, *, noise: float, seed: int = 0) -> Path:
    """Copy the checkpoint at `source` to `path` with normal(0, `noise` * std of the tensor) added to each matrix.

    A draft that agrees with its target often but not always: with 2 layers and the defaults of `make_checkpoint`,
    noise 0.1 keeps about half of the greedy choices.
    """
    generator = torch.Generator().manual_seed(seed)
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                scale = noise * tensor.float().std()
                tensors[name] = tensor + (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.dtype)
        save_file(tensors, path / file.name, metadata={"format": "pt"})
    return path


def make_overflowing(path: Path, marker: int, **shape: Any) -> Path:
    """Write a checkpoint whose first layer has full attention and whose second and third have a window. For the token
    `marker` alone, the second layer's MLP overflows fp32: its embedding is the only one along the last dimension, which
    nothing else reads or adds to."""
    windows = {"use_sliding_window": True, "max_window_layers": 1}
    target = make_checkpoint(path, "qwen2", seed=1, tie=False, **(shape | windows | {"layers": 3}))
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[-1] = 0
        elif tensor.ndim == 2 and name != "lm_head.weight":
            tensor[:, -1] = 0
    tensors["model.embed_tokens.weight"][marker, -1] = 1
    for projection in ("gate", "up"):
        weight = tensors[f"model.layers.1.mlp.{projection}_proj.weight"]
        weight[0] = 0
        weight[0, -1] = 1e30
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def first_layers(source: Path, path: Path, layers: int, **fields: Any) -> Path:
    """Copy the checkpoint at `source` to `path` with its first `layers` layers alone, and `fields` in its config.json.

    A small draft that often says what its target says.
    """
    shutil.copytree(source, path)
    edit_json(path / "config.json", num_hidden_layers=layers, **fields)
    tensors = load_file(source / "model.safetensors")
    for name in list(tensors):
        place = re.search(r"\.layers\.(\d+)\.", name)
        if place and int(place[1]) >= layers:
            del tensors[name]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def edit_json(path: Path, remove: tuple[str, ...] = (), **fields: Any) -> None:
    """Set `fields` in the JSON object stored at `path` and drop the keys in `remove`."""
    content = json.loads(path.read_text(encoding="utf-8"))
    for key in remove:
        content.pop(key, None)
    path.write_text(json.dumps(content | fields), encoding="utf-8")


def write_tokenizer(path: Path, vocab: int, *, padding: int = 3, chat_template: str | None = None) -> None:
    """Write a byte-level BPE tokenizer of `vocab - padding` tokens (at least 1) that AutoTokenizer loads from `path`.

    Id 0 is `<|endoftext|>`. The byte alphabet holds what fits, most useful first: letters, blank, line break, other
    printable ASCII, then what UTF-8 needs for é, €, 漢 and emoji (so a token may be a part of a character), all 256
    bytes from 320 tokens on; then merges of two letters. The last `padding` ids of the model have no token, like the
    padded rows of real vocabularies.
    """
    size = max(1, vocab - padding)
    ascii_order = "etaoinshrdlucmfwypvbgkjqxz \n" + "".join(map(chr, range(33, 127))) + "\t\r"
    bytes_in_order = list(dict.fromkeys([*ascii_order.encode(), 0xC3, 0xE2, 0xE6, 0xF0, *range(0x80, 0xC0)]))
    if size >= 320:
        bytes_in_order += [b for b in range(256) if b not in bytes_in_order]
    symbols = _byte_symbols()
    tokens = ["<|endoftext|>", *(symbols[b] for b in bytes_in_order)][:size]
    merges: list[tuple[str, str]] = []
    for left, right in itertools.product(symbols[32] + "etaoinshrdlu", "etaoinshrdlucmfwypvbgkjqxz"):
        if len(tokens) == size:
            break
        if left in tokens:
            merges.append((left, right))
            tokens.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(path)


def _byte_symbols() -> dict[int, str]:
    """Return the character that byte-level BPE writes for each byte: itself if printable, else the next one from
    U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (b for b in range(256) if b not in printable)
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(hidden)}
