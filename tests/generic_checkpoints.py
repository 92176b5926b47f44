"""Small random checkpoints of architectures that transformers' own modules compute; for some of them specrs has a
decoder, too. Holds no tests; downloads nothing."""

from pathlib import Path
from typing import Any

import torch
from checkpoints import write_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCAB = 211

_PLAIN: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": _PLAIN,  # parallel residuals, a part of each head rotated
    "opt": _PLAIN | {"ffn_dim": 48, "word_embed_proj_dim": 16},  # positions begin at 2, embeddings are projected
    "starcoder2": _PLAIN | {"sliding_window": 9},
    "gemma2": _PLAIN
    | {"head_dim": 8, "sliding_window": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "cohere": _PLAIN | {"logit_scale": 3.0, "use_qk_norm": True},
    "stablelm": _PLAIN | {"use_parallel_residual": True, "qk_layernorm": True},
    "olmo": _PLAIN | {"clip_qkv": 0.3},
    "nemotron": _PLAIN | {"head_dim": 8},
    "glm4": _PLAIN | {"head_dim": 8},
    "exaone4": _PLAIN | {"sliding_window": 9, "sliding_window_pattern": 2},
    "phi": _PLAIN | {"qk_layernorm": True},
    "llama4_text": _PLAIN
    | {
        "head_dim": 8,
        "attention_chunk_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 0],
    },
    "deepseek_v3": _PLAIN  # heads of 24 for keys and 12 for values
    | _EXPERTS
    | {
        "n_routed_experts": 4,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
    "olmo2": _PLAIN,
    "phi3": _PLAIN | {"sliding_window": 9, "partial_rotary_factor": 0.5},
    "granite": _PLAIN
    | {
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.4,
        "attention_bias": True,
    },
    "smollm3": _PLAIN | {"no_rope_layers": [1, 0]},
    "gemma3_text": _PLAIN | {"head_dim": 8, "sliding_window": 9, "sliding_window_pattern": 2},
    "qwen3_moe": _PLAIN
    | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "mixtral": _PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": _PLAIN | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    "olmoe": _PLAIN | {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5},
}
"""Fields of a small model of each architecture, by transformers' `model_type`."""


def make_generic(path: Path, model_type: str, *, seed: int = 0, initializer_range: float = 0.3, **fields: Any) -> Path:
    """Write a random checkpoint of `model_type` under `path` (created) and return `path`.

    All weights and biases are normal(0, `initializer_range`) from `seed`, in float64. Vectors with `norm` in their name
    are 1 more.
    """
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    config = CONFIG_MAPPING[model_type](**(ARCHITECTURES.get(model_type, _PLAIN) | ends | fields))
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * initializer_range
            parameter.copy_(1 + noise if parameter.ndim == 1 and "norm" in name else noise)
    path.mkdir(parents=True, exist_ok=True)
    model.double().save_pretrained(path)
    write_tokenizer(path, VOCAB)
    return path
