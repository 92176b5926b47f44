"""Configurations of the reference models, without weights. Loads nothing."""

from __future__ import annotations

import json
from pathlib import Path

SHAPES = {
    "qwen3-32b": (64, 5120, 64, 8, 128, 25600, False),
    "qwen3-8b": (36, 4096, 32, 8, 128, 12288, False),
    "qwen3-1.7b": (28, 2048, 16, 8, 128, 6144, True),
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, True),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 768, False),
    "tiny": (2, 64, 2, 1, 64, 64, True),
    "tiny-experts": (2, 64, 2, 1, 64, 64, True),
}
"""layers, hidden, heads, KV heads, head size, intermediate, tied embedding."""
EXPERTS = {"qwen3-30b-a3b": (128, 8), "tiny-experts": (4, 2)}
"""experts, experts of a token; the intermediate size is that of one."""
VOCAB = {"tiny": 101, "tiny-experts": 101}


def write_config(name: str, folder: Path, num_layers: int | None = None) -> Path:
    """Write the config.json of a shape, with `num_layers` layers instead of its own, for `load_format="dummy"`. Return
    its folder."""
    layers, hidden, heads, kv_heads, head_dim, intermediate, tied = SHAPES[name]
    path = folder / (name if num_layers is None else f"{name}-{num_layers}")
    path.mkdir(parents=True, exist_ok=True)
    content = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": VOCAB.get(name, 151_936),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers or layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "eos_token_id": 0,
    }
    if name in EXPERTS:
        count, each = EXPERTS[name]
        content |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
        content |= {"num_experts": count, "num_experts_per_tok": each, "moe_intermediate_size": intermediate}
    (path / "config.json").write_text(json.dumps(content))
    return path


def weight_bytes(name: str) -> int:
    """Return the bf16 bytes that a pass reads: all weights but an untied input embedding. Not for shapes in
    `EXPERTS`."""
    layers, hidden, heads, kv_heads, head_dim, intermediate, _ = SHAPES[name]
    attention = hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden
    return 2 * (layers * (attention + 3 * hidden * intermediate + 2 * hidden) + VOCAB.get(name, 151_936) * hidden)
