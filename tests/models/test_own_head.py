"""`tie_word_embeddings=true` in a file with an LM head of its own: the tensors count, as in transformers."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_json, make_checkpoint
from hf_reference import load
from quantized_files import gptq
from safetensors.torch import load_file, save_file
from specrs.backends.cpu.weights import load_native
from specrs.config import EngineConfig
from specrs.core import PackedMatrix
from specrs.errors import CheckpointError
from specrs.integrations import transformers as integration
from specrs.models.checkpoint import SINGLE
from specrs.models.loader import stored_config
from specrs.models.torch_loader import load_model
from weight_memory import assert_needed, memory_of

from models.harness import Feeder

TOKENS = [3, 1, 4, 1, 5]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def logits(model: object) -> torch.Tensor:
    return Feeder(model).feed_chunks(TOKENS, [len(TOKENS)])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"layers": 1, "hidden": 64, "head_dim": 32, "kv_heads": 1, "vocab": 96}
    return make_checkpoint(tmp_path_factory.mktemp("tied"), "llama", tie=True, **shape)


@pytest.fixture(params=["last row", "float16", "all"])
def own(request: pytest.FixtureRequest, tied: Path, tmp_path: Path) -> Path:
    """A checkpoint with an LM head that differs from the embedding in one number, by rounding, or in all numbers."""
    folder = shutil.copytree(tied, tmp_path / "own")
    tensors = load_file(folder / SINGLE)
    head = tensors[EMBEDDING].clone()
    if request.param == "last row":
        head[-1, -1] += 1
    elif request.param == "float16":
        head = head.half()
    else:
        head = torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
    save_file(tensors | {HEAD: head}, folder / SINGLE, metadata={"format": "pt"})
    return folder


def test_it_is_loaded_untied_and_said_so(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "specrs"):
        model = load_model(own, dtype="float64")
    assert f"tie_word_embeddings=true, but {HEAD} differs from {EMBEDDING}" in caplog.text
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.weights.lm_head.dequantized(), load_file(own / SINGLE)[HEAD].double())
    reference = load(own)
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-11)
    for quantization in (None, "int8"):
        native = load_native(own, dtype="float32", quantization=quantization)
        assert not native.config.tie_word_embeddings
    exact = load_native(own, dtype="float32")
    torch.testing.assert_close(logits(exact).double(), expected, rtol=0, atol=1e-4)


def test_a_transformers_model_that_is_untied_so(own: Path) -> None:
    model = load(own, torch.float32)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.tensor([TOKENS])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert model.config.tie_word_embeddings
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, custom_generate=integration.generate)
    assert found.equal(expected)


def test_the_same_numbers_stay_tied(tied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = shutil.copytree(tied, tmp_path / "same")
    tensors = load_file(folder / SINGLE)
    save_file(tensors | {HEAD: tensors[EMBEDDING].double()}, folder / SINGLE, metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, "specrs"):
        assert load_model(folder, dtype="float64").config.tie_word_embeddings
    assert not caplog.text


def test_memory_counts_the_head(own: Path, tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that memory counts the head: on a GPU before anything is loaded, and in a loaded model's size."""
    needed = memory_of(load_model(tied, dtype="float32").weights) + 4 * 96 * 64
    assert_needed(EngineConfig(model=str(own), dtype="float32"), needed, monkeypatch)
    assert not stored_config(own).tie_word_embeddings
    assert stored_config(own, load_format="dummy").tie_word_embeddings


def test_a_quantized_head(tied: Path, tmp_path: Path) -> None:
    """Check a head quantized by GPTQ (`lm_head: true`) next to tied embeddings: its numbers come from its codes."""
    folder = gptq(tied, tmp_path / "gptq", lm_head=True)
    rng = np.random.default_rng(3)
    codes, scales = rng.integers(0, 16, (64, 96)), rng.uniform(0.01, 0.02, (2, 96)).astype(np.float16)
    words = np.zeros((8, 96), np.uint32)
    for i in range(64):
        words[i // 8] |= codes[i].astype(np.uint32) << np.uint32(4 * (i % 8))
    zeros = np.full((2, 12), 0x77777777, np.uint32)
    tensors = load_file(folder / SINGLE) | {
        "lm_head.qweight": torch.from_numpy(words.view(np.int32)),
        "lm_head.qzeros": torch.from_numpy(zeros.view(np.int32)),
        "lm_head.scales": torch.from_numpy(scales),
    }
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    expected = ((codes - 8) * np.repeat(scales.astype(np.float64), 32, 0)).T
    model, native = load_model(folder, dtype="float64"), load_native(folder, dtype="float32")
    assert not model.config.tie_word_embeddings
    assert not native.config.tie_word_embeddings
    (part,) = native.weights.lm_head.parts
    for head in (
        model.weights.lm_head.dequantized().numpy(),
        part.numbers() if isinstance(part, PackedMatrix) else part,
    ):
        np.testing.assert_allclose(head, expected, rtol=1e-6)
    numbers = tmp_path / "gptq.numbers"
    plain = load_file(numbers / SINGLE) | {HEAD: torch.from_numpy(expected.copy())}
    save_file(plain, numbers / SINGLE, metadata={"format": "pt"})
    edit_json(numbers / "config.json", tie_word_embeddings=False)
    reference = logits(load_model(numbers, dtype="float64"))
    assert (logits(load_model(folder, dtype="float64")) - reference).abs().max() < 2e-6 * reference.abs().max()


def test_a_head_of_another_shape(tied: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tied, tmp_path / "shape")
    tensors = load_file(folder / SINGLE)
    save_file(tensors | {HEAD: torch.zeros(95, 64)}, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \(95, 64\)"):
        load_model(folder)
