"""Packed blocks of GGUF files: their numbers, products with them however rows are cut into passes, errors, memory."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from gguf_files import draw_blocks, write_gguf
from specrs.arrays import FLOAT32
from specrs.backends.cpu import weights as weights_module
from specrs.backends.cpu.weights import Rounding, load_native
from specrs.core import InvalidBufferError, PackedMatrix
from specrs.errors import CheckpointError, UnsupportedConfigError
from specrs.models.gguf.file import GGUFFile, open_gguf
from specrs.models.stored import PackedWeight, StackedWeight

from models.harness import Feeder
from models.test_gguf import SIZES, logits, numbers_of

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
PERMUTED = np.random.default_rng(0).permutation(21)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer whose rows are whole blocks of 256."""
    return make_checkpoint(tmp_path_factory.mktemp("wide"), "llama", initializer_range=0.05, **SIZES)


@pytest.mark.parametrize("kind", PackedMatrix.KINDS)
def test_numbers_are_those_of_the_package(kind: str) -> None:
    """Check numbers of blocks with random bytes, with rows in the file's order or another."""
    blocks = draw_blocks(kind, (21, 512), np.random.default_rng(1))
    if kind == "MXFP4":
        blocks[:, :: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.MXFP4][1]] %= 200
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    packed = PackedMatrix(kind, blocks)
    assert (packed.kind, packed.shape) == (kind, (21, 512))
    assert np.array_equal(packed.numbers(), expected)
    assert np.array_equal(PackedMatrix(kind, blocks, PERMUTED).numbers(), expected[PERMUTED])


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_memory_is_that_of_the_file(kind: str) -> None:
    """Check memory: at most 3 % more than the file, for the scales of K-quants as integers."""
    blocks = draw_blocks(kind, (64, 2048), np.random.default_rng(2))
    assert blocks.nbytes <= PackedMatrix(kind, blocks).nbytes <= 1.03 * blocks.nbytes


@pytest.mark.parametrize("kind", PackedMatrix.KINDS)
def test_passes_are_those_of_the_numbers(kind: str, wide: Path, tmp_path: Path) -> None:
    """Check passes against the dequantized weights: within the rounding of activations to 16 bits, and to the bit for
    any division into passes."""
    path = write_gguf(wide, tmp_path / "model.gguf", kind)
    expected = logits(numbers_of(path, wide))
    model = load_native(path, dtype="float32")
    for weight in (model.weights.layers[0].qkv, model.weights.layers[0].down, model.weights.lm_head):
        assert isinstance(weight, PackedWeight)
        assert {part.kind for part in weight.parts if isinstance(part, PackedMatrix)} == {kind}
    found = Feeder(model).feed_chunks(TOKENS[:8], [8])
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    whole = Feeder(model).feed_chunks(TOKENS, [len(TOKENS)])
    for cut in ([1] * 12, [5, 7], [2, 3, 4, 3]):
        assert torch.equal(Feeder(model).feed_chunks(TOKENS, cut), whole), cut


def test_other_activations(wide: Path, tmp_path: Path) -> None:
    """Check other activations: `fp32` reads no blocks, `int16` needs some."""
    path = write_gguf(wide, tmp_path / "model.gguf", "Q4_K")
    assert isinstance(load_native(path, rounding=Rounding(activations="fp32")).weights.layers[0].qkv, StackedWeight)
    assert isinstance(load_native(path, rounding=Rounding(activations="int16")).weights.layers[0].qkv, PackedWeight)
    reason = r"^cpu_activations='int16': .* has no quantized matrix that can be packed; allowed: 'auto' or 'fp32'"
    with pytest.raises(UnsupportedConfigError, match=reason):
        load_native(write_gguf(wide, tmp_path / "plain.gguf", "F16"), rounding=Rounding(activations="int16"))
    with pytest.raises(UnsupportedConfigError, match=reason):
        load_native(wide, rounding=Rounding(activations="int16"))


@pytest.mark.parametrize(("activations", "bits"), [("auto", 4.5), ("fp32", 16)])
def test_weights_that_exceed_memory(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activations: str, bits: float
) -> None:
    """Check weights that exceed memory: an error with both numbers before a block is read; with one byte more they
    fit."""
    path = write_gguf(wide, tmp_path / "model.gguf", "Q4_0")
    shapes = [tensor.shape for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) == 2]
    needed = int(sum(np.prod(shape) for shape in shapes) * bits / 8)
    rounding = Rounding(False, activations)
    monkeypatch.setattr(weights_module, "host_memory", lambda: needed)
    load_native(path, rounding=rounding)
    monkeypatch.setattr(weights_module, "host_memory", lambda: needed - 1)
    monkeypatch.setattr(GGUFFile, "blocks", lambda *_: pytest.fail("a block was read"))
    with pytest.raises(CheckpointError, match=r"weights take at least .* GiB.*this process may use .* GiB of memory"):
        load_native(path, rounding=rounding)


def test_what_is_no_matrix_of_blocks() -> None:
    blocks = draw_blocks("Q4_K", (3, 512), np.random.default_rng(3))
    for arguments, reason in (
        (("Q9_Z", blocks), r"^kind=\"Q9_Z\": must be one of Q4_0, "),
        (("Q4_K", blocks[:, :100].copy()), r"^blocks: rows have 100 bytes; must have a multiple of 144$"),
        (("Q4_K", blocks, np.array([0, 1, 3])), r"order=3: must be a row below 3"),
        (("Q4_K", blocks, np.array([0, 1])), r"blocks"),
        (("Q4_K", blocks, np.array([0, 1, -1])), r"order"),
    ):
        with pytest.raises(InvalidBufferError, match=reason):
            PackedMatrix(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K"])
def test_a_scale_that_is_not_finite_is_named(kind: str, wide: Path, tmp_path: Path) -> None:
    path = write_gguf(wide, tmp_path / "model.gguf", kind)
    info = open_gguf(path).tensors["blk.0.ffn_up.weight"]
    content = bytearray(path.read_bytes())
    at = info.start + info.block[1] + {"Q6_K": 208}.get(kind, 0)
    content[at : at + 2] = np.array([np.inf], np.float16).tobytes()
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight\[[01], \d+\]=.*: weights must be finite"):
        load_native(path, dtype=FLOAT32)
