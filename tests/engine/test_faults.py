"""A fault in a request or a step ends what it affects; other requests, prefix cache and engine go on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_overflowing
from specrs.core import DuplicateRequestError, InvalidRequestError, TokenDecoder, UnknownRequestError
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.errors import EngineError
from specrs.models.base import HiddenStates, Model
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.torch_decoder import TorchDecoder
from specrs.sampling import SamplingParams
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from engine.harness import VOCAB, Bank, assert_idle, config, make_engine, request, run


def poison_request(engine: Engine, monkeypatch: pytest.MonkeyPatch, marker: int, model: Model | None) -> None:
    """Let a pass of `model` return NaN for all rows of each request to which this pass feeds the token `marker`."""
    forward = TorchDecoder.forward

    def faulty(
        self: TorchDecoder, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int] = ()
    ) -> HiddenStates:
        hidden = forward(self, inputs, kv_cache, hidden_layers)
        if self is model:
            for start, end in zip(inputs.q_start.tolist(), inputs.q_start[1:].tolist(), strict=False):
                if marker in inputs.input_ids[start:end].tolist():
                    hidden.final[start:end] = torch.nan
        return hidden

    monkeypatch.setattr(TorchDecoder, "forward", faulty)


@pytest.mark.parametrize("depth", [1, 2])
def test_non_finite_logits_end_their_request_alone(bank: Bank, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(bank.target, bank.drafts["close"], k=3, max_steps_in_flight=depth)
    # A marker that no neighbour's text holds.
    used = {t for i in range(2, 7) for t in bank.prompts[i] + bank.continuations[i]}
    marker = next(t for t in range(211) if t not in used)
    poison_request(engine, monkeypatch, marker, engine.weights.target)
    neighbours = [request(i, bank.prompts[i], k=3, max_tokens=20, engine_k=3, ignore_eos=True) for i in range(2, 7)]
    bad = request(99, [*bank.prompts[5][:40], marker], k=3, max_tokens=20, engine_k=3)
    for job in (*neighbours, bad):
        engine.add_request(job)
    run(engine)
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, EngineError)
    assert "not finite" in str(bad.error)
    for job in neighbours:
        assert job.output_token_ids == bank.continuations[job.request_id][:20]


def test_a_poisoned_prefix_is_never_shared(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(bank.target, None, k=0)
    prompt = bank.prompts[5]
    with monkeypatch.context() as patch:
        poison_request(engine, patch, prompt[-1], engine.weights.target)
        bad = request(0, prompt, k=None, max_tokens=20, engine_k=0)
        engine.add_request(bad)
        run(engine)
        assert bad.finish_reason == "error"
    good = request(1, prompt, k=None, max_tokens=20, engine_k=0, ignore_eos=True)
    engine.add_request(good)
    run(engine)
    assert good.num_cached_tokens == 0
    assert good.output_token_ids == bank.continuations[5][:20]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_poisoned_chunk_is_never_shared_before_its_prompt_ends(
    bank: Bank, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prompts 5 and 6 begin alike for 64 tokens, four blocks, in chunks of 20; of the first, the second chunk is broken.
    engine = make_engine(bank.target, None, k=0, max_num_batched_tokens=20, max_steps_in_flight=depth)
    jobs = [request(i, bank.prompts[i], k=None, max_tokens=20, engine_k=0, ignore_eos=True) for i in (6, 5)]
    calls = 0
    forward = TorchDecoder.forward

    def faulty(
        self: TorchDecoder, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int] = ()
    ) -> HiddenStates:
        nonlocal calls
        hidden = forward(self, inputs, kv_cache, hidden_layers)
        calls += 1
        if calls == 2:
            hidden.final[:] = torch.nan
        return hidden

    monkeypatch.setattr(TorchDecoder, "forward", faulty)
    for job in jobs:
        engine.add_request(job)
    run(engine)
    assert jobs[0].finish_reason == "error"
    assert jobs[1].num_cached_tokens == 16, "the first chunk's whole block"
    assert jobs[1].output_token_ids == bank.continuations[5][:20]


@pytest.mark.parametrize(
    ("fields", "is_native"),
    [({"enforce_eager": True}, False), ({}, True), ({"model_impl": "transformers"}, False)],
    ids=["torch", "native", "transformers"],
)
def test_a_fault_after_the_last_layer_that_sees_all_is_seen(
    fields: dict[str, Any], is_native: bool, tmp_path: Path
) -> None:
    """Check that a NaN from a layer after the last one with full attention is seen: the third layer's K and V are not
    finite at a position outside the window of the chunk's last rows."""
    marker, prompt = VOCAB - 2, [20 + i for i in range(60)]
    target = make_overflowing(tmp_path / "target", marker, vocab=VOCAB, sliding_window=11)
    made = config(target, None, k=0, dtype="float32", **fields)
    engine = build_engine(made)
    assert engine.runner.is_native is is_native
    bad = request(0, [*prompt[:5], marker, *prompt[5:]], k=None, max_tokens=4, engine_k=0)
    good = request(1, prompt, k=None, max_tokens=4, engine_k=0)
    for job in (bad, good):
        engine.add_request(job)
    run(engine)
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert "not finite" in str(bad.error)
    # None of its blocks is found by others.
    again = request(2, [*bad.prompt_token_ids], k=None, max_tokens=4, engine_k=0)
    engine.add_request(again)
    run(engine)
    assert again.num_cached_tokens == 0


def test_a_draft_that_answers_nan_costs_drafts_not_text(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(bank.target, bank.drafts["close"], k=3)
    marker = bank.continuations[5][4]
    assert engine.weights.drafter is not None
    poison_request(engine, monkeypatch, marker, engine.weights.drafter.model)
    job = request(0, bank.prompts[5], k=3, max_tokens=40, engine_k=3, ignore_eos=True)
    engine.add_request(job)
    run(engine)
    assert job.finish_reason == "length"
    assert job.output_token_ids == bank.continuations[5]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fault", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_fault_in_a_step_ends_its_requests_and_leaves_the_engine_usable(
    bank: Bank, depth: int, fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(bank.target, bank.drafts["close"], k=3, max_steps_in_flight=depth, max_num_seqs=2)
    jobs = [request(i, bank.prompts[i], k=3, max_tokens=20, engine_k=3, ignore_eos=True) for i in range(4)]
    for job in jobs:
        engine.add_request(job)
    for _ in range(3):
        engine.step()

    def fail(*_: object) -> torch.Tensor:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(TorchDecoder, "forward", fail)
        with pytest.raises(type(fault)):
            engine.step()
    assert [job.finish_reason for job in jobs] == ["error", "error", None, None]
    assert all(isinstance(job.error, EngineError) for job in jobs[:2])
    run(engine)
    for i in (2, 3):
        assert jobs[i].output_token_ids == bank.continuations[i][:20]


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_waiting_running_and_in_flight(bank: Bank, depth: int) -> None:
    engine = make_engine(bank.target, bank.drafts["close"], k=3, max_steps_in_flight=depth, max_num_seqs=2)
    jobs = [request(i, bank.prompts[i], k=3, max_tokens=30, engine_k=3, ignore_eos=True) for i in range(4)]
    for job in jobs:
        engine.add_request(job)
    engine.step()
    engine.abort(0)
    engine.abort(3)
    with pytest.raises(UnknownRequestError, match="0"):
        engine.abort(0)
    run(engine)
    assert [job.finish_reason for job in jobs] == ["abort", "length", "length", "abort"]
    for i in (1, 2):
        assert jobs[i].output_token_ids == bank.continuations[i][:30]


def test_a_rejected_request_leaves_nothing_behind(bank: Bank) -> None:
    engine = make_engine(bank.target, None, k=0)
    engine.add_request(request(0, bank.prompts[1], k=None, max_tokens=4, engine_k=0))
    with pytest.raises(InvalidRequestError, match=r"prompt"):
        engine.add_request(request(1, bank.prompts[5] * 20, k=None, max_tokens=40, engine_k=0))
    with pytest.raises(DuplicateRequestError, match="0"):
        engine.add_request(request(0, bank.prompts[1], k=None, max_tokens=4, engine_k=0))
    with pytest.raises(InvalidRequestError, match=r"prompt_token_ids\[1\]=211"):
        engine.add_request(request(2, [3, 211], k=None, max_tokens=4, engine_k=0))
    assert list(engine.requests) == [0]
    run(engine)
    assert_idle(engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_output_that_cannot_be_read_ends_its_request_alone(bank: Bank, depth: int) -> None:
    """Check that an output that cannot be decoded ends its request alone. The tokenizers library panics on a token that
    consists only of what it strips."""
    bad = bank.continuations[1][2]
    words = {(" " if i == bad else f"w{i}"): i for i in range(VOCAB)}
    backend = Backend(models.WordLevel(words, unk_token="w0"))
    backend.decoder = decoders.Sequence([decoders.Strip(" ", 1, 1)])
    decoder = TokenDecoder(backend.to_str())
    engine = make_engine(bank.target, bank.drafts["close"], k=3, max_steps_in_flight=depth)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    jobs = [
        Request(i, bank.prompts[i], params, decoder=decoder if i == 1 else None, num_speculative_tokens=3)
        for i in range(3)
    ]
    for job in jobs:
        engine.add_request(job)
    run(engine)
    assert jobs[1].finish_reason == "error"
    assert isinstance(jobs[1].error, EngineError)
    assert "request 1: its output could not be read" in str(jobs[1].error)
    for i in (0, 2):
        assert jobs[i].output_token_ids == bank.continuations[i][:20]
