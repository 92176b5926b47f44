"""Fields of config.json: both layouts, defaults, and every rejected field with its name."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA3_ROPE, LONG_ROPE, MINISTRAL_ROPE, YARN_ROPE, make_checkpoint
from specrs.arrays import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from specrs.backends.table import BACKENDS
from specrs.errors import CheckpointError, UnsupportedModelError
from specrs.models.config import ModelConfig, parse_config
from specrs.models.loader import load_config, resolve_dtype
from specrs.models.query_scaling import QueryScaling
from specrs.models.rope import LinearScaling, Llama3Scaling, YarnScaling, frequencies
from transformers import Ministral3Config

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 48,
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 160,
    "max_position_embeddings": 512,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_window": 4096,
    "use_sliding_window": False,
    "layer_types": ["full_attention", "full_attention"],
    "tie_word_embeddings": True,
    "vocab_size": 211,
    "eos_token_id": 7,
    "dtype": "bfloat16",
}
LLAMA = QWEN3 | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "sliding_window": None}
MISTRAL = QWEN3 | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
OLMO2 = QWEN3 | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "sliding_window": None}
PHI3 = QWEN3 | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": None, "layer_types": None}
GRANITE = QWEN3 | {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "sliding_window": None}
SMOLLM3 = QWEN3 | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
GEMMA3 = {key: value for key, value in QWEN3.items() if key not in ("hidden_act", "layer_types", "rope_parameters")} | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 32,
    "num_hidden_layers": 7,
}
MINISTRAL3 = QWEN3 | {
    "architectures": ["Ministral3ForCausalLM"],
    "model_type": "ministral3",
    "sliding_window": None,
    "rope_parameters": MINISTRAL_ROPE,
}
QWEN2 = QWEN3 | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def without(raw: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in fields}


def test_every_field() -> None:
    assert parse_config(QWEN3) == ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=211,
        hidden_size=96,
        intermediate_size=160,
        num_layers=2,
        num_heads=6,
        num_kv_heads=3,
        head_dim=48,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        rope_scaling=None,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        qk_norm=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        checkpoint_dtype="bfloat16",
        mask_token_id=None,
        eos_token_ids=(7,),
    )


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_layout_4_equals_layout_5(kind: str) -> None:
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key not in ("rope_type", "rope_theta")}
    old = without(LLAMA, "rope_parameters", "dtype") | {
        "rope_theta": 500,
        "rope_scaling": {kind: "llama3", **scaling},
        "torch_dtype": "torch.bfloat16",
    }
    new = LLAMA | {"rope_parameters": LLAMA3_ROPE}
    assert parse_config(old) == parse_config(new)
    assert parse_config(new).rope_scaling == Llama3Scaling(4.0, 1.0, 4.0, 64)
    assert parse_config(new).rope_theta == 500


def test_both_layouts_at_once() -> None:
    """Check a config with both layouts that say the same; transformers would take the older one."""
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    both = {"rope_parameters": LLAMA3_ROPE, "rope_scaling": scaling, "rope_theta": 500}
    assert parse_config(LLAMA | both) == parse_config(LLAMA | {"rope_parameters": LLAMA3_ROPE})
    assert parse_config(QWEN3 | {"rope_scaling": {}}) == parse_config(QWEN3)
    assert parse_config(QWEN3 | {"dtype": None, "torch_dtype": "float16"}).checkpoint_dtype == "float16"


def test_rope_without_scaling_in_layout_4() -> None:
    old = without(LLAMA, "rope_parameters") | {"rope_theta": 1e6, "rope_scaling": None}
    assert parse_config(old) == parse_config(LLAMA)


def test_defaults_of_missing_fields() -> None:
    config = parse_config(
        without(
            LLAMA, "head_dim", "rope_parameters", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "dtype"
        )
    )
    assert (config.head_dim, config.rope_theta, config.num_kv_heads) == (16, 1e4, 6)
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.checkpoint_dtype) == (1e-6, False, None)
    assert parse_config(without(QWEN3, "head_dim")).head_dim == 128
    assert parse_config(QWEN2 | {"head_dim": None}).head_dim == 16


def test_biases() -> None:
    both = parse_config(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (both.qkv_bias, both.o_bias, both.mlp_bias) == (True, True, True)
    qwen2 = parse_config(QWEN2)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": None, "use_sliding_window": True},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 512, "use_sliding_window": True},  # as long as the context
        {"layer_types": None},
        {"partial_rotary_factor": 1.0},
        {"quantization_config": None, "auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}},
        {"model_type": None},
        {"original_max_position_embeddings": 32},  # of a scaling, and there is none
        {"is_causal": True, "per_layer_config": {}, "transformers_weights": "model.safetensors"},
        {"unsloth_version": "2025.1", "logits_scaling": 8.0},  # read by neither transformers nor specrs
    ],
)
def test_fields_that_change_nothing(fields: dict[str, Any]) -> None:
    assert parse_config(QWEN3 | fields) == parse_config(QWEN3)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 7, (7,)),
        (None, [7, 8, 7], (7, 8)),
        (None, None, ()),
        ({}, 7, (7,)),
        ({"eos_token_id": None}, 7, (7,)),
        ({"eos_token_id": 9}, 7, (9,)),
        ({"eos_token_id": [9, 0]}, [7], (9, 0)),
    ],
)
def test_eos_token_ids(generation: dict[str, Any] | None, config: object, expected: tuple[int, ...]) -> None:
    assert parse_config(QWEN3 | {"eos_token_id": config}, generation).eos_token_ids == expected


UNSUPPORTED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (QWEN3, {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    (QWEN3, {"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]}, "architectures"),
    (QWEN3, {"architectures": None}, "architectures=None"),
    (QWEN3, {"architectures": "Qwen3ForCausalLM"}, "architectures"),
    (QWEN3, {"architectures": [["Qwen3ForCausalLM"]]}, "architectures"),
    (QWEN3, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (QWEN3, {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    (QWEN3, {"num_experts": 8}, "num_experts=8"),
    (LLAMA, {"num_local_experts": 8}, "num_local_experts=8"),
    (QWEN3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (QWEN3, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    (QWEN3, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "proportional"}}, "rope_type='proportional'"),
    (QWEN3, {"rope_parameters": None, "rope_scaling": {"type": "mrope", "factor": 2}}, "rope_scaling.rope_type"),
    (QWEN3, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
    (LLAMA, {"sliding_window": 128}, "sliding_window=128"),
    (MISTRAL, {"sliding_window": 128, "layer_types": ["full_attention"] * 2}, "layer_types="),
    (QWEN3, {"use_sliding_window": True, "layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    (QWEN3, {"layer_types": "full_attention"}, "layer_types"),
    (QWEN3, {"layer_types": ["full_attention"]}, "every one of 2 layers"),
    (QWEN3, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "what rope_parameters says"),
    (LLAMA, {"rope_scaling": LLAMA3_ROPE}, "rope_scaling={"),
    (QWEN3, {"rope_scaling": {"rope_type": "default"}}, "what rope_parameters says"),  # a theta of 10,000
    (QWEN3, {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1]}}, "rope_parameters.mrope_section"),
    (LLAMA, {"rope_parameters": LLAMA3_ROPE, "original_max_position_embeddings": 32}, "embeddings=32"),
    (LLAMA, {"model_type": "mistral"}, "model_type='mistral'"),
    (QWEN3, {"is_causal": False}, "is_causal=False"),
    (QWEN3, {"per_layer_config": {"0": {"num_key_value_heads": 1}}}, "per_layer_config"),
    (MISTRAL, {"attention_bias": True}, "attention_bias=True"),
    (QWEN2, {"attention_bias": True}, "attention_bias=True"),
    (QWEN3, {"mlp_bias": True}, "mlp_bias=True"),
    (QWEN3, {"is_encoder_decoder": True}, "is_encoder_decoder"),
    (OLMO2, {"mlp_bias": True}, "mlp_bias=True"),
    (OLMO2, {"sliding_window": 32}, "sliding_window=32"),
    (OLMO2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (PHI3, {"attention_bias": True}, "attention_bias=True"),
    (PHI3, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
    (PHI3, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (PHI3, {"rope_parameters": LONG_ROPE | {"factor": 2.0}}, "original_max_position_embeddings=4096"),
    (GRANITE, {"sliding_window": 32}, "sliding_window=32"),
    (MINISTRAL3, {"attention_bias": True}, "attention_bias=True"),
    (
        MINISTRAL3,
        {"rope_parameters": LLAMA3_ROPE | {"llama_4_scaling_beta": 0.1}},
        "rope_parameters.rope_type='llama3'",
    ),
    (MINISTRAL3, {"rope_parameters": {}}, "rope_parameters.rope_type='default': not implemented; allowed: 'yarn'"),
    (
        MINISTRAL3,
        {"rope_scaling": MINISTRAL_ROPE | {"llama_4_scaling_beta": 0.1}},
        "rope_scaling.llama_4_scaling_beta=",
    ),
    (MINISTRAL3, {"original_max_position_embeddings": 8}, "original_max_position_embeddings=8"),
    (MISTRAL, {"rope_parameters": MINISTRAL_ROPE}, "rope_parameters.llama_4_scaling_beta=0.6"),
    (SMOLLM3, {"num_experts": 4}, "num_experts=4"),
    (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    (GEMMA3, {"sliding_window": None}, "sliding_window=None"),
    (GEMMA3, {"sliding_window": None, "layer_types": ["sliding_attention"] * 7}, "sliding_window=None"),
    (GEMMA3, {"layer_types": ["chunked_attention"] * 7}, "chunked_attention"),
    (GEMMA3, {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters="),
    (GEMMA3, {"rope_parameters": {"full_attention": LLAMA3_ROPE}}, "rope_type='llama3'"),
    (GEMMA3, {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor=0.5"),
    (
        GEMMA3,
        {"rope_parameters": {"full_attention": {}}, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "null where rope_parameters is there",
    ),
]


@pytest.mark.parametrize(("raw", "fields", "named"), UNSUPPORTED, ids=[named for _, _, named in UNSUPPORTED])
def test_unsupported_is_rejected(raw: dict[str, Any], fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match="allowed: ") as fault:
        parse_config(raw | fields)
    assert named in str(fault.value)


def test_missing_window_of_mistral_is_its_default() -> None:
    """Check that a Mistral config without the field has a window of 4,096 positions, as in transformers."""
    raw = without(MISTRAL, "sliding_window")
    assert parse_config(raw).max_position_embeddings == 512
    longer = raw | {"max_position_embeddings": 32768, "layer_types": None}
    assert parse_config(longer).windows == (4096, 4096)
    assert parse_config(longer | {"sliding_window": None}).windows == ()


def test_windows_of_qwen() -> None:
    """Check windows of Qwen, if they are switched on: from layer `max_window_layers` (default 28), or as `layer_types`
    says."""
    raw = without(QWEN3, "layer_types") | {"sliding_window": 100}
    assert parse_config(raw).windows == ()
    switched = raw | {"use_sliding_window": True}
    assert parse_config(switched).windows == ()
    assert parse_config(switched | {"max_window_layers": 1}).windows == (None, 100)
    assert parse_config(switched | {"max_window_layers": 0}).windows == (100, 100)
    named = switched | {"layer_types": ["sliding_attention", "full_attention"]}
    assert parse_config(named).windows == (100, None)
    assert parse_config(named | {"sliding_window": 512}).windows == ()


def test_fields_of_phi3() -> None:
    part = parse_config(PHI3 | {"partial_rotary_factor": 0.5})
    assert (part.rotary_dim, part.fused_projections, part.windows) == (24, True, ())
    assert parse_config(PHI3 | {"rope_parameters": {"partial_rotary_factor": 0.25}}).rotary_dim == 12
    assert parse_config(PHI3 | {"sliding_window": 100}).windows == (100, 100)
    long = parse_config(PHI3 | {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64})
    assert long.for_length(64).rope_scaling != long.for_length(65).rope_scaling
    for factor in (0.01, 1.5, 0):
        with pytest.raises(CheckpointError, match=f"partial_rotary_factor={factor}: must be"):
            parse_config(PHI3 | {"partial_rotary_factor": factor})


def test_fields_of_granite() -> None:
    fields = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.015625}
    config = parse_config(GRANITE | fields | {"logits_scaling": 8})
    assert (config.embedding_multiplier, config.residual_multiplier) == (12, 0.22)
    assert (config.attention_scale, config.logits_scaling) == (0.015625, 8)
    # transformers' own default, where others have one over the root of head_dim.
    assert parse_config(GRANITE).attention_scale == 1
    for field in (*fields, "logits_scaling"):
        with pytest.raises(CheckpointError, match=f"{field}=0: must be a finite number greater than 0"):
            parse_config(GRANITE | {field: 0})


def test_fields_of_olmo3() -> None:
    """Check OLMo 3 in the layout of published files: RoPE scaling applies only to layers without a window, which are
    every fourth."""
    old = without(OLMO2, "rope_parameters", "layer_types") | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "num_hidden_layers": 8,
        "sliding_window": 7,
        "rope_theta": 500000,
        "rope_scaling": {key: value for key, value in YARN_ROPE.items() if key != "rope_theta"},
    }
    config = parse_config(old)
    assert config.windows == (7, 7, 7, None) * 2
    scalings = [None if rope is None else rope[1] for rope in config.ropes]
    assert [scaling is None for scaling in scalings] == [True, True, True, False] * 2
    assert {rope[0] for rope in config.ropes if rope is not None} == {500000}
    for fields, message in (
        ({"layer_types": ["chunked_attention"] * 8}, "layer_types="),
        ({"rope_local_base_freq": 1e4}, "rope_local_base_freq=10000"),
        ({"sliding_window": None}, "sliding_window=None: not implemented; allowed: a number"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ):
        with pytest.raises(CheckpointError, match=message):
            parse_config(old | fields)


def test_biases_of_seed_oss() -> None:
    seed = without(LLAMA, "attention_bias") | {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"}
    found = parse_config(seed)
    assert (found.qkv_bias, found.o_bias, found.mlp_bias) == (True, False, False)
    found = parse_config(seed | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True})
    assert (found.qkv_bias, found.o_bias, found.mlp_bias) == (False, True, True)
    with pytest.raises(CheckpointError, match="attention_out_bias=1: must be true or false"):
        parse_config(seed | {"attention_out_bias": 1})


def test_fields_of_ministral3() -> None:
    """Check Ministral 3: queries grow from the length of its RoPE on, unless the engine serves no text that long."""
    config = parse_config(MINISTRAL3)
    assert config.query_scaling == QueryScaling(0.6, 7)
    assert (config.windows, config.tie_word_embeddings) == ((), True)
    assert config.for_length(None) == config.for_length(8) == config
    assert config.for_length(7) == dataclasses.replace(config, query_scaling=None)
    assert parse_config(MINISTRAL3 | {"sliding_window": 100, "layer_types": None}).windows == (100, 100)
    both = MINISTRAL3 | {"rope_scaling": MINISTRAL_ROPE}
    assert parse_config(both) == config
    # transformers does not read the second.
    ignored = MINISTRAL_ROPE | {"type": "yarn", "max_position_embeddings": 999}
    assert parse_config(MINISTRAL3 | {"rope_parameters": ignored}) == config
    for value in (None, "x", True, -0.1, math.nan, 1e-9, 1e300, 10**400):
        with pytest.raises(
            CheckpointError, match=r"rope_parameters\.llama_4_scaling_beta=.*: must be 0, or a number fr"
        ):
            parse_config(MINISTRAL3 | {"rope_parameters": MINISTRAL_ROPE | {"llama_4_scaling_beta": value}})


def test_ministral3_by_default() -> None:
    """Check what transformers takes where the file says nothing: Ministral 3 8B."""
    theirs = Ministral3Config()
    raw = without(MINISTRAL3, "rope_parameters", "head_dim", "num_key_value_heads", "rms_norm_eps", "layer_types")
    config = parse_config(raw | {"num_attention_heads": 32})
    rope = theirs.rope_parameters
    assert config.query_scaling == QueryScaling(rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])
    assert (config.head_dim, config.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    assert (config.rope_theta, config.rms_norm_eps) == (rope["rope_theta"], theirs.rms_norm_eps)
    scaling = config.rope_scaling
    assert isinstance(scaling, YarnScaling)
    found = scaling.factor, scaling.beta_fast, scaling.beta_slow, scaling.magnitude
    assert found == (rope["factor"], rope["beta_fast"], rope["beta_slow"], 1.0)


def test_zeros_of_devstral_2() -> None:
    """Check the zeros in Devstral 2's RoPE: queries do not grow, and `mscale_all_dim` counts as missing."""
    rope = {"factor": 64.0, "mscale": 1.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0}
    config = parse_config(MINISTRAL3 | {"rope_parameters": MINISTRAL_ROPE | rope})
    assert config.query_scaling is None
    assert config.rope_magnitude == pytest.approx(0.1 * math.log(64) + 1)


def test_fields_of_smollm3() -> None:
    """Check SmolLM3: every fourth layer has no RoPE, and the window if there is one."""
    raw = without(SMOLLM3, "layer_types", "rope_parameters", "tie_word_embeddings") | {"num_hidden_layers": 5}
    config = parse_config(raw)
    assert [rope is None for rope in config.ropes] == [False, False, False, True, False]
    assert (config.rope_theta, config.windows, config.tie_word_embeddings) == (2e6, (), True)
    switched = raw | {"use_sliding_window": True, "sliding_window": 64, "no_rope_layers": [0, 1, 1, 0, 1, 1]}
    assert parse_config(switched).windows == (64, None, None, 64, None)
    assert parse_config(raw | {"no_rope_layers": [1] * 5}).ropes == ()
    for given in ([1, 0], [1, 1, 1, 1, 2], 4):
        with pytest.raises(CheckpointError, match=r"no_rope_layers=.*: must be a list of 0 and 1, one for each of 5"):
            parse_config(raw | {"no_rope_layers": given})


def test_fields_of_gemma3() -> None:
    """Check Gemma 3 in layouts 4 and 5: five layers with a window and their own RoPE, then one without."""
    config = parse_config(GEMMA3)
    assert config.windows == (32, 32, 32, 32, 32, None, 32)
    assert config.ropes == ((1e4, None),) * 5 + ((1e6, None), (1e4, None))
    assert (config.activation, config.norms, config.norm_offset) == ("gelu_pytorch_tanh", "around", 1.0)
    assert (config.embedding_multiplier, config.attention_scale) == (96**0.5, 1 / 16)
    assert parse_config(GEMMA3 | {"query_pre_attn_scalar": 4}).attention_scale == 0.5
    linear = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 5e5, "rope_local_base_freq": 5e3, "rope_scaling": linear}
    new = {"full_attention": linear | {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e3}}
    assert parse_config(GEMMA3 | old) == parse_config(GEMMA3 | {"rope_parameters": new})
    assert parse_config(GEMMA3 | old).ropes[4:6] == ((5e3, None), (5e5, LinearScaling(8.0)))
    # A window that hides nothing leaves its layers their RoPE.
    assert parse_config(GEMMA3 | {"sliding_window": 512}).windows == ()
    assert parse_config(GEMMA3 | {"sliding_window": 512}).ropes == config.ropes
    assert parse_config(GEMMA3 | {"sliding_window_pattern": 2}).windows == (32, None, 32, None, 32, None, 32)


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 0}, "hidden_size=0"),
    ({"hidden_size": None}, "hidden_size=None"),
    ({"vocab_size": True}, "vocab_size=True"),
    ({"num_hidden_layers": 2.0}, "num_hidden_layers=2.0"),
    ({"num_attention_heads": "6"}, "num_attention_heads='6'"),
    ({"intermediate_size": -1}, "intermediate_size=-1"),
    ({"max_position_embeddings": None}, "max_position_embeddings=None"),
    ({"num_key_value_heads": 4}, "num_key_value_heads=4"),
    ({"num_key_value_heads": None}, "num_key_value_heads=None"),
    ({"head_dim": 47}, "head_dim=47"),
    ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ({"rope_parameters": {"rope_theta": -1}}, "rope_theta=-1"),
    ({"rope_parameters": [1]}, "rope_parameters=[1]"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor=None"),
    ({"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 0.5}}, "high_freq_factor=0.5"),
    ({"rope_parameters": LONG_ROPE | {"original_max_position_embeddings": 1}}, "original_max_position_embeddings=1"),
    ({"rope_parameters": LONG_ROPE | {"short_factor": [10**400] * 24}}, "short_factor=[1000"),
    ({"rope_parameters": LONG_ROPE | {"long_factor": [1.0] * 23}}, "long_factor=[1.0"),
    ({"rope_parameters": LONG_ROPE | {"factor": 10**400}}, "factor=1000"),
    ({"rope_parameters": YARN_ROPE | {"rope_theta": 1.0}}, "rope_theta=1.0"),
    ({"rope_parameters": YARN_ROPE | {"beta_fast": 1e308}}, "beta_fast=1e+308"),
    ({"max_position_embeddings": 10**400}, "max_position_embeddings=1000"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
    ({"eos_token_id": 211}, "eos_token_id=211"),
    ({"eos_token_id": [1, -1]}, "eos_token_id=[1, -1]"),
    ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
    ({"dtype": 16}, "dtype=16"),
]


@pytest.mark.parametrize(("fields", "named"), MALFORMED, ids=[named for _, named in MALFORMED])
def test_malformed_is_rejected(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match="must be ") as fault:
        parse_config(QWEN3 | fields)
    assert str(fault.value).startswith("config.json: ")
    assert named in str(fault.value)
    assert not isinstance(fault.value, UnsupportedModelError)


@pytest.mark.parametrize("rope", [LLAMA3_ROPE, LONG_ROPE, YARN_ROPE, {"rope_type": "linear", "factor": 2.0}])
def test_any_value_of_any_rope_field_is_rejected_or_computes(rope: dict[str, Any]) -> None:
    wrong = [None, "x", True, [], {}, -1, 0, 1, 2**31, 10**400, 1e-300, 1e308, math.nan, [1.0] * 24, ["x"] * 24]
    refused = 0
    others = {"rope_theta", "attention_factor", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    for field, value in itertools.product(sorted(others | rope.keys()), wrong):
        for beside in ({}, {"max_position_embeddings": value}, {"original_max_position_embeddings": value}):
            try:
                config = parse_config(QWEN3 | {"rope_parameters": rope | {field: value}} | beside)
            except CheckpointError:
                refused += 1
            else:
                assert len(frequencies((config.rope_theta, config.rope_scaling), config.head_dim)) == 24
    assert refused > len(wrong)


def test_malformed_generation_config() -> None:
    with pytest.raises(CheckpointError, match=r"^generation_config\.json: eos_token_id=300: must be"):
        parse_config(QWEN3, {"eos_token_id": 300})


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(CheckpointError, match="hidden_size=100: must be a multiple of num_attention_heads=6"):
        parse_config(without(LLAMA, "head_dim") | {"hidden_size": 100})


@pytest.mark.parametrize(
    ("asked", "stored", "device", "expected"),
    [
        ("float32", "bfloat16", "cpu", FLOAT32),
        ("float64", "bfloat16", "cpu", FLOAT64),
        (BFLOAT16, "float32", "cpu", BFLOAT16),
        ("auto", "bfloat16", "cpu", FLOAT32),
        ("auto", "float16", "cpu", FLOAT32),
        ("auto", None, "cpu", FLOAT32),
        ("auto", "float64", "cpu", FLOAT64),
        ("auto", "bfloat16", "cuda", BFLOAT16),
        ("auto", "float16", "cuda", FLOAT16),
    ],
)
def test_dtype(asked: str | np.dtype[Any], stored: str | None, device: str, expected: np.dtype[Any]) -> None:
    config = parse_config(QWEN3 | {"dtype": stored})
    assert resolve_dtype(asked, config, BACKENDS[device].dtypes) == expected


@pytest.mark.parametrize(
    ("asked", "stored", "device", "message"),
    [
        ("int8", None, "cpu", "dtype='int8': must be one of auto, float32, float64, bfloat16, float16"),
        ("float16", None, "cpu", "dtype='float16': not implemented on device cpu; allowed: float32, float64, bfloat16"),
        ("auto", "float64", "cuda", "dtype='float64': not implemented on device cuda; allowed: float32, bfloat16, "),
    ],
)
def test_dtype_is_rejected(asked: str, stored: str | None, device: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^{message}"):
        resolve_dtype(asked, parse_config(QWEN3 | {"dtype": stored}), BACKENDS[device].dtypes)


def test_gpt_oss() -> None:
    """Check gpt-oss-20b in layout 4 as published, with what its configuration leaves out."""
    rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    kinds = ["sliding_attention", "full_attention"] * 12
    raw: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 201088,
        "num_local_experts": 32,
    }
    written = raw | {
        "attention_bias": True,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": rope | {"original_max_position_embeddings": 4096},
        "rope_theta": 150000,
        "sliding_window": 128,
        "layer_types": kinds,
        "tie_word_embeddings": False,
    }
    config = parse_config(written)
    assert parse_config(raw) == config
    assert config.windows == (128, None) * 12
    assert isinstance(config.rope_scaling, YarnScaling)
    assert not config.rope_scaling.truncate
    assert config.rope_magnitude == pytest.approx(0.1 * math.log(32) + 1)
    assert (config.sinks, config.qkv_bias, config.o_bias, config.tie_word_embeddings) == (True, True, True, False)
    assert config.experts is not None
    assert (config.experts.count, config.experts.per_token, config.experts.swiglu) == (32, 4, (1.702, 7.0))
    assert parse_config(raw | {"rope_parameters": {"rope_type": "default"}}).rope_scaling is None
    for field in ("swiglu_alpha", "swiglu_limit"):
        with pytest.raises(CheckpointError, match=f"{field}=0: must be a finite number greater than 0$"):
            parse_config(raw | {field: 0})


def test_longrope_next_to_layers_that_are_not_rotated(tmp_path: Path) -> None:
    """Check longrope next to layers without RoPE: the engine's maximum length reaches every layer with RoPE."""
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    fields = {"layers": 2, "head_dim": 8, "no_rope_layers": [1, 0], "rope_parameters": rope | factors}
    config = load_config(make_checkpoint(tmp_path / "model", "smollm3", **fields))  # type: ignore[arg-type]
    made = config.for_length(128)
    assert made.ropes == ((500.0, made.rope_scaling), None)
    assert made.rope_scaling == dataclasses.replace(config.rope_scaling, max_length=128)  # type: ignore[type-var]
