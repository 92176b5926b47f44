"""MTP heads: the logits of transformers' `MtpModel` by torch and natively, wrong tensors by name, and the ids that are
drafted."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import edit_json, make_checkpoint
from hf_reference import load
from hybrid_reference import float64
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_reference import Script, add_head
from quantized_files import fp8_block
from safetensors.torch import load_file, save_file
from specrs.backends.cpu.mtp import load_mtp
from specrs.backends.cpu.weights import load_native
from specrs.core import CpuPool
from specrs.drafters.mtp.files import draft_ids, has_mtp_head, open_mtp
from specrs.errors import CheckpointError, InvalidConfigError, UnsupportedModelError
from specrs.models.torch_loader import load_model
from torch import Tensor

from models.harness import Feeder
from models.native_passes import over_tensors
from models.test_eagle3 import HeadFeeder

VOCAB, LENGTH, DRAFTS = 97, 24, 4
TOKENS = random.Random(1).choices(range(VOCAB), k=LENGTH)
BOUND = 6e-5
"""Largest difference of native logits from those in float64, relative to the largest logit. Three layers of Qwen3-Next
have one row in some seeds with 2.1e-5, and torch's own fp32 states differ by 2.3e-5."""


def make(path: Path, family: str = "qwen3_5_text", **fields: Any) -> Path:
    shape = {"vocab": VOCAB, "hidden": 48, "intermediate": 40, "head_dim": 16, "kv_heads": 2}
    return add_head(make_checkpoint(path, family, **shape | fields), seed=4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("mtp") / "model")


def expected(path: Path) -> tuple[list[int], Tensor]:
    """Return the script's drafts after TOKENS, and the logits of the head's rows: of the text, then of all drafts but
    the last."""
    with float64(), torch.inference_mode():
        target = load(path)
        script = Script(target)
        hidden = target(torch.tensor([TOKENS]), output_hidden_states=True, use_cache=False).hidden_states[-1][0]
        drafts, logits = script.draft([hidden], TOKENS, DRAFTS)
        rows = script.run(hidden[:-1], torch.tensor(TOKENS[1:]), torch.arange(LENGTH - 1))[1]
    return drafts, torch.cat([rows, logits[1:]])


def states(model: Any, layer: int) -> Tensor:
    """Return the target's hidden states of TOKENS, `[N, 1, H]`."""
    feeder = Feeder(model, hidden_layers=(layer,))
    feeder.feed_chunks(TOKENS, [LENGTH])
    assert feeder.entries is not None
    return feeder.entries


def run(
    head: Any, entries: Tensor, chunks: list[int], *, first: int = 0, early: tuple[int, int] = (0, 0)
) -> tuple[list[int], Tensor]:
    """Feed the head with the text in chunks, then with its own drafts one by one. Return the drafts, and the logits of
    all rows. `early` plants a mistake: text and drafts are fed this many positions too early."""
    feeder, start, rows = HeadFeeder(head, 4, first, length=LENGTH + DRAFTS), first, []
    recurrent = torch.empty(0)
    for length in chunks:
        span = list(range(start, start + length))
        recurrent, logits = feeder.feed([TOKENS[i + 1 - early[0]] for i in span], span, feeder.head.fuse(entries[span]))
        rows.append(logits)
        start += length
    assert start == LENGTH - 1
    drafts: list[int] = []
    for i in range(DRAFTS):
        drafts.append(int(feeder.head.target_ids[rows[-1][-1].argmax()]))
        if i < DRAFTS - 1:
            recurrent, logits = feeder.feed([drafts[-1]], [start + i - early[1]], recurrent[-1:])
            rows.append(logits)
    return drafts, torch.cat(rows)


def close(found: Tensor, known: Tensor, bound: float) -> None:
    assert found.isfinite().all()
    assert (found.double() - known).abs().max() <= bound * float(known.abs().max()), "logits differ"


def head_of(path: Path, target: Any, size: int | None = None, counts: Path | None = None) -> Any:
    given = None if counts is None else str(counts)
    return load_mtp(open_mtp(str(path), target, revision=None, size=size, counts=given), target)


CUTS = st.lists(st.integers(1, LENGTH - 2), max_size=3, unique=True)


def chunks_of(cuts: list[int]) -> list[int]:
    edges = [0, *sorted(cuts), LENGTH - 1]
    return [end - first for first, end in itertools.pairwise(edges)]


@settings(max_examples=12)
@given(
    st.sampled_from(
        [
            {},
            {"kv_heads": 1, "head_dim": 48, "tie": False},
            {"group": 3, "layers": 3},
            {"family": "qwen3_5_moe_text"},
            {"family": "qwen3_next", "layers": 3},
        ]
    ),
    st.integers(0, 3),
    CUTS,
)
def test_the_logits_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], seed: int, cuts: list[int]
) -> None:
    layers = {"layer_types": ["linear_attention"] * (shape.get("layers", 2) - 1) + ["full_attention"]}
    path = make(tmp_path_factory.mktemp("mtp") / "model", seed=seed, **shape | layers)
    drafts, logits = expected(path)
    with float64():
        target = load_model(path, dtype="float64")
        head = head_of(path, target)
        found = run(head, states(target, target.num_layers + 1), chunks_of(cuts))
    assert found[0] == drafts
    close(found[1], logits, 1e-12)
    native = load_native(path)
    found = run(head_of(path, native), states(native, native.num_layers + 1), chunks_of(cuts))
    close(found[1], logits, BOUND)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_native_bits_depend_on_nothing(path: Path, threads: int) -> None:
    target = load_native(path)
    entries, plain = states(target, target.num_layers + 1), head_of(path, target)
    known = run(plain, entries, [LENGTH - 1])
    found = run(plain.on_pool(CpuPool(threads)), entries, [3, 1, 7, LENGTH - 12])
    assert found[0] == known[0]
    assert torch.equal(found[1], known[1])


def test_native_final_states_are_those_that_logits_read(path: Path) -> None:
    target = over_tensors(load_native(path))
    feeder = Feeder(target.native, hidden_layers=(target.num_layers + 1,))
    logits = feeder.feed({0: list(zip(TOKENS, range(LENGTH), strict=True))})
    assert torch.equal(target.compute_logits(feeder.entries[:, 0]), logits)


def swapped(names: tuple[str, str]) -> Callable[[Any], Any]:
    one, other = names
    return lambda w: replace(w, **{one: getattr(w, other), other: getattr(w, one)})


def halves_swapped(weights: Any) -> Any:
    matrix = weights.fc.weight if hasattr(weights.fc, "weight") else weights.fc.parts[0]
    half = matrix.shape[1] // 2
    if isinstance(matrix, Tensor):
        return replace(weights, fc=type(weights.fc)(torch.cat([matrix[:, half:], matrix[:, :half]], 1), None))
    made = np.ascontiguousarray(np.concatenate([matrix[:, half:], matrix[:, :half]], 1))
    return replace(weights, fc=type(weights.fc)((made,)))


FAULTS: dict[str, tuple[Callable[[Any], Any], int, tuple[int, int]]] = {
    "none": (lambda w: w, 1, (0, 0)),
    "state before the final norm": (lambda w: w, 0, (0, 0)),
    "norms in another order": (swapped(("embedding_norm", "hidden_norm")), 1, (0, 0)),
    "halves of fc in another order": (halves_swapped, 1, (0, 0)),
    "the token of the state's own position": (lambda w: w, 1, (1, 0)),
    "drafts a position early": (lambda w: w, 1, (0, 1)),
}
"""Planted mistakes: changed weights, which of the target's last states is read, and `early` of `run`."""


@pytest.mark.parametrize("kind", ["torch", "native"])
@pytest.mark.parametrize("fault", FAULTS)
def test_mistakes_are_seen(path: Path, kind: str, fault: str) -> None:
    """Check that each planted mistake fails the comparison of `test_the_logits_of_transformers`."""
    change, after_norm, early = FAULTS[fault]
    logits = expected(path)[1]
    with float64():
        target: Any = load_model(path, dtype="float64") if kind == "torch" else load_native(path)
        right = head_of(path, target)
        head = type(right)(change(right.weights))
        found = run(head, states(target, target.num_layers + after_norm), [LENGTH - 1], early=early)[1]
    bound = 1e-12 if kind == "torch" else BOUND
    if fault == "none":
        close(found, logits, bound)
    else:
        with pytest.raises(AssertionError, match="logits differ"):
            close(found, logits, 1000 * bound)


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_a_state_that_is_fed_again_before_the_norm_is_seen(path: Path, kind: str) -> None:
    """Check that feeding a head's own state before the norm is noticed: the first draft is right, later ones are
    not."""
    logits = expected(path)[1]
    with float64():
        target: Any = load_model(path, dtype="float64") if kind == "torch" else load_native(path)
        head = over_tensors(head_of(path, target))
        scale = 1 + 0.5 * torch.arange(48) / 48

        class Before:
            """The head, but its recurrent state is scaled, as a state before a norm with other weights would be."""

            def __getattr__(self, name: str) -> Any:
                return getattr(head, name)

            def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
                recurrent, final = head.forward(*arguments)
                return recurrent * scale, final

        found = run(Before(), states(target, target.num_layers + 1), [LENGTH - 1])[1]
    close(found[: LENGTH - 1], logits[: LENGTH - 1], BOUND)
    with pytest.raises(AssertionError, match="logits differ"):
        close(found, logits, 1000 * BOUND)


def test_a_head_that_starts_late_attends_from_there(path: Path) -> None:
    with float64():
        target = load_model(path, dtype="float64")
        late = run(head_of(path, target), states(target, target.num_layers + 1), [LENGTH - 9], first=8)
        native = load_native(path)
        found = run(head_of(path, native), states(native, native.num_layers + 1), [5, LENGTH - 14], first=8)
        with torch.inference_mode():
            model = load(path)
            hidden = model(torch.tensor([TOKENS]), output_hidden_states=True, use_cache=False).hidden_states[-1][0]
            drafts, logits = Script(model).draft([hidden], TOKENS, DRAFTS, 8)
    assert late[0] == drafts
    close(late[1][-DRAFTS:], logits, 1e-12)
    close(found[1][-DRAFTS:], logits, BOUND)


@pytest.mark.parametrize("quantization", ["int8", "int4", "q8_0", "fp8"])
@pytest.mark.parametrize("size", [None, 30])
def test_a_head_of_a_quantized_target(tmp_path: Path, quantization: str, size: int | None) -> None:
    """Check a head of a quantized target: its layer stays unquantized, and it uses the target's LM head."""
    path = make(tmp_path / "model", hidden=64, intermediate=96, head_dim=32, linear_value_head_dim=32, vocab=64 + VOCAB)
    target = load_native(path, quantization=quantization)
    with float64():
        wide = load_model(path, dtype="float64", quantization=quantization)
        entries = states(wide, wide.num_layers + 1)
        logits = run(head_of(path, wide, size), entries, [LENGTH - 1])[1]
    found = run(head_of(path, target, size), entries.float(), [LENGTH - 1])[1]
    assert found.shape[1] == (size or 64 + VOCAB)
    rows = slice(LENGTH - 1)  # of the text; drafts may differ
    close(found[rows], logits[rows], BOUND)


@pytest.mark.parametrize("quantized", [False, True], ids=["plain head", "quantized head"])
@pytest.mark.parametrize("kind", ["torch", "native"])
def test_a_head_in_a_quantized_checkpoint(tmp_path: Path, quantized: bool, kind: str) -> None:
    """Check a head in a quantized checkpoint. Its tensors decide whether it is quantized; config.json does not list an
    unquantized head."""
    source = make_checkpoint(tmp_path / "source", "qwen3_5_text", vocab=VOCAB, hidden=48, head_dim=16, kv_heads=2)
    path = tmp_path / "quantized"
    whole = [f"model.layers.0.linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")]
    whole += ["lm_head", "model.layers.0.mlp.down_proj", *(["mtp.fc"] if quantized else [])]
    fp8_block(add_head(source) if quantized else source, path, block=(16, 16), modules_to_not_convert=whole)
    numbers = tmp_path / "quantized.numbers"
    if not quantized:
        add_head(path, dtype=torch.float32)
        add_head(numbers)
    with float64():
        model = load_model(numbers, dtype="float64")
        entries = states(model, model.num_layers + 1)
        known = run(head_of(numbers, model), entries, [LENGTH - 1])[1]
    target: Any = load_model(path) if kind == "torch" else load_native(path)
    found = run(head_of(path, target), entries.float(), [LENGTH - 1])[1]
    close(found[: LENGTH - 1], known[: LENGTH - 1], BOUND)


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_fewer_ids(path: Path, tmp_path: Path, kind: str) -> None:
    """Check a head that drafts fewer ids: its logits are those of the chosen ids."""
    target: Any = load_model(path) if kind == "torch" else load_native(path)
    entries = states(target, target.num_layers + 1)
    whole = run(head_of(path, target), entries, [LENGTH - 1])[1]
    (tmp_path / "counts.json").write_text(json.dumps({str(i): (7 * i) % 13 for i in range(0, VOCAB, 2)}))
    for counts in (None, tmp_path / "counts.json"):
        head = head_of(path, target, 20, counts)
        assert head.vocab_size == 20
        assert head.num_parameters == head_of(path, target).num_parameters - (VOCAB - 20) * 48
        found = run(head, entries, [LENGTH - 1])[1]
        ids = torch.as_tensor(np.asarray(head.target_ids))
        torch.testing.assert_close(found[: LENGTH - 1], whole[: LENGTH - 1, ids], rtol=0, atol=1e-5)


def test_which_ids_are_drafted(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    assert draft_ids(None, None, 7).tolist() == list(range(7))
    assert draft_ids(3, None, 7).tolist() == [0, 1, 2]
    file.write_text('{"5": 9, "2": 1, "3": 1.5, "6": 1}')
    assert draft_ids(3, str(file), 7).tolist() == [2, 3, 5]
    assert draft_ids(7, str(file), 7).tolist() == list(range(7))
    with pytest.raises(InvalidConfigError, match=r"draft_vocab_size=8: must be at most 7"):
        draft_ids(8, None, 7)
    for wrong, message in (('{"7": 1}', "'7' must be a token id from 0 to 6"), ('{"1": -1}', "1: -1 must be a number")):
        file.write_text(wrong)
        with pytest.raises(CheckpointError, match=message):
            draft_ids(3, str(file), 7)
    with pytest.raises(CheckpointError, match="nowhere"):
        draft_ids(3, str(tmp_path / "nowhere.json"), 7)


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop("mtp.layers.0.mlp.up_proj.weight"), r"mtp\.layers\.0\.mlp\.up_proj\.weight is missing"),
    "misshapen": (
        lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"][:, :-1].contiguous()}),
        r"mtp\.fc\.weight has shape \(48, 95\), config\.json makes it \(48, 96\)",
    ),
    "unknown": (lambda t: t.update({"mtp.layers.1.x.weight": torch.ones(3)}), r"mtp\.layers\.1\.x\.weight is not part"),
    "integers": (
        lambda t: t.update({"mtp.norm.weight": torch.ones(48, dtype=torch.int32)}),
        r"mtp\.norm\.weight is I32",
    ),
}


@pytest.mark.parametrize("kind", ["torch", "native"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_tensors_are_rejected_by_name(tmp_path: Path, kind: str, wrong: str) -> None:
    change, message = WRONG[wrong]
    path = make(tmp_path / "model")
    rewrite(path, change)
    target = load_model(path) if kind == "torch" else load_native(path)  # the target reads none of them
    with pytest.raises(CheckpointError, match=message):
        head_of(path, target)


def test_a_truncated_file_is_rejected(tmp_path: Path) -> None:
    path = make(tmp_path / "model")
    target = load_native(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged or truncated"):
        head_of(path, target)


def test_where_there_is_no_head(tmp_path: Path, path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3_5_text", vocab=VOCAB)
    other = make_checkpoint(tmp_path / "other", vocab=VOCAB)
    assert has_mtp_head(str(path), None)
    assert not any(has_mtp_head(str(folder), None) for folder in (plain, other, tmp_path, tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"method=.mtp.: .* has no tensors mtp\.\*; use a checkpoint with"):
        head_of(plain, load_native(plain))
    with pytest.raises(UnsupportedModelError, match=r"method=.mtp.: not implemented for Qwen3ForCausalLM; implemented"):
        head_of(other, load_native(other))


def test_a_head_of_a_multimodal_checkpoint(tmp_path: Path, path: Path) -> None:
    """Check a head of a multimodal checkpoint with several files, as published. Only the index says that there is a
    head."""
    made, names = tmp_path / "model", load_file(path / "model.safetensors")
    made.mkdir()
    raw = json.loads((path / "config.json").read_text())
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": raw}
    (made / "config.json").write_text(json.dumps(config))
    of_file = {name: "b.safetensors" if name.startswith("mtp.") else "a.safetensors" for name in names}
    stored = {name: name.replace("model.", "model.language_model.", 1) for name in names}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({stored[name]: tensor for name, tensor in names.items() if of_file[name] == file}, made / file)
    index = {"weight_map": {stored[name]: file for name, file in of_file.items()}}
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    assert has_mtp_head(str(made), None)
    found, known = (head_of(folder, load_native(folder)) for folder in (made, path))
    target = load_native(path)
    entries = states(target, target.num_layers + 1)
    assert torch.equal(run(found, entries, [LENGTH - 1])[1], run(known, entries, [LENGTH - 1])[1])
    edit_json(made / "model.safetensors.index.json", weight_map={"model.language_model.norm.weight": "a.safetensors"})
    assert not has_mtp_head(str(made), None)
