"""What config.json may say: both layouts, defaults, and every field that is refused, by name."""

from typing import Any

import pytest
import torch
from checkpoints import LLAMA3_ROPE
from specrs.errors import CheckpointError, UnsupportedModelError
from specrs.models.config import Llama3Scaling, ModelConfig, parse_config
from specrs.models.loader import resolve_dtype

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
    """Where they say the same; transformers would take the older one."""
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
        {"quantization_config": None, "auto_map": {}},
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
    (QWEN3, {"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
    (QWEN3, {"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]}, "architectures"),
    (QWEN3, {"architectures": None}, "architectures=None"),
    (QWEN3, {"architectures": "Qwen3ForCausalLM"}, "architectures"),
    (QWEN3, {"architectures": [["Qwen3ForCausalLM"]]}, "architectures"),
    (QWEN3, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (QWEN3, {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    (QWEN3, {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    (QWEN3, {"num_experts": 8}, "num_experts=8"),
    (LLAMA, {"num_local_experts": 8}, "num_local_experts=8"),
    (QWEN3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (QWEN3, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    (QWEN3, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rope_parameters.rope_type='yarn'"),
    (QWEN3, {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.rope_type"),
    (QWEN3, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
    (QWEN3, {"use_sliding_window": True, "max_position_embeddings": 4097}, "sliding_window=4096"),
    (QWEN3, {"use_sliding_window": True, "sliding_window": 511}, "sliding_window=511"),
    (LLAMA, {"sliding_window": 128}, "sliding_window=128"),
    (MISTRAL, {"sliding_window": 128}, "sliding_window=128"),
    (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    (QWEN3, {"layer_types": "full_attention"}, "layer_types"),
    (QWEN3, {"layer_types": ["full_attention"]}, "every one of 2 layers"),
    (QWEN3, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling.rope_type='linear'"),
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
]


@pytest.mark.parametrize(("raw", "fields", "named"), UNSUPPORTED, ids=[named for _, _, named in UNSUPPORTED])
def test_unsupported_is_refused_by_name(raw: dict[str, Any], fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match="allowed: ") as fault:
        parse_config(raw | fields)
    assert named in str(fault.value)


def test_missing_window_of_mistral_is_its_default() -> None:
    """transformers reads a Mistral config without the field as a window of 4,096 positions."""
    raw = without(MISTRAL, "sliding_window")
    assert parse_config(raw).max_position_embeddings == 512
    with pytest.raises(UnsupportedModelError, match=r"sliding_window=4096.*missing"):
        parse_config(raw | {"max_position_embeddings": 32768})


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
    ({"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "high_freq_factor=1.0"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
    ({"eos_token_id": 211}, "eos_token_id=211"),
    ({"eos_token_id": [1, -1]}, "eos_token_id=[1, -1]"),
    ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
    ({"dtype": 16}, "dtype=16"),
]


@pytest.mark.parametrize(("fields", "named"), MALFORMED, ids=[named for _, named in MALFORMED])
def test_malformed_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match="must be ") as fault:
        parse_config(QWEN3 | fields)
    assert str(fault.value).startswith("config.json: ")
    assert named in str(fault.value)
    assert not isinstance(fault.value, UnsupportedModelError)


def test_malformed_generation_config() -> None:
    with pytest.raises(CheckpointError, match=r"^generation_config\.json: eos_token_id=300: must be"):
        parse_config(QWEN3, {"eos_token_id": 300})


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(CheckpointError, match="hidden_size=100: must be a multiple of num_attention_heads=6"):
        parse_config(without(LLAMA, "head_dim") | {"hidden_size": 100})


@pytest.mark.parametrize(
    ("asked", "stored", "device", "expected"),
    [
        ("float32", "bfloat16", "cpu", torch.float32),
        ("float64", "bfloat16", "cpu", torch.float64),
        (torch.bfloat16, "float32", "cpu", torch.bfloat16),
        ("auto", "bfloat16", "cpu", torch.float32),
        ("auto", "float16", "cpu", torch.float32),
        ("auto", None, "cpu", torch.float32),
        ("auto", "float64", "cpu", torch.float64),
        ("auto", "bfloat16", "cuda", torch.bfloat16),
        ("auto", "float16", "cuda", torch.float16),
    ],
)
def test_dtype(asked: str | torch.dtype, stored: str | None, device: str, expected: torch.dtype) -> None:
    config = parse_config(QWEN3 | {"dtype": stored})
    assert resolve_dtype(asked, config, torch.device(device)) == expected


@pytest.mark.parametrize(
    ("asked", "stored", "device", "message"),
    [
        ("int8", None, "cpu", "dtype='int8': must be one of auto, float32, float64, bfloat16, float16"),
        ("float16", None, "cpu", "dtype='float16': not implemented on device cpu; allowed: float32, float64, bfloat16"),
        ("auto", "float64", "cuda", "dtype='float64': not implemented on device cuda; allowed: float32, bfloat16, "),
    ],
)
def test_dtype_is_refused_by_name(asked: str, stored: str | None, device: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^{message}"):
        resolve_dtype(asked, parse_config(QWEN3 | {"dtype": stored}), torch.device(device))
