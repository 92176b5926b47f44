"""The reference's decoder: logits of transformers for every variant of a family, and of native passes."""

from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, GEMMA4, make_gemma4
from hf_reference import load
from models.harness import Feeder
from models.test_torch_decoder import VARIANTS, expected, make, tokens
from specrs.backends.cpu.weights import load_native
from specrs.reference.decoder import Decoder

LENGTH = 75
ROUNDED = {"qwen3_moe", "mixtral", "gpt_oss", "gemma3_text", "llama4_text"}
"""Families that transformers computes partly in float32: routers, norms with their weights, and rotation."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decoders")


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(folder: Path, name: str) -> None:
    found = Decoder(make(folder, name)).logits(tokens())
    atol = 1e-4 if VARIANTS[name][0] in ROUNDED else 1e-12
    torch.testing.assert_close(found, expected(folder, name, torch.float64), rtol=0, atol=atol)


@pytest.mark.parametrize("variant", GEMMA4)
def test_logits_of_gemma4_are_those_of_transformers(folder: Path, variant: str) -> None:
    path, ids = make_gemma4(folder / variant.replace(" ", "_"), variant), [token % 61 for token in tokens()]
    with torch.inference_mode():
        theirs = load(path)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(Decoder(path).logits(ids), theirs, rtol=0, atol=1e-4)


def test_long_rope_depends_on_the_longest_text(folder: Path) -> None:
    path, ids = make(folder, "long RoPE"), tokens(64)
    short, long = Decoder(path, max_model_len=64).logits(ids), Decoder(path).logits(ids)
    torch.testing.assert_close(long, expected(folder, "long RoPE", torch.float64)[:64], rtol=0, atol=1e-12)
    assert not torch.allclose(short, long, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_native_passes_are_near(folder: Path, family: str) -> None:
    """Check native passes against the reference, in pieces over scattered blocks: logits, and the states at layers'
    entries."""
    native, reference, ids = load_native(make(folder, family), dtype="float32"), Decoder(make(folder, family)), tokens()
    layers = tuple(range(native.num_layers + 1))
    feeder = Feeder(native, hidden_layers=layers)
    feeder.feed_chunks(ids[:-2], [5, 35, 33])
    logits = feeder.feed({0: [(ids[p], p) for p in (LENGTH - 2, LENGTH - 1)]})
    torch.testing.assert_close(logits.double(), reference.logits(ids)[-2:], rtol=1e-4, atol=2e-4)
    assert feeder.entries is not None
    entries = torch.stack(reference.hidden_states(ids), dim=1)[-2:]
    torch.testing.assert_close(feeder.entries.double(), entries, rtol=1e-4, atol=2e-4)
