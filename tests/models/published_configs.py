"""config.json of published models, and their numbers of parameters. Holds no tests.

The authors' published facts, written down by hand: each variant of a family with different keys or values.
"""

from typing import Any

_LONG = [
    1.0800000429153442, 1.1100000143051147, 1.1399999856948853, 1.340000033378601, 1.5899999141693115,
    1.600000023841858, 1.6200000047683716, 2.620000123977661, 3.2300000190734863, 3.2300000190734863,
    4.789999961853027, 7.400000095367432, 7.700000286102295, 9.09000015258789, 12.199999809265137, 17.670000076293945,
    24.46000099182129, 28.57000160217285, 30.420001983642578, 30.840002059936523, 32.590003967285156,
    32.93000411987305, 42.320003509521484, 44.96000289916992, 50.340003967285156, 50.45000457763672, 57.55000305175781,
    57.93000411987305, 58.21000289916992, 60.1400032043457, 62.61000442504883, 62.62000274658203, 62.71000289916992,
    63.1400032043457, 63.1400032043457, 63.77000427246094, 63.93000411987305, 63.96000289916992, 63.970001220703125,
    64.02999877929688, 64.06999969482422, 64.08000183105469, 64.12000274658203, 64.41000366210938, 64.4800033569336,
    64.51000213623047, 64.52999877929688, 64.83999633789062,
]  # fmt: skip
_SHORT = [
    1.0, 1.0199999809265137, 1.0299999713897705, 1.0299999713897705, *[1.0499999523162842] * 5, 1.0699999332427979,
    1.0999999046325684, 1.1099998950958252, 1.1599998474121094, 1.1599998474121094, 1.1699998378753662,
    1.2899998426437378, 1.339999794960022, 1.679999828338623, 1.7899998426437378, 1.8199998140335083,
    1.8499997854232788, 1.8799997568130493, 1.9099997282028198, 1.9399996995925903, 1.9899996519088745,
    *[2.0199997425079346] * 6, *[2.0299997329711914] * 9, 2.0799996852874756, 2.0899996757507324, 2.189999580383301,
    2.2199995517730713, 2.5899994373321533, 2.729999542236328, 2.749999523162842, 2.8399994373321533,
]  # fmt: skip
_PHI4_LONG = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555,
    7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283,
    20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7,
    32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip


def _raw(
    architecture: str, model_type: str, sizes: tuple[int, ...], dtype: str = "bfloat16", **rest: Any
) -> dict[str, Any]:
    """Return the keys that all configurations have. `sizes` are vocabulary, hidden, intermediate, layers, heads, KV
    heads, positions."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings",
    )  # fmt: skip
    shared = {"hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": dtype, "use_cache": True}
    return (
        {"architectures": [architecture], "model_type": model_type}
        | dict(zip(names, sizes, strict=True))
        | shared
        | rest
    )


_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_LLAMA4: dict[str, Any] = {
    "_attn_implementation_autoset": True, "attention_bias": False, "attention_chunk_size": 8192,
    "attention_dropout": 0.0, "bos_token_id": 200000, "eos_token_id": [200001, 200007, 200008],
    "for_llm_compressor": False, "head_dim": 128, "intermediate_size_mlp": 16384, "no_rope_layers": [1, 1, 1, 0] * 12,
    "num_experts_per_tok": 1, "output_router_logits": False, "pad_token_id": 200018, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
}  # fmt: skip
_OLD_LLAMA = {"bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None}
_NEW_LLAMA = {**_BIASES, "attention_dropout": 0.0, "bos_token_id": 128000, "pretraining_tp": 1, "rms_norm_eps": 1e-05}
_MISTRAL = {"bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-05, "tie_word_embeddings": False}
_QWEN = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "rms_norm_eps": 1e-06,
    "use_sliding_window": False,
}  # fmt: skip
_QWEN3 = _QWEN | {"attention_bias": False, "head_dim": 128, "rope_scaling": None, "sliding_window": None}
_PHI = {
    "attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
}  # fmt: skip
_PHI3 = _PHI | {
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000, "original_max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
_LONGROPE = {"long_factor": _LONG, "short_factor": _SHORT, "type": "longrope"}
_GEMMA = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2,
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": 512,
}  # fmt: skip
_EXPERTS = {
    "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False, "tie_word_embeddings": False,
}  # fmt: skip
_LFM2 = {
    "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True,
    "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False,
    "conv_use_xavier_init": True, "eos_token_id": 7, "norm_eps": 1e-05, "pad_token_id": 0, "use_pos_enc": True,
}  # fmt: skip


def _without_act(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key != "hidden_act"}


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7b-hf": (
        _raw("LlamaForCausalLM", "llama", (32000, 4096, 11008, 32, 32, 32, 4096), "float16", **_OLD_LLAMA,
             _name_or_path="meta-llama/Llama-2-7b-hf", tie_word_embeddings=False, transformers_version="4.31.0.dev0"),
        6_738_415_616,
    ),
    "vicuna-7b-v1.5": (
        _raw("LlamaForCausalLM", "llama", (32000, 4096, 11008, 32, 32, 32, 4096), "float16", **_OLD_LLAMA,
             _name_or_path="vicuna-7b-v1.5", pad_token_id=0, tie_word_embeddings=False, transformers_version="4.31.0"),
        6_738_415_616,
    ),
    "TinyLlama-1.1B-Chat-v1.0": (
        _raw("LlamaForCausalLM", "llama", (32000, 2048, 5632, 22, 32, 4, 2048), **_OLD_LLAMA, attention_bias=False,
             rope_theta=10000.0, tie_word_embeddings=False, transformers_version="4.35.0"),
        1_100_048_384,
    ),
    "Llama-3.1-8B-Instruct": (
        _raw("LlamaForCausalLM", "llama", (128256, 4096, 14336, 32, 32, 8, 131072), **_NEW_LLAMA,
             eos_token_id=[128001, 128008, 128009], rope_scaling={"factor": 8.0, **_LLAMA3}, rope_theta=500000.0,
             tie_word_embeddings=False, transformers_version="4.42.3"),
        8_030_261_248,
    ),
    "Llama-3.2-1B": (
        _raw("LlamaForCausalLM", "llama", (128256, 2048, 8192, 16, 32, 8, 131072), **_NEW_LLAMA, eos_token_id=128001,
             head_dim=64, rope_scaling={"factor": 32.0, **_LLAMA3}, rope_theta=500000.0, tie_word_embeddings=True,
             transformers_version="4.45.0.dev0"),
        1_235_814_400,
    ),
    "SmolLM2-135M-Instruct": (
        _raw("LlamaForCausalLM", "llama", (49152, 576, 1536, 30, 9, 3, 8192), **_OLD_LLAMA, **_BIASES,
             attention_dropout=0.0, is_llama_config=True, pad_token_id=2, rope_interleaved=False, rope_theta=100000,
             tie_word_embeddings=True, transformers_version="4.42.3",
             **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}}),
        134_515_008,
    ),
    "Mistral-7B-v0.1": (
        _raw("MistralForCausalLM", "mistral", (32000, 4096, 14336, 32, 32, 8, 32768), **_MISTRAL, rope_theta=10000.0,
             sliding_window=4096, transformers_version="4.34.0.dev0"),
        7_241_732_096,
    ),
    "Mistral-7B-Instruct-v0.3": (
        _raw("MistralForCausalLM", "mistral", (32768, 4096, 14336, 32, 32, 8, 32768), **_MISTRAL,
             attention_dropout=0.0, rope_theta=1000000.0, sliding_window=None, transformers_version="4.42.0.dev0"),
        7_248_023_552,
    ),
    "Mistral-Nemo-Instruct-2407": (
        _raw("MistralForCausalLM", "mistral", (131072, 5120, 14336, 40, 32, 8, 131072), **_MISTRAL,
             attention_dropout=0.0, head_dim=128, rope_theta=1000000.0, sliding_window=None,
             transformers_version="4.43.0.dev0"),
        12_247_782_400,
    ),
    "Devstral-Small-2-24B-Instruct-2512": (
        _raw("Ministral3ForCausalLM", "ministral3", (131072, 5120, 32768, 40, 32, 8, 393216), attention_dropout=0.0,
             head_dim=128, rms_norm_eps=1e-05,
             rope_parameters={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 48.0, "llama_4_scaling_beta": 0.1,
                              "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 8192,
                              "rope_theta": 100000000.0, "rope_type": "yarn", "type": "yarn"},
             sliding_window=None, tie_word_embeddings=False, transformers_version="5.0.0.dev0"),
        23_572_403_200,
    ),
    "Llama-4-Scout-17B-16E-Instruct, its text model": (
        _raw("Llama4ForCausalLM", "llama4_text", (202048, 5120, 8192, 48, 40, 8, 10485760), **_LLAMA4,
             interleave_moe_layer_step=1, num_local_experts=16, use_qk_norm=True,
             rope_scaling={"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                           "original_max_position_embeddings": 8192, "rope_type": "llama3"}),
        107_769_861_120,
    ),
    "Llama-4-Maverick-17B-128E-Instruct, its text model": (
        _raw("Llama4ForCausalLM", "llama4_text", (202048, 5120, 8192, 48, 40, 8, 1048576), **_LLAMA4,
             interleave_moe_layer_step=2, num_local_experts=128, use_qk_norm=False, rope_scaling=None),
        400_711_848_960,
    ),
    "Qwen2-7B-Instruct": (
        _raw("Qwen2ForCausalLM", "qwen2", (152064, 3584, 18944, 28, 28, 4, 32768), **_QWEN, max_window_layers=28,
             rope_theta=1000000.0, sliding_window=131072, tie_word_embeddings=False, transformers_version="4.41.2"),
        7_615_616_512,
    ),
    "Qwen2.5-0.5B-Instruct": (
        _raw("Qwen2ForCausalLM", "qwen2", (151936, 896, 4864, 24, 14, 2, 32768), **_QWEN, max_window_layers=21,
             rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=True, transformers_version="4.43.1"),
        494_032_768,
    ),
    # With the object that its README adds for long texts.
    "Qwen2.5-7B-Instruct with YaRN": (
        _raw("Qwen2ForCausalLM", "qwen2", (152064, 3584, 18944, 28, 28, 4, 32768), **_QWEN, max_window_layers=28,
             rope_theta=1000000.0, sliding_window=131072, tie_word_embeddings=False, transformers_version="4.43.1",
             rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}),
        7_615_616_512,
    ),
    "DeepSeek-R1-Distill-Qwen-14B": (
        _raw("Qwen2ForCausalLM", "qwen2", (152064, 5120, 13824, 48, 40, 8, 131072),
             **_QWEN | {"eos_token_id": 151643, "rms_norm_eps": 1e-05}, max_window_layers=48, rope_theta=1000000.0,
             sliding_window=131072, tie_word_embeddings=False, transformers_version="4.43.1", use_mrope=False),
        14_770_033_664,
    ),
    "Qwen3-0.6B": (
        _raw("Qwen3ForCausalLM", "qwen3", (151936, 1024, 3072, 28, 16, 8, 40960), **_QWEN3, max_window_layers=28,
             rope_theta=1000000, tie_word_embeddings=True, transformers_version="4.51.0"),
        596_049_920,
    ),
    "OLMo-2-1124-7B-Instruct": (
        _raw("Olmo2ForCausalLM", "olmo2", (100352, 4096, 11008, 32, 32, 32, 4096), attention_bias=False,
             _name_or_path="allenai/open_instruct_dev", attention_dropout=0.0, eos_token_id=100257,
             pad_token_id=100277, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=500000, tie_word_embeddings=False,
             transformers_version="4.47.0.dev0"),
        7_298_617_344,
    ),
    "Phi-3-mini-4k-instruct": (
        _raw("Phi3ForCausalLM", "phi3", (32064, 3072, 8192, 32, 32, 32, 4096), **_PHI3, rope_scaling=None,
             _name_or_path="Phi-3-mini-4k-instruct", sliding_window=2047, transformers_version="4.40.2"),
        3_821_079_552,
    ),
    # Its first revision calls its RoPE "su". Factors are those of Phi-3.5-mini, its own are other numbers.
    "Phi-3-mini-128k-instruct": (
        _raw("Phi3ForCausalLM", "phi3", (32064, 3072, 8192, 32, 32, 32, 131072), **_PHI3,
             _name_or_path="Phi-3-mini-128k-instruct", rope_scaling=_LONGROPE | {"type": "su"}, sliding_window=262144,
             transformers_version="4.40.2"),
        3_821_079_552,
    ),
    "Phi-3.5-mini-instruct": (
        _raw("Phi3ForCausalLM", "phi3", (32064, 3072, 8192, 32, 32, 32, 131072), **_PHI3, rope_scaling=_LONGROPE,
             _name_or_path="Phi-3.5-mini-instruct", sliding_window=262144, transformers_version="4.43.3"),
        3_821_079_552,
    ),
    "phi-4": (
        _raw("Phi3ForCausalLM", "phi3", (100352, 5120, 17920, 40, 40, 10, 16384), **_PHI | {"rope_theta": 250000},
             _name_or_path="microsoft/phi-4", bos_token_id=100257, eos_token_id=100265, pad_token_id=100349,
             original_max_position_embeddings=16384, rope_scaling=None, sliding_window=None,
             tie_word_embeddings=False, transformers_version="4.47.0"),
        14_659_507_200,
    ),
    "Phi-4-mini-instruct": (
        _raw("Phi3ForCausalLM", "phi3", (200064, 3072, 8192, 32, 24, 8, 131072), **_PHI,
             _name_or_path="Phi-4-mini-instruct", auto_map=_PHI3["auto_map"] | {"AutoTokenizer": "Xenova/gpt-4o"},
             bos_token_id=199999, eos_token_id=199999, pad_token_id=199999, full_attn_mod=1, interpolate_factor=1,
             lm_head_bias=False, mlp_bias=False, original_max_position_embeddings=4096, partial_rotary_factor=0.75,
             rope_scaling={"long_factor": _PHI4_LONG, "short_factor": [1.0] * 48, "type": "longrope"},
             sliding_window=262144, tie_word_embeddings=True, transformers_version="4.45.0"),
        3_836_021_760,
    ),
    "granite-3.3-8b-instruct": (
        _raw("GraniteForCausalLM", "granite", (49159, 4096, 12800, 40, 32, 8, 131072), **_BIASES,
             attention_dropout=0.0, attention_multiplier=0.0078125, bos_token_id=0, embedding_multiplier=12.0,
             eos_token_id=0, logits_scaling=16.0, pad_token_id=0, residual_multiplier=0.22, rms_norm_eps=1e-05,
             rope_scaling=None, rope_theta=10000000.0, tie_word_embeddings=True, transformers_version="4.49.0"),
        8_170_864_640,
    ),
    "SmolLM3-3B": (
        _raw("SmolLM3ForCausalLM", "smollm3", (128256, 2048, 11008, 36, 16, 4, 65536), **_BIASES,
             attention_dropout=0.0, bos_token_id=128000, eos_token_id=128012, layer_types=["full_attention"] * 36,
             max_window_layers=28, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, pad_token_id=128004,
             pretraining_tp=2, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=5000000.0, sliding_window=None,
             transformers_version="4.54.0.dev0", use_sliding_window=False),
        3_075_098_624,
    ),
    "gemma-3-1b-it": (
        _without_act(_raw("Gemma3ForCausalLM", "gemma3_text", (262144, 1152, 6912, 26, 4, 1, 32768), **_GEMMA,
                          cache_implementation="hybrid", eos_token_id=[1, 106], sliding_window_pattern=6,
                          transformers_version="4.50.0.dev0")),
        999_885_952,
    ),
    "gemma-3-270m": (
        _without_act(_raw("Gemma3ForCausalLM", "gemma3_text", (262144, 640, 2048, 18, 4, 1, 32768), **_GEMMA,
                          _sliding_window_pattern=6, eos_token_id=1,
                          layer_types=[*["sliding_attention"] * 5, "full_attention"] * 3,
                          transformers_version="4.55.0.dev0", use_bidirectional_attention=False)),
        268_098_176,
    ),
    "Qwen3-30B-A3B": (
        _raw("Qwen3MoeForCausalLM", "qwen3_moe", (151936, 2048, 6144, 48, 32, 4, 40960), **_QWEN3, **_EXPERTS,
             max_window_layers=48, rope_theta=1000000.0, router_aux_loss_coef=0.001, transformers_version="4.51.0"),
        30_532_122_624,
    ),
    "Qwen3-Coder-30B-A3B-Instruct": (
        _raw("Qwen3MoeForCausalLM", "qwen3_moe", (151936, 2048, 5472, 48, 32, 4, 262144), **_QWEN3, **_EXPERTS,
             max_window_layers=28, qkv_bias=False, rope_theta=10000000, router_aux_loss_coef=0.0,
             shared_expert_intermediate_size=0, transformers_version="4.52.3", use_qk_norm=True),
        30_532_122_624,
    ),
    "Mixtral-8x7B-v0.1": (
        _raw("MixtralForCausalLM", "mixtral", (32000, 4096, 14336, 32, 32, 8, 32768), **_MISTRAL,
             attention_dropout=0.0, num_experts_per_tok=2, num_local_experts=8, output_router_logits=False,
             rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None, transformers_version="4.36.0.dev0"),
        46_702_792_704,
    ),
    "LFM2-1.2B": (
        {
            key: value
            for key, value in _raw(
                "Lfm2ForCausalLM", "lfm2", (65536, 2048, 0, 16, 32, 8, 128000), **_LFM2, block_dim=2048,
                block_ff_dim=12288, conv_dim=2048, conv_dim_out=2048, full_attn_idxs=[2, 5, 8, 10, 12, 14],
                num_heads=32, rope_theta=1000000.0, transformers_version="4.54.0.dev0",
            ).items()
            if key not in ("hidden_act", "intermediate_size")
        },
        1_170_340_608,
    ),
    "LFM2.5-350M": (
        _without_act(
            _raw("Lfm2ForCausalLM", "lfm2", (65536, 1024, 6656, 16, 16, 8, 128000), **_LFM2, block_dim=1024,
                 block_ff_dim=6656, conv_dim=1024, num_heads=16, tie_embedding=True,
                 layer_types=["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
                 rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"})),
        354_483_968,
    ),
    "LFM2-8B-A1B": (
        _without_act(
            _raw("Lfm2MoeForCausalLM", "lfm2_moe", (65536, 2048, 7168, 24, 32, 8, 128000), bos_token_id=1,
                 conv_L_cache=3, conv_bias=False, eos_token_id=7, moe_intermediate_size=1792, norm_eps=1e-05,
                 norm_topk_prob=True, num_dense_layers=2, num_experts=32, num_experts_per_tok=4, num_heads=32,
                 pad_token_id=0, rope_theta=1000000.0, routed_scaling_factor=1.0, use_expert_bias=True,
                 use_pos_enc=True, transformers_version="4.57.0.dev0",
                 layer_types=["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)])),
        8_339_929_856 + 22 * 32,  # biases are no parameters in transformers
    ),
    "gpt-oss-20b": (
        {
            key: value
            for key, value in _raw(
                "GptOssForCausalLM", "gpt_oss", (201088, 2880, 2880, 24, 64, 8, 131072), attention_bias=True,
                attention_dropout=0.0, eos_token_id=200002, experts_per_token=4, head_dim=64,
                initial_context_length=4096, layer_types=["sliding_attention", "full_attention"] * 12,
                num_experts_per_tok=4, num_local_experts=32, output_router_logits=False, pad_token_id=199999,
                quantization_config={
                    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                               "model.embed_tokens", "lm_head"],
                    "quant_method": "mxfp4",
                },
                rms_norm_eps=1e-05,
                rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                              "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
                rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0,
                tie_word_embeddings=False, transformers_version="4.55.0.dev0",
            ).items()
            if key != "torch_dtype"
        },
        20_914_757_184,
    ),
}  # fmt: skip
"""config.json and the number of parameters, by model."""
