"""Fields of config.json that are not read: those that would make another model, and those without effect and why.

transformers is the reference, because our text is compared with its text. A configuration class of transformers turns
every field into an attribute, and the code shared by all families reads some attributes by name. Each such attribute,
and each field in the config.json of a published model, is read by `models/config.py` or is in one of these tables;
tests check both. Other fields, left by a trainer or uploader, are ignored.

No code of a checkpoint is ever run. `auto_map` names such code. As in transformers with `trust_remote_code=False`, the
decoder of the family in `architectures` is used, and its tensors are checked by name and shape.
"""

NEUTRAL: dict[str, tuple[object, ...]] = {
    # Code shared by all families of transformers reads these.
    "is_causal": (None, True),
    "attention_chunk_size": (None,),
    "per_layer_config": (None, {}),
    "kv_sharing_modes": (None,),
    "num_kv_shared_layers": (None, 0),
    "quantization_config": (None,),
    "compression_config": (None,),
    "fusion_config": (None,),
    "transformers_weights": (None, "model.safetensors"),
    "partial_rotary_factor": (None, 1, 1.0),
    "is_encoder_decoder": (None, False),
    # These belong to other families. A checkpoint that sets them is not the architecture that it names.
    "add_cross_attention": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    # transformers does not read these. Files of our families publish them with the values here.
    "lm_head_bias": (None, False),
    "full_attn_mod": (None, 1),
    "interpolate_factor": (None, 1),
    "rope_interleaved": (None, False),
    "use_mrope": (None, False),
    "shared_expert_intermediate_size": (None, 0),
}
"""Fields that would change the model in any family, with the values at which they change nothing."""

_HEADS = "of classification heads"
_OUTPUTS = "of what a call of the model returns with its logits"
_TRAINING = "of training"
_ROUTER = "of a loss that trains routers"
_SPEED = "of how something is computed, not what"
_HISTORY = "of the file's history"

WITHOUT_EFFECT: dict[str, str] = {
    "attention_dropout": _TRAINING,
    "embd_pdrop": _TRAINING,
    "resid_pdrop": _TRAINING,
    "residual_dropout": _TRAINING,
    "initializer_range": _TRAINING,
    "id2label": _HEADS,
    "label2id": _HEADS,
    "problem_type": _HEADS,
    "output_attentions": _OUTPUTS,
    "output_router_logits": _OUTPUTS,
    "router_aux_loss_coef": _ROUTER,
    "router_jitter_noise": _TRAINING,
    "output_hidden_states": _OUTPUTS,
    "return_dict": _OUTPUTS,
    "use_cache": _SPEED,
    "attn_implementation": _SPEED,
    "chunk_size_feed_forward": _SPEED,
    "pretraining_tp": _SPEED,
    "pad_token_id": "a row of the embedding that training leaves alone",
    "bos_token_id": "of prompts without a token, which are rejected",
    "auto_map": "names code of the checkpoint, which is never run",
    "transformers_version": _HISTORY,
    "_name_or_path": _HISTORY,
    "is_llama_config": _HISTORY,
    "unsloth_fixed": _HISTORY,
    "unsloth_version": _HISTORY,
    "transformers.js_config": "of another runtime",
    "block_dim": "a second name of hidden_size",
    "block_mlp_init_scale": _TRAINING,
    "block_norm_eps": "a second name of norm_eps",
    "block_out_init_scale": _TRAINING,
    "block_use_xavier_init": _TRAINING,
    "conv_dim": "a second name of hidden_size",
    "conv_dim_out": "a second name of hidden_size",
    "conv_use_xavier_init": _TRAINING,
    "num_heads": "a second name of num_attention_heads",
    "initial_context_length": "a second name of the length that the RoPE object says",
    "ignore_keys_at_rope_validation": "of a check that transformers makes",
    "mtp_num_hidden_layers": "of a head that drafts, whose tensors decide whether it is there",
    "max_seq_len_cached": _SPEED,
    "cache_implementation": _SPEED,
    "_attn_implementation": _SPEED,
    "_attn_implementation_autoset": _SPEED,
    "_flash_attn_2_enabled": _SPEED,
    "use_flash_attn": _SPEED,
}
"""Fields of transformers' configurations that change no logit, with the reason."""
