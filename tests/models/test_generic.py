"""Models computed by transformers with specrs's attention (`generic`): their own logits, however tokens are fed; what
does not fit is rejected by name."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, make_checkpoint
from generic_checkpoints import ARCHITECTURES, VOCAB, make_generic
from hf_reference import load
from safetensors.torch import load_file, save_file
from specrs.errors import CheckpointError, UnsupportedModelError
from specrs.models import generic, generic_loader
from specrs.models.generic_loader import load_generic
from specrs.models.registry import FAMILIES
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig

from models.harness import Feeder

LENGTH = 40


def tokens(length: int = LENGTH, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def reference(path: Path, ids: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = load(path, dtype)(torch.tensor([ids])).logits[0]
    return logits


def assert_near(found: Tensor, expected: Tensor, bound: float) -> None:
    """Check the distance of logits, relative to the norm of all of them."""
    assert float((found.double() - expected.double()).norm() / expected.double().norm()) < bound


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits(name: str, tmp_path: Path) -> None:
    """Check logits with chunks, single tokens, and rows of verification, over blocks that are not in order."""
    path = make_generic(tmp_path, name)
    expected = reference(path, tokens())
    feeder = Feeder(load_generic(path, dtype="float64"), num_requests=2, block_size=4)
    found = feeder.feed_chunks(tokens(), [17, 1, 1, 6, 6, 1, 8])
    # Eager attention of transformers takes its softmax in fp32.
    assert_near(found, expected, 1e-6)
    again = feeder.feed_chunks(tokens(), [LENGTH], request=1)
    assert_near(again, expected, 1e-6)


def test_requests_of_a_batch_have_windows_of_their_own(tmp_path: Path) -> None:
    path = make_generic(tmp_path, "gemma2")
    feeder = Feeder(load_generic(path, dtype="float64"), num_requests=3, block_size=4)
    texts = {b: tokens(30 + b, b) for b in range(3)}
    starts = {0: 25, 1: 3, 2: 14}
    for b, start in starts.items():
        feeder.feed({b: [(texts[b][p], p) for p in range(start)]})
    rows = {b: [(texts[b][p], p) for p in range(start, start + 2 + b % 2)] for b, start in starts.items()}
    rows[1].append((0, -1))
    found = feeder.feed(rows)
    at = 0
    for b, fed in rows.items():
        expected = reference(path, texts[b])
        for _, position in fed:
            if position >= 0:
                assert_near(found[at], expected[position], 1e-6)
            at += 1
    assert found.isfinite().all()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_other_dtypes(dtype: str, bound: float, tmp_path: Path) -> None:
    path = make_generic(tmp_path, "gpt_neox", initializer_range=0.1)
    model = load_generic(path, dtype=dtype)
    found = Feeder(model).feed_chunks(tokens(), [30, 10])
    assert found.dtype == torch.float32
    assert_near(found, reference(path, tokens(), torch.float64), bound)


def test_hidden_states(tmp_path: Path) -> None:
    path = make_generic(tmp_path, "starcoder2")
    feeder = Feeder(load_generic(path, dtype="float64"), hidden_layers=(1, 0))
    feeder.feed({0: [(token, p) for p, token in enumerate(tokens(12))]})
    with torch.inference_mode():
        states = load(path)(torch.tensor([tokens(12)]), output_hidden_states=True).hidden_states
    assert feeder.entries is not None
    torch.testing.assert_close(feeder.entries, torch.stack([states[1][0], states[0][0]], dim=1), rtol=0, atol=1e-5)


def test_what_a_pass_reads(tmp_path: Path) -> None:
    """Check which parameters a pass reads: two of four experts, and no embedding unless the LM head uses it."""
    path = make_generic(tmp_path / "experts", "olmoe")
    model = load_generic(path, dtype="float64")
    sizes = {name: p.numel() for name, p in load(path).named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert experts
    assert model.num_parameters == sum(sizes.values()) - experts // 2 - sizes["model.embed_tokens.weight"]
    tied = load_generic(make_generic(tmp_path / "tied", "gpt2"), dtype="float64")
    assert tied.num_parameters == sum(p.numel() for p in load(tmp_path / "tied").parameters())


def test_ten_of_them_are_no_families_of_ours() -> None:
    assert len(set(ARCHITECTURES) - {family.model_type for family in FAMILIES.values()}) >= 10


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({}, "recurrent"),
    "bloom": ({}, "AttentionInterface"),
    "t5": ({}, "model_type='t5'"),
    "bart": ({}, "is_encoder_decoder=True"),
    "codegen": ({"n_embd": 32, "n_head": 4, "n_layer": 1, "rotary_dim": 4, "eos_token_id": 0}, "AttentionInterface"),
    "jamba": ({}, "layer_types|recurrent|cache"),
    "lfm2": (
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        "Lfm2ForCausalLM does not run with .*: layer_types has 'conv'",
    ),
    "granitemoehybrid": ({}, "GraniteMoeHybridForCausalLM does not run with .*: it has recurrent layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_named(name: str, tmp_path: Path) -> None:
    fields, words = REFUSED[name]
    config = AutoConfig.for_model(name, vocab_size=VOCAB, **fields)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=words):
        load_generic(tmp_path, dtype="float32", load_format="dummy")


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_a_small_mistake_is_found_in_bfloat16(scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that scores that are half too large are found, and that rounding alone stays far below the bound."""
    path = make_generic(tmp_path, "gpt_neox")

    def attention(module: Any, *args: Any, scaling: float, **options: Any) -> Any:
        return generic._attention(module, *args, scaling=scale * scaling, **options)

    AttentionInterface.register("wrong", attention)
    AttentionMaskInterface.register("wrong", generic._mask)
    monkeypatch.setattr(generic_loader, "ATTENTION", "wrong")
    if scale == 1:
        monkeypatch.setitem(generic_loader.TOLERANCE, torch.bfloat16, generic_loader.TOLERANCE[torch.bfloat16] / 5)
        load_generic(path, dtype="bfloat16")
        return
    with pytest.raises(UnsupportedModelError, match=r"GPTNeoXForCausalLM.*its logits differ, by 0\.0\d+ of their norm"):
        load_generic(path, dtype="bfloat16")


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_deep_models_are_served_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Check that roundings of many layers are not taken for mistakes, with experts or without."""
    load_generic(make_generic(tmp_path, name, num_hidden_layers=32, initializer_range=0.02), dtype="bfloat16")


def test_a_model_that_computes_otherwise_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a model with other results is rejected by name, for any reason: here a layer that ignores the window
    of specrs's attention."""
    path = make_generic(tmp_path, "starcoder2")
    monkeypatch.setattr(generic_loader, "ATTENTION", "eager")
    with pytest.raises(UnsupportedModelError, match=r"Starcoder2ForCausalLM.*(differ|attends)"):
        load_generic(path, dtype="float64")


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"auto_map": {"AutoConfig": "x.Y"}, "model_type": "unheard_of"}, UnsupportedModelError, "auto_map"),
        ({"auto_map": {"AutoModel": "x.Y"}, "architectures": ["XForCausalLM"]}, UnsupportedModelError, "auto_map"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModelError, "quantization_config"),
        ({"model_type": "unheard_of"}, CheckpointError, "transformers .* does not read it"),
        ({"hidden_size": 48}, CheckpointError, "are of another shape|could not load"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 64,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                }
            },
            UnsupportedModelError,
            "rope_type='longrope'",
        ),
    ],
)
def test_fields_that_are_rejected(fields: dict[str, Any], error: type[Exception], words: str, tmp_path: Path) -> None:
    path = make_generic(tmp_path, "starcoder2")
    edit_json(path / "config.json", **fields)
    with pytest.raises(error, match=words):
        load_generic(path, dtype="float64")


def test_queries_that_grow_with_their_position_are_rejected(tmp_path: Path) -> None:
    """Check Llama 4 with texts so long that queries grow: transformers' layers take a row's position from the length of
    a cache. The short text that is computed at load is too short to show it."""
    path = make_generic(tmp_path, "llama4_text")
    positions = json.loads((path / "config.json").read_text())["max_position_embeddings"]
    edit_json(path / "config.json", floor_scale=positions)
    with pytest.raises(UnsupportedModelError, match=r"attn_temperature_tuning=True: .*model_impl='auto'"):
        load_generic(path, dtype="float64")
    for fields in ({"floor_scale": positions + 1}, {"floor_scale": positions, "attn_temperature_tuning": False}):
        edit_json(path / "config.json", **fields)
        found = Feeder(load_generic(path, dtype="float64")).feed_chunks(tokens(), [20, 20])
        assert_near(found, reference(path, tokens()), 1e-6)


def test_code_that_a_checkpoint_names_is_not_run(tmp_path: Path) -> None:
    """Check that code named by a checkpoint is not run. transformers has the architecture itself, so `auto_map` has no
    effect; its module does not exist."""
    path = make_generic(tmp_path, "starcoder2")
    names = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    edit_json(path / "config.json", auto_map=names)
    found = Feeder(load_generic(path, dtype="float64")).feed_chunks(tokens(), [LENGTH])
    assert_near(found, reference(path, tokens()), 1e-6)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    path = make_generic(tmp_path, "starcoder2")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.c_fc.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.c_fc\.weight .*missing"):
        load_generic(path)


def test_a_family_of_ours_runs_as_well(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    found = Feeder(load_generic(path, dtype="float64")).feed_chunks(tokens(), [20, 20])
    assert_near(found, reference(path, tokens()), 1e-12)


def test_transformers_stays_as_loud_as_it_was(tmp_path: Path) -> None:
    logger = logging.getLogger("transformers")
    before = logger.level
    load_generic(make_generic(tmp_path, "gpt2"))
    assert logger.level == before
