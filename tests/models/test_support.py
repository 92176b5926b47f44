"""The table of families, formats and devices: the same in the docs, and true for small models of every family."""

import re
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES as MADE
from checkpoints import HYBRIDS, make_checkpoint
from quantized_files import compressed
from specrs.backends.cpu.weights import load_native
from specrs.models.registry import FAMILIES
from specrs.models.support import table, wrapped_table
from specrs.models.torch_loader import load_model

from models.harness import Feeder

NAMES = {family.model_type: name for name, family in FAMILIES.items()}
SHAPE = {"hidden": 64, "intermediate": 96, "head_dim": 32, "kv_heads": 1, "vocab": 83}
"""Sizes that INT4 in groups of 32 can quantize."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("support")


def make(folder: Path, family: str) -> Path:
    path = folder / family
    sizes = {"moe_intermediate_size": 32} if family == "qwen3_moe" else {}
    return path if path.exists() else make_checkpoint(path, family, **SHAPE, **sizes)


def test_the_table_is_the_document_s() -> None:
    document = (Path(__file__).parents[2] / "docs" / "supported.md").read_text(encoding="utf-8")
    assert table() in document
    assert wrapped_table() in document
    assert set(NAMES) == {*MADE, *HYBRIDS, "gemma4_text"}


IN_THE_README = {"Llama 2": "Llama", "Granite 3": "Granite", "Llama 4 Scout": "Llama 4"}
"""Names in the README of families whose first model has another name in the table."""


def test_the_readme_names_every_family() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in readme.splitlines() if line.startswith("| ")]
    named = {part.strip() for row in rows for part in re.split("[,;:]", row)}
    first = {family.models.partition(",")[0] for name, family in FAMILIES.items() if name != "Qwen3MoeForCausalLM"}
    assert {IN_THE_README.get(name, name) for name in first} - named == set()
    assert "Qwen3-MoE" in named


@pytest.mark.parametrize("family", MADE)
def test_native_passes(family: str, folder: Path) -> None:
    path = make(folder, family)
    op_by_op = load_model(path, dtype="float32")
    expected = Feeder(op_by_op).feed_chunks(list(range(9)), [4, 5])
    assert (
        Feeder(load_native(path, dtype="float32")).feed_chunks(list(range(9)), [4, 5]) - expected
    ).abs().max() < 1e-4
    for quantization in ("int8", "int4"):
        quantized = Feeder(load_native(path, dtype="float32", quantization=quantization)).feed_chunks([1, 2, 3], [3])
        assert quantized.isfinite().all()


STACKED = [family.model_type for family in FAMILIES.values() if family.experts is not None and family.experts.stacked]
"""Families for which no library writes FP8 checkpoints; `test_mxfp4` tests their format."""


@pytest.mark.parametrize("family", sorted(set(MADE) - set(STACKED)))
def test_quantized_checkpoints(family: str, folder: Path, tmp_path: Path) -> None:
    """Check FP8 checkpoints with a scale per output: their logits are those of a checkpoint with the dequantized
    weights."""
    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    path = compressed(make(folder, family), tmp_path / "fp8", "float-quantized", **args)
    model = load_model(path, dtype="float32")
    numbers = load_model(path.with_name("fp8.numbers"), dtype="float32")
    found, expected = (Feeder(made).feed_chunks(list(range(9)), [9]) for made in (model, numbers))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    # Rounded as they are loaded, weights have the same scales.
    at_load = load_model(make(folder, family), dtype="float32", quantization="fp8")
    torch.testing.assert_close(Feeder(at_load).feed_chunks(list(range(9)), [9]), expected, rtol=0, atol=1e-4)
    plain = Feeder(load_model(make(folder, family), dtype="float32")).feed_chunks(list(range(9)), [9])
    assert (plain - expected).abs().max() > 1e-2
