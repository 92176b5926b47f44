"""Models that the iteration calls through Python: a native model wrapped by `CallableModel` gives the bits that it
gives directly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, make_eagle3, perturb_checkpoint
from engine.harness import VOCAB, config, make_prompts, poison, run
from engine.logits import LOGITS, logits_of
from native_calls import NativeCalls, call_native
from specrs.backends.cpu.callable_model import CallableModel
from specrs.drafters.eagle3.native import NativeEagle3Head
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
from specrs.models.base import HiddenStates
from specrs.models.inputs import PassInputs
from specrs.sampling import SamplingParams

WINDOWED = {"layers": 2, "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 0}
MIXED = {"layers": 3, "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen3", {"layers": 6, "hidden": 64, "head_dim": 16}),
    "windowed": ("qwen2", WINDOWED),
    "in KV groups": ("qwen2", MIXED),
}
CASES = [
    ("plain", None, "float32"),
    ("plain", "model", "float32"),
    ("plain", "model", "bfloat16"),
    ("plain", "head", "float32"),
    ("plain", "head of few ids", "bfloat16"),
    ("windowed", "model", "float32"),
    ("in KV groups", "model", "float32"),
]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the targets by name."""
    folder = tmp_path_factory.mktemp("called")
    return {
        name: make_checkpoint(folder / f"target {name}", family, seed=1, vocab=VOCAB, **fields)
        for name, (family, fields) in TARGETS.items()
    }


def draft_of(target: Path, draft: str | None) -> Path | None:
    """Return a draft of kind `draft` for `target`, in a folder next to it."""
    if draft is None:
        return None
    path = target.parent / f"{draft} of {target.name}"
    if path.exists():
        return path
    if draft == "model":
        return perturb_checkpoint(target, path, noise=0.02, seed=2)
    return make_eagle3(path, target, seed=3, vocab=150 if "few" in draft else None)


def texts_of(engine: Engine, k: int) -> list[Request]:
    """Run requests of every kind that a pass may have to distinguish, and return them: sampled and greedy, with and
    without prompt log probabilities, with and without drafts."""
    poison(engine)
    jobs = []
    for i, prompt in enumerate(make_prompts()[2:8]):
        params = SamplingParams(
            temperature=0.8 * (i % 2),
            max_tokens=24,
            ignore_eos=True,
            detokenize=False,
            logprobs=-1 if i % 3 else None,
            prompt_logprobs=3 if i % 3 == 1 else None,
            num_speculative_tokens=None if i < 5 else 0,
        )
        jobs.append(Request(i, prompt, params, num_speculative_tokens=k, seed=i))
        engine.add_request(jobs[-1])
    run(engine)
    return jobs


@pytest.mark.parametrize(("target", "draft", "dtype"), CASES)
def test_called_models_give_the_same_bits(
    target: str, draft: str | None, dtype: str, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = draft_of(targets[target], draft)
    k = 3 if folder else 0
    method = "eagle3" if draft and "head" in draft else "draft_model"
    fields: dict[str, Any] = {"method": method, "block_size": 8, "max_num_batched_tokens": 24, **LOGITS}
    made = config(targets[target], folder, k=k, dtype=dtype, **fields)
    loaded = load_weights(made)
    native = build_engine(made, loaded)
    called = call_native(monkeypatch, VOCAB)
    other = build_engine(made, loaded)
    assert len(called) == 1 + (folder is not None)
    assert isinstance(called[-1].model, NativeEagle3Head) == (method == "eagle3")
    assert native.scheduler.num_groups == (3 if target == "in KV groups" else 1)
    for one, two in zip(texts_of(native, k), texts_of(other, k), strict=True):
        assert one.output_token_ids == two.output_token_ids
        assert one.prompt_logprobs == two.prompt_logprobs
        assert repr(one.acceptance) == repr(two.acceptance)
        if one.params.logprobs is not None:
            assert np.array_equal(logits_of(one).view(np.int32), logits_of(two).view(np.int32))
    ran, expected = other.stats(), native.stats()
    counts = ("target_passes", "draft_passes", "drafts", "draft_tokens", "accepted_tokens", "num_cached_tokens")
    assert [getattr(ran, name) for name in counts] == [getattr(expected, name) for name in counts]
    assert bool(ran.drafts) == (k > 0)
    assert ran.accepted_tokens or draft != "model"


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda logits: logits[:, :-1].copy(), r"logits: shape is \[.*\]; must be"),
        (lambda logits: logits.astype(np.float64), "logits: dtype is float64"),
        (lambda logits: None, "logits"),
    ],
)
def test_a_target_that_returns_something_else_ends_the_step(
    broken: Any, words: str, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = NativeCalls._logits
    monkeypatch.setattr(NativeCalls, "_logits", lambda self, hidden: broken(logits(self, hidden)))
    call_native(monkeypatch, VOCAB)
    engine = build_engine(config(targets["plain"], None, k=0, dtype="float32"))
    engine.add_request(Request(0, [1, 2, 3], SamplingParams(max_tokens=3, detokenize=False), num_speculative_tokens=0))
    with pytest.raises(Exception, match=words):
        engine.step()


class Stub:
    """A torch model whose hidden states are the token ids, NaN at position 7. Its logits are twice the hidden
    states."""

    vocab_size, num_layers, hidden_size, target_ids = 3, 2, 3, None

    def __init__(self, ends_in_window: bool) -> None:
        self.ends_in_window = ends_in_window

    def forward(self, inputs: PassInputs, kv_cache: Any, layers: list[int]) -> HiddenStates:
        hidden = inputs.input_ids.to(torch.float64)[:, None].expand(-1, 3).clone()
        hidden[inputs.positions == 7] = torch.nan
        entries = torch.stack([hidden + layer for layer in layers], dim=1) if layers else None
        return HiddenStates(hidden, entries)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * hidden


@pytest.mark.parametrize("ends_in_window", [False, True])
def test_a_model_of_torch_answers_for_the_rows_asked_for(ends_in_window: bool) -> None:
    model = CallableModel(Stub(ends_in_window), None)  # type: ignore[arg-type]
    tokens, starts = np.array([5, 6, 7, 8, 9]), np.array([0, 3, 5])

    def inputs() -> dict[str, Any]:
        arrays = {"input_ids": tokens, "positions": np.array([6, 7, 8, 0, 1]), "slots": tokens, "q_start": starts}
        sizes = {"block_table": np.zeros((2, 1), np.int64), "max_q_len": 3, "max_context": 9, "prompts": True}
        return arrays | sizes | {"rows": np.array([4, 1])}

    logits, entries, finite = model.forward(inputs(), np.array([2, 4]), False, [0, 1], None)
    assert logits is not None
    assert (logits.dtype, logits.tolist()) == (np.float32, [[14.0] * 3, [18.0] * 3])
    assert entries is not None
    assert (entries.dtype, entries.shape) == (np.float32, (5, 2, 3))
    assert entries[3].tolist() == [[8.0] * 3, [9.0] * 3]
    assert (finite is None) == (not ends_in_window)
    assert finite is None or finite.tolist() == [True, False, True, True, True]
    logits, entries, _ = model.forward(inputs(), np.array([0, 2, 3]), True, [], None)
    assert logits is entries is None
    assert model.logits(np.array([2, 0])).tolist() == [[16.0] * 3, [10.0] * 3]
    assert model.forward(inputs(), np.array([], np.int64), False, [], None)[0] is None
