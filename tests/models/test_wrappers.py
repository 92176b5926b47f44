"""Text models of multimodal checkpoints: transformers' logits, however tensors are spelled, and errors by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES as FAMILIES_OF_TEXT
from checkpoints import HYBRIDS, MINISTRAL_ROPE, edit_json, make_checkpoint, make_gemma4
from quantized_files import compressed
from safetensors.torch import load_file, save_file
from specrs.backends.cpu.weights import load_native
from specrs.errors import CheckpointError, UnsupportedModelError
from specrs.models.loader import is_known_family, load_config, stored_config
from specrs.models.torch_loader import load_model
from specrs.models.wrappers import WRAPPERS, text_config, text_name
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from models.harness import Feeder

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SPELLINGS = ("language_model.model.", "model.language_model.")
FAMILIES = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text",
    "Llama4ForConditionalGeneration": "llama4_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}
"""Family of the text model of each architecture, for `make_checkpoint`."""
WRAPPED = [*FAMILIES.items(), ("Mistral3ForConditionalGeneration", "ministral3")]
"""Pairs of a multimodal architecture and the family of a text model that it may have."""


def wrapper(architecture: str, family: str) -> Any:
    """Return a random multimodal model of transformers."""
    torch.manual_seed(0)
    if architecture == "Gemma3ForConditionalGeneration":
        text = TEXT | {"query_pre_attn_scalar": 16, "sliding_window": 9}
        config: Any = Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
        model: Any = Gemma3ForConditionalGeneration(config)
    elif architecture == "Gemma4ForConditionalGeneration":
        ple = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 3}
        kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        own = {"num_hidden_layers": 6, "layer_types": kinds, "global_head_dim": 32, "sliding_window": 9}
        experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
        text = TEXT | ple | own | experts | {"final_logit_softcapping": 5.0}
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        vision |= {"num_key_value_heads": 1, "head_dim": 16}
        config = Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
        model = Gemma4ForConditionalGeneration(config)
    elif architecture == "Gemma4UnifiedForConditionalGeneration":
        kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        own = {"num_hidden_layers": 6, "layer_types": kinds, "global_head_dim": 32, "sliding_window": 9}
        own |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_key_value_heads": 2}
        text = TEXT | own | {"final_logit_softcapping": 5.0}
        vision = {"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 8}
        config = Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config=None)
        model = Gemma4UnifiedForConditionalGeneration(config)
    elif architecture == "Llama4ForConditionalGeneration":
        vision = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
        own = FAMILIES_OF_TEXT[family] | {"pad_token_id": 0}
        config = Llama4Config(text_config=TEXT | own, vision_config=vision)
        model = Llama4ForConditionalGeneration(config)
    elif architecture in ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"):
        rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 0, 0]}}
        text = TEXT | HYBRIDS[family] | rope
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "depth": 1, "out_hidden_size": 32}
        if architecture == "Qwen3_5ForConditionalGeneration":
            config = Qwen3_5Config(text_config=text, vision_config=vision)
            model = Qwen3_5ForConditionalGeneration(config)
        else:
            config = Qwen3_5MoeConfig(text_config=text, vision_config=vision)
            model = Qwen3_5MoeForConditionalGeneration(config)
    else:
        vision = VISION | {"model_type": "pixtral", "head_dim": 8}
        rope = {"rope_parameters": MINISTRAL_ROPE} if family == "ministral3" else {}
        config = Mistral3Config(text_config=TEXT | rope | {"model_type": family}, vision_config=vision)
        model = Mistral3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model.eval()


def wrapped(source: Path, path: Path, architecture: str, spelling: str, **fields: Any) -> Path:
    """Write the text checkpoint `source` as a multimodal one to `path`."""
    tensors = load_file(source / "model.safetensors")
    named = {
        name.replace("model.", spelling, 1) if name.startswith("model.") else name: t for name, t in tensors.items()
    }
    towers = {name: torch.zeros(2) for name in ("model.vision_tower.a.weight", "multi_modal_projector.b", "visual.c")}
    path.mkdir()
    save_file(named | towers, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((source / "config.json").read_text())
    shared = {field: raw.pop(field) for field in ("eos_token_id", "dtype", "quantization_config") if field in raw}
    del raw["architectures"]
    whole = {"architectures": [architecture], "text_config": raw, "vision_config": {}, "image_token_id": 9}
    (path / "config.json").write_text(json.dumps(whole | shared | fields))
    return path


def logits(model: Any) -> torch.Tensor:
    return Feeder(model).feed_chunks(TOKENS, [6, 9])


def test_every_text_model_is_tried() -> None:
    texts = {(name, text) for name, wrapper in WRAPPERS.items() for text in wrapper.text_models}
    assert texts == set(WRAPPED)


@pytest.mark.parametrize(("architecture", "family"), WRAPPED)
def test_the_logits_of_transformers(
    architecture: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = wrapper(architecture, family)
    theirs.save_pretrained(tmp_path)
    assert is_known_family(tmp_path)
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([TOKENS])).logits[0].double()
    with caplog.at_level(logging.INFO, "specrs"):
        found = logits(load_model(tmp_path, dtype="float64"))
    assert caplog.text.count("tensors for images or sound") == 1
    assert "are skipped: only text is served" in caplog.text
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * scale)
    torch.testing.assert_close(logits(load_native(tmp_path)).double(), expected, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize(("architecture", "family"), WRAPPED)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("tie", [True, False])
def test_the_text_checkpoint_of_it(architecture: str, family: str, spelling: str, tie: bool, tmp_path: Path) -> None:
    """Check that a text checkpoint and the same tensors in a multimodal wrapper give the same bits."""
    if family.startswith("gemma4"):
        variant = "gemma4, keys are values" if family == "gemma4_unified_text" else "gemma4"
        text = make_gemma4(tmp_path / "text", variant, tie=tie, eos_token_id=[7, 9])
    else:
        text = make_checkpoint(tmp_path / "text", family, tie=tie, eos_token_id=[7, 9])
    path = wrapped(text, tmp_path / "wrapped", architecture, spelling, tie_word_embeddings=tie)
    raw = json.loads((path / "config.json").read_text())
    raw["text_config"]["model_type"] = family
    (path / "config.json").write_text(json.dumps(raw))
    assert load_config(path) == load_config(text)
    assert torch.equal(logits(load_native(path)), logits(load_native(text)))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_experts_of_a_text_checkpoint(spelling: str, tmp_path: Path) -> None:
    """Check a multimodal checkpoint whose experts are in one tensor per projection, with names that do not end in
    `.weight`."""
    text = make_gemma4(tmp_path / "text", "gemma4, experts")
    path = wrapped(text, tmp_path / "wrapped", "Gemma4ForConditionalGeneration", spelling)
    assert torch.equal(logits(load_native(path)), logits(load_native(text)))


def test_an_mtp_head_is_skipped_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = make_checkpoint(tmp_path / "text", "qwen3_5_text")
    path = wrapped(text, tmp_path / "wrapped", "Qwen3_5ForConditionalGeneration", SPELLINGS[1])
    tensors = load_file(path / "model.safetensors")
    save_file(
        tensors | {"mtp.fc.weight": torch.zeros(1), "mtp.norm.weight": torch.zeros(1)}, path / "model.safetensors"
    )
    with caplog.at_level(logging.INFO, "specrs"):
        load_model(path)
    assert "2 tensors of an MTP head, which speculative_config.method='mtp' reads" in caplog.text


def test_quantized_text(tmp_path: Path) -> None:
    """Check quantized text models: lists of modules use the names of the file."""
    spelling, architecture = SPELLINGS[1], "Mistral3ForConditionalGeneration"
    shape = {"hidden": 64, "intermediate": 96, "head_dim": 32, "kv_heads": 1, "vocab": 83}
    text = make_checkpoint(tmp_path / "text", "mistral", **shape)
    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    quantized = compressed(text, tmp_path / "fp8", "float-quantized", **args)
    path = wrapped(quantized, tmp_path / "wrapped", architecture, spelling)
    assert torch.equal(logits(load_native(path)), logits(load_native(quantized)))
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"]["ignore"] = ["re:model.language_model.layers.0.self_attn.q_proj"]
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight_scale"):
        load_native(path)


@pytest.mark.parametrize(("inner", "outer", "tied"), [(False, True, True), (None, None, True), (False, False, False)])
def test_a_head_of_its_own_counts(inner: bool | None, outer: bool | None, tied: bool, tmp_path: Path) -> None:
    """Check that an LM head of its own counts, whatever the two config objects say about ties."""
    text = make_checkpoint(tmp_path / "text", "mistral", tie=False)
    path = wrapped(text, tmp_path / "wrapped", "Mistral3ForConditionalGeneration", SPELLINGS[0])
    raw = json.loads((path / "config.json").read_text())
    raw["text_config"]["tie_word_embeddings"] = inner
    edit_json(path / "config.json", text_config=raw["text_config"], tie_word_embeddings=outer)
    assert load_config(path).tie_word_embeddings is tied
    assert not stored_config(path).tie_word_embeddings
    assert torch.equal(logits(load_native(path)), logits(load_native(text)))


def test_what_is_not_implemented_is_named(tmp_path: Path) -> None:
    text = make_checkpoint(tmp_path / "text", "mistral")
    path = wrapped(text, tmp_path / "wrapped", "Mistral3ForConditionalGeneration", SPELLINGS[0])
    raw = json.loads((path / "config.json").read_text())
    edit_json(path / "config.json", text_config=raw["text_config"] | {"model_type": "mistral4"})
    allowed = "'mistral' or 'ministral3'"
    with pytest.raises(UnsupportedModelError, match=rf"config.json: text_config.model_type='mistral4': .*: {allowed}"):
        load_config(path)
    edit_json(path / "config.json", text_config=raw["text_config"] | {"model_type": "ministral3"})
    with pytest.raises(CheckpointError, match=r"config.json: rope_parameters.llama_4_scaling_beta=None: must be 0, "):
        load_config(path)
    edit_json(path / "config.json", text_config=[1])
    with pytest.raises(CheckpointError, match=r"text_config=\[1\]: must be an object"):
        load_config(path)


def test_tensors_that_are_left_over_or_there_twice(tmp_path: Path) -> None:
    text = make_checkpoint(tmp_path / "text", "mistral")
    path = wrapped(text, tmp_path / "wrapped", "Mistral3ForConditionalGeneration", SPELLINGS[0])
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"language_model.model.unheard_of": torch.zeros(1)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.unheard_of is not part of this architecture"):
        load_native(path)
    save_file(tensors | {"model.language_model.norm.weight": torch.zeros(96)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"are both model.norm.weight of the text model; remove one"):
        load_native(path)


def test_fields_that_published_files_leave_out() -> None:
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": {}}
    made = text_config(raw)
    expected = {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "eos_token_id": [1, 106],
        "architectures": ["Gemma3ForCausalLM"],
    }
    assert made.items() >= (expected | {"tie_word_embeddings": True}).items()
    raw["architectures"] = ["Gemma4ForConditionalGeneration"]
    expected = {
        "vocab_size": 262144,
        "num_attention_heads": 8,
        "eos_token_id": [1, 106],
        "architectures": ["Gemma4ForCausalLM"],
    }
    assert text_config(raw).items() >= (expected | {"tie_word_embeddings": True}).items()
    raw["architectures"] = ["Gemma4UnifiedForConditionalGeneration"]
    expected |= {"sliding_window": 1024, "hidden_size_per_layer_input": 0, "max_position_embeddings": 262144}
    assert text_config(raw).items() >= expected.items()


def test_names() -> None:
    for name, own in {
        "model.language_model.layers.1.mlp": "model.layers.1.mlp",
        "language_model.model.layers.1.mlp": "model.layers.1.mlp",
        "language_model.lm_head.weight": "lm_head.weight",
        "lm_head.weight": "lm_head.weight",
        "model.layers.1.mlp": "model.layers.1.mlp",
    }.items():
        assert text_name(name) == own
