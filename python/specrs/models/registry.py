"""The table of model families. A family is a row of this table: all share one decoder; what differs is data."""

from dataclasses import dataclass

from specrs.models.errors import unsupported


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes, and which fields of config.json it lets vary.

    Defaults are those of transformers for a field that config.json leaves out; `None` means that it must be there
    (or, for `head_dim`, that it is derived as hidden_size / num_attention_heads).
    """

    model_type: str
    """What config.json calls the family; transformers goes by it where `architectures` says something else."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before RoPE."""
    qkv_bias: bool = False
    """q, k and v projections always have a bias, o never; `attention_bias` does not exist."""
    has_attention_bias: bool = False
    """`attention_bias` may be true: q, k, v and o projections then have a bias."""
    has_mlp_bias: bool = False
    """`mlp_bias` may be true: gate, up and down projections then have a bias."""
    head_dim: int | None = None
    kv_heads_default: bool = False
    """A missing `num_key_value_heads` means as many as query heads."""
    window_switch: bool = False
    """`sliding_window` counts only where `use_sliding_window` is true."""
    sliding_window: int | None = None


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", has_attention_bias=True, has_mlp_bias=True, kv_heads_default=True),
    "MistralForCausalLM": Family("mistral", sliding_window=4096),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, window_switch=True, sliding_window=4096),
    "Qwen3ForCausalLM": Family(
        "qwen3", qk_norm=True, has_attention_bias=True, head_dim=128, window_switch=True, sliding_window=4096
    ),
}


def family_of(architectures: object) -> tuple[str, Family]:
    """Return (name, family) for the `architectures` field of a config.json, which must hold exactly one known name.

    Raises UnsupportedModelError with the list of known names otherwise.
    """
    name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise unsupported("architectures", architectures, "a list of one of " + ", ".join(FAMILIES))
    return name, FAMILIES[name]
