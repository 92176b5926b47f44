"""A pass over rows of several adapters gives each row what the model with that adapter merged into its weights does."""

import contextlib
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from models.harness import Feeder
from models.test_llama4 import float64
from specrs.models.lora_loader import load_lora
from specrs.models.torch_loader import load_model
from sweep import sweep

from .adapters import leaves_of, merge, specs, write_adapter

BIASES = {"attention_bias": True, "mlp_bias": True}
FAMILIES = {
    "qwen3": {},
    "llama": BIASES,
    "phi3": {},
    "gemma3_text": {},
    "olmo2": {},
    "granite": {},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen3_5_text": {},
    "qwen3_next": {"mlp_only_layers": [0]},
    "lfm2": {},
    "llama4_text": {"moe_layers": [0]},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family, stored in float64 so that nothing is rounded."""
    folder = tmp_path_factory.mktemp("families")
    sizes = {"hidden": 48, "head_dim": 16, "intermediate": 40, "kv_heads": 2, "with_tokenizer": False}
    return {
        family: make_checkpoint(folder / family, family, seed=i, **sizes, **fields)
        for i, (family, fields) in enumerate(FAMILIES.items())
    }


@sweep(40)
@given(data=st.data())
def test_rows_are_their_adapters(
    data: st.DataObject, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    family = data.draw(st.sampled_from(sorted(checkpoints)), label="family")
    with float64() if family == "llama4_text" else contextlib.nullcontext():
        check_rows(data, checkpoints[family], tmp_path_factory.mktemp("drawn"))


def check_rows(data: st.DataObject, checkpoint: Path, folder: Path) -> None:
    """Check a pass over rows of drawn adapters of a checkpoint."""
    drawn = data.draw(st.lists(specs(leaves_of(checkpoint)), min_size=1, max_size=2), label="adapters")
    base = load_model(checkpoint, dtype="float64")
    models, feeder = [base], Feeder(base, num_requests=4)
    adapters = [None]
    for i, spec in enumerate(drawn, 1):
        path = write_adapter(folder / str(i), checkpoint, spec, seed=i)
        adapters.append(load_lora(path, base, name=str(i), lora_int_id=i, max_lora_rank=9))
        models.append(load_model(merge(checkpoint, path, folder / f"merged {i}"), dtype="float64"))
    # Which model each request has, and how many tokens it feeds: rows of one adapter lie apart.
    which = data.draw(st.lists(st.integers(0, len(drawn)), min_size=4, max_size=4), label="model of each request")
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=4, max_size=4), label="tokens of each request")
    feeder.adapters = {b: adapters[i] for b, i in enumerate(which) if i}
    texts = [[(7 * b + 13 * p) % 211 for p in range(length)] for b, length in enumerate(lengths)]
    logits = feeder.feed({b: [(token, p) for p, token in enumerate(text)] for b, text in enumerate(texts)})
    for text, i, found in zip(texts, which, logits.split(lengths), strict=True):
        expected = Feeder(models[i]).feed({0: [(token, p) for p, token in enumerate(text)]})
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
