"""The forward pass of EAGLE-3 heads against a plain script, in both formats, however rows are fed."""

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, make_eagle3
from eagle3_reference import Head, read, speculate
from hf_reference import Statistics, load
from specrs.backends.cpu.eagle3 import load_eagle3
from specrs.backends.cpu.weights import load_native
from specrs.core import InvalidBufferError
from specrs.drafters.eagle3.head import Eagle3Head
from specrs.drafters.eagle3.native import NativeEagle3Head
from specrs.models.inputs import PassInputs
from specrs.models.torch_arrays import NUMPY_DTYPES, TORCH_DTYPES
from specrs.models.torch_loader import load_model
from specrs.pair import EAGLE3, TARGET
from specrs.pair.prompts import PROMPTS
from tokenizers import Tokenizer
from torch import Tensor

from models.native_passes import over_tensors

LENGTH, DRAFTS = 45, 5
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 1.0}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "speculators": {"layout": "speculators"},
    "speculators qwen3": {"layout": "speculators", "layer": "qwen3", "norm_before_residual": True},
    "reduced vocabulary": {"vocab": 50},
    "reduced vocabulary, speculators": {"layout": "speculators", "vocab": 1},
    "explicit layers": {"layer_ids": [0, 5]},
    "other width": {"hidden": 40, "vocab": 30},
    "own embedding": {"own_embedding": True, "layout": "speculators"},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True, "layout": "speculators"},
    "fc_norm": {"fc_norm": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "one KV head": {"heads": 3, "kv_heads": 1, "head_dim": 6},
    "bf16 file": {"dtype": torch.bfloat16},
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads")
    make_checkpoint(path / "target", layers=7, hidden=64, head_dim=16)
    return path


@functools.cache
def make(folder: Path, name: str) -> Path:
    return make_eagle3(folder / name.replace(" ", "_"), folder / "target", seed=3, **VARIANTS[name])


@functools.cache
def head(folder: Path, name: str, dtype: torch.dtype) -> Eagle3Head:
    target = load_model(folder / "target", dtype=dtype)
    made = load_eagle3(make(folder, name), target)
    assert isinstance(made, Eagle3Head)
    return made


@functools.cache
def expected(folder: Path, name: str) -> tuple[list[int], Tensor, list[int], Tensor]:
    """Return the script's tokens, layer entries `[LENGTH, L, Ht]`, greedy drafts after them, and the logits of the
    text's rows and of the drafts, `[LENGTH - 2 + DRAFTS, Vd]`."""
    rng = random.Random(5)
    target = load(folder / "target")
    reference = Head(make(folder, name), target)
    ids = [rng.randrange(200) for _ in range(LENGTH)]
    with torch.inference_mode():
        _, entries = read(target, ids, reference.layer_ids)
        drafts, logits = reference.draft(entries, ids, DRAFTS)
        _, first = reference.run(
            reference.fuse([x[:-1] for x in entries]), torch.tensor(ids[1:]), torch.arange(LENGTH - 1)
        )
    assert torch.equal(first[-1], logits[0])
    return ids, torch.stack(entries, dim=1), drafts, torch.cat([first[:-1], logits])


@pytest.mark.parametrize("native", [False, True])
def test_the_bundled_head_drafts_what_the_script_does(native: bool) -> None:
    """Check that the bundled head drafts what the script does, with a prompt in two chunks, and that the target agrees
    with some of its first drafts."""
    prompt: list[int] = Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode(PROMPTS[0]).ids
    target, statistics = load(TARGET), Statistics()
    reference = Head(EAGLE3, target)
    speculation = speculate(target, reference, prompt, 40, 3, [], statistics)
    assert statistics.per_position[0] > 0.25 * statistics.drafts
    model = load_native(TARGET, dtype="float32") if native else load_model(TARGET, dtype="float64")
    made = over_tensors(load_eagle3(EAGLE3, model))
    for r in speculation.rounds[:: 1 + len(speculation.rounds) // 4]:
        text = (prompt + speculation.tokens)[: r.n]
        with torch.inference_mode():
            _, entries = read(target, text, reference.layer_ids)
        feeder, last = HeadFeeder(made, 16, length=r.n + 3), r.n - 1
        fused = made.fuse(torch.stack(entries, dim=1)[:last].to(TORCH_DTYPES[model.dtype]))
        feeder.feed(text[1:30], list(range(29)), fused[:29])
        recurrent, logits = feeder.feed(text[30:], list(range(29, last)), fused[29:])
        drafts = [int(made.target_ids[logits[-1].argmax()])]
        while len(drafts) < len(r.drafts):
            recurrent, logits = feeder.feed(drafts[-1:], [last + len(drafts) - 1], recurrent[-1:])
            drafts.append(int(made.target_ids[logits[-1].argmax()]))
        assert drafts == r.drafts


class HeadFeeder:
    """Feeds one request to a head, on one cache of scattered blocks that begins as NaN."""

    def __init__(self, head: Any, block_size: int, first: int = 0, length: int = LENGTH + DRAFTS) -> None:
        self.head, self.block_size = over_tensors(head), block_size
        blocks = -(-length // block_size)
        self.cache = head.allocate_cache(blocks + 3, block_size)
        self.cache.layers[0][...] = torch.nan
        self.table = torch.randperm(blocks + 3, generator=torch.Generator().manual_seed(1))[:blocks].view(1, -1)
        self.k_start = torch.tensor([first]) if first else None

    @torch.inference_mode()
    def feed(self, ids: list[int], positions: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.tensor(positions)
        slots = self.table[0, at // self.block_size] * self.block_size + at % self.block_size
        starts = torch.tensor([0, len(ids)])
        inputs = PassInputs(torch.tensor(ids), at, slots, starts, self.table, len(ids), max(positions) + 1)
        recurrent, final = self.head.forward(inputs, hidden, self.cache, self.k_start)
        return recurrent, self.head.compute_logits(final)


def run(head: Any, ids: list[int], entries: Tensor, chunks: list[int], block_size: int, first: int = 0) -> Any:
    """Feed the head with the text in chunks, then with its own drafts one by one. Return the drafts, and the logits of
    all rows."""
    feeder = HeadFeeder(head, block_size, first)
    head = feeder.head
    outputs, start = [], first
    recurrent = torch.empty(0)
    for length in chunks:
        span = list(range(start, start + length))
        fused = head.fuse(entries[span])
        recurrent, logits = feeder.feed([ids[i + 1] for i in span], span, fused)
        outputs.append(logits)
        start += length
    assert start == LENGTH - 1
    drafts: list[int] = []
    for i in range(DRAFTS):
        drafts.append(int(head.target_ids[outputs[-1][-1].argmax()]))
        if i < DRAFTS - 1:
            recurrent, logits = feeder.feed([drafts[-1]], [LENGTH - 1 + i], recurrent[-1:])
            outputs.append(logits)
    return drafts, torch.cat(outputs)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("chunks", [[LENGTH - 1], [20, 1, 3, 20]], ids=["at once", "pieces"])
def test_equals_the_script(folder: Path, name: str, chunks: list[int]) -> None:
    ids, entries, drafts, logits = expected(folder, name)
    found = run(head(folder, name, torch.float64), ids, entries, chunks, 4)
    assert found[0] == drafts
    assert found[1].dtype == torch.float64
    torch.testing.assert_close(found[1], logits, rtol=0, atol=TOLERANCE[torch.float64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "EAGLE-3.1", "other width"])
def test_other_dtypes(folder: Path, name: str, dtype: torch.dtype) -> None:
    ids, entries, _, logits = expected(folder, name)
    _, found = run(head(folder, name, dtype), ids, entries, [LENGTH - 1], 16)
    assert found.dtype == torch.float32
    true = LENGTH - 1  # drafts may be others
    torch.testing.assert_close(found[:true].double(), logits[:true], rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("chunks", [[LENGTH - 1], [20, 1, 3, 20]], ids=["at once", "pieces"])
def test_native_passes(folder: Path, name: str, dtype: torch.dtype, chunks: list[int]) -> None:
    ids, entries, drafts, logits = expected(folder, name)
    native = load_eagle3(make(folder, name), load_native(folder / "target", dtype=NUMPY_DTYPES[dtype]))
    assert isinstance(native, NativeEagle3Head)
    found = run(native, ids, entries, chunks, 4)
    true = LENGTH - 1
    torch.testing.assert_close(found[1][:true].double(), logits[:true], rtol=0, atol=TOLERANCE[dtype])
    if dtype == torch.float32:
        assert found[0] == drafts
        torch.testing.assert_close(found[1].double(), logits, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("first", [1, 16, 17, LENGTH - 2])
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_native_passes_start_anew(folder: Path, first: int, block_size: int) -> None:
    ids, entries, _, _ = expected(folder, "llama")
    reference = Head(make(folder, "llama"), load(folder / "target"))
    with torch.inference_mode():
        drafts, logits = reference.draft(list(entries.unbind(1)), ids, DRAFTS, first)
    native = load_eagle3(make(folder, "llama"), load_native(folder / "target", dtype="float32"))
    found = run(native, ids, entries, [LENGTH - 1 - first], block_size, first)
    assert found[0] == drafts
    torch.testing.assert_close(found[1][-DRAFTS:].double(), logits, rtol=0, atol=TOLERANCE[torch.float32])


def test_native_passes_refuse_what_does_not_fit(folder: Path) -> None:
    target = load_native(folder / "target", dtype="float32")
    native = load_eagle3(make(folder, "llama"), target)
    feeder = HeadFeeder(native, 4, 9)
    with pytest.raises(InvalidBufferError, match=r"k_start\[0\]=9: must be from 0 to 8, the position of row 0"):
        feeder.feed([1], [8], torch.zeros(1, 64))
    with pytest.raises(InvalidBufferError, match=r"^head_states=32 elements: must be 64"):
        feeder.feed([1], [9], torch.zeros(1, 32))
    one = np.zeros(1, np.int64)
    call = [one, one, one, np.array([0, 1]), np.zeros((1, 1), np.int64), feeder.cache.native]
    final = np.zeros((1, 64), np.float32)
    with pytest.raises(InvalidBufferError, match=r"^head_states=none: must be given"):
        native.decoder.forward(*call, final)
    call[-1] = target.allocate_cache(1, 4).native
    with pytest.raises(InvalidBufferError, match=r"^head_states=given: must be none, because the decoder is no"):
        target.decoder.forward(*call, final, head_states=final.copy())


@pytest.mark.parametrize("first", [1, 17, LENGTH - 2])
@pytest.mark.parametrize("chunks", [[], [5]], ids=["at once", "pieces"])
def test_starts_anew(folder: Path, first: int, chunks: list[int]) -> None:
    """Check a head that starts anew: before `first` there are no rows, and no finite numbers."""
    ids, entries, _, _ = expected(folder, "llama")
    reference = Head(make(folder, "llama"), load(folder / "target"))
    with torch.inference_mode():
        drafts, logits = reference.draft(list(entries.unbind(1)), ids, DRAFTS, first)
    rest = LENGTH - 1 - first
    pieces = [*chunks, rest - sum(chunks)] if rest > sum(chunks) else [rest]
    found = run(head(folder, "llama", torch.float64), ids, entries, pieces, 4, first)
    assert found[0] == drafts
    torch.testing.assert_close(found[1][-DRAFTS:], logits, rtol=0, atol=TOLERANCE[torch.float64])
