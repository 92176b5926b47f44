"""Names and shapes of the tensors of a checkpoint. Reads none."""

from specrs.models.config import ModelConfig

EMBEDDING, LM_HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def tensor_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a checkpoint of `c` must hold."""
    h, q, kv, i = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocab_size, h), FINAL_NORM: (h,)}
    if not c.tie_word_embeddings:
        shapes[LM_HEAD] = (c.vocab_size, h)
    projections = {
        "self_attn.q_proj": (q, h, c.qkv_bias),
        "self_attn.k_proj": (kv, h, c.qkv_bias),
        "self_attn.v_proj": (kv, h, c.qkv_bias),
        "self_attn.o_proj": (h, q, c.o_bias),
        "mlp.gate_proj": (i, h, c.mlp_bias),
        "mlp.up_proj": (i, h, c.mlp_bias),
        "mlp.down_proj": (h, i, c.mlp_bias),
    }
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes |= {f"{prefix}{name}_layernorm.weight": (h,) for name in ("input", "post_attention")}
        if c.qk_norm:
            shapes |= {f"{prefix}self_attn.{x}_norm.weight": (c.head_dim,) for x in "qk"}
    return shapes
