"""Options of a request: stops, minimum lengths, contexts, priorities, salts. The text is transformers'."""

import functools
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from hf_reference import generate, load
from specrs.backends.ring import Header, RingSlot
from specrs.engine.engine import Engine

from engine.harness import VOCAB, Bank, make_engine, request, run


def serve(engine: Engine, *jobs: object) -> None:
    for job in jobs:
        engine.add_request(job)
    run(engine)


@pytest.mark.parametrize("k", [0, 4])
def test_every_eos_id_of_the_checkpoint_stops(any_bank: Bank, k: int) -> None:
    seen = set()
    engine = make_engine(any_bank.target, any_bank.drafts["close"], dtype=any_bank.dtype, k=4)
    jobs = [request(i, prompt, k=k, max_tokens=40, engine_k=4) for i, prompt in enumerate(any_bank.prompts)]
    serve(engine, *jobs)
    for index, job in enumerate(jobs):
        assert job.output_token_ids == any_bank.expected(index, 40)
        if job.finish_reason == "stop":
            seen.add(job.output_token_ids[-1])
            assert job.stop_reason is None
    assert seen == set(any_bank.eos)


@pytest.mark.parametrize("k", [0, 4])
def test_a_stop_token_id_ends_the_request_and_is_named(any_bank: Bank, k: int) -> None:
    continuation = any_bank.continuations[4]
    stop = continuation[9]
    engine = make_engine(any_bank.target, any_bank.drafts["close"], dtype=any_bank.dtype, k=4)
    job = request(0, any_bank.prompts[4], k=k, max_tokens=40, engine_k=4, stop_token_ids=[stop], ignore_eos=True)
    serve(engine, job)
    assert job.output_token_ids == continuation[: continuation.index(stop) + 1]
    assert (job.finish_reason, job.stop_reason) == ("stop", stop)


@functools.cache
def at_least_12(target: Path, prompt: tuple[int, ...], eos: tuple[int, ...]) -> list[int]:
    """Return the tokens that transformers generates with `min_new_tokens=12`."""
    return generate(load(target), list(prompt), 30, eos=list(eos), min_new_tokens=12)


@pytest.mark.parametrize("k", [0, 1, 5])
def test_min_tokens_masks_the_stop_ids_as_transformers_does(bank: Bank, k: int) -> None:
    stopped = 0
    for prompt in bank.prompts[:8]:
        expected = at_least_12(bank.target, tuple(prompt), tuple(bank.eos))
        engine = make_engine(bank.target, bank.drafts["close"], k=5)
        job = request(0, prompt, k=k, max_tokens=30, engine_k=5, min_tokens=12)
        serve(engine, job)
        assert job.output_token_ids == expected
        stopped += bank.expected(bank.prompts.index(prompt), 12) != expected[:12]
    assert stopped, "no prompt would have stopped early: the mask was never needed"


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_short_limits(any_bank: Bank, max_tokens: int) -> None:
    engine = make_engine(any_bank.target, any_bank.drafts["close"], dtype=any_bank.dtype, k=6)
    job = request(0, any_bank.prompts[5], k=6, max_tokens=max_tokens, engine_k=6, ignore_eos=True)
    serve(engine, job)
    assert job.output_token_ids == any_bank.continuations[5][:max_tokens]
    assert job.finish_reason == "length"
    assert job.acceptance.draft_tokens <= max(0, max_tokens - 2), "the last token needs no draft"


@pytest.mark.parametrize("depth", [1, 2])
def test_the_context_is_the_limit_when_max_tokens_is_none(any_bank: Bank, depth: int) -> None:
    engine = make_engine(
        any_bank.target,
        any_bank.drafts["close"],
        dtype=any_bank.dtype,
        k=5,
        max_model_len=80,
        max_steps_in_flight=depth,
    )
    job = request(0, any_bank.prompts[5], k=5, max_tokens=None, engine_k=5, ignore_eos=True)
    serve(engine, job)
    assert job.output_token_ids == any_bank.continuations[5][: 80 - len(any_bank.prompts[5])]
    assert job.finish_reason == "length"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_outgrows_the_drafts_context_goes_on_without_drafts(any_bank: Bank, depth: int) -> None:
    engine = make_engine(
        any_bank.target, any_bank.target, dtype=any_bank.dtype, k=4, max_steps_in_flight=depth, draft_max_model_len=60
    )
    long = request(0, any_bank.prompts[4], k=4, max_tokens=40, engine_k=4, ignore_eos=True)
    short = request(1, any_bank.prompts[1], k=4, max_tokens=40, engine_k=4, ignore_eos=True)
    serve(engine, long, short)
    assert long.output_token_ids == any_bank.continuations[4]
    assert short.output_token_ids == any_bank.continuations[1]
    # 48 prompt tokens: drafts of the long one end at position 60, those of the short one do not.
    assert 0 < long.acceptance.draft_tokens < 16 < short.acceptance.draft_tokens
    assert long.acceptance.accepted_tokens == long.acceptance.draft_tokens


@pytest.mark.parametrize("draft_vocab", [VOCAB - 2, VOCAB + 13])
def test_vocabularies_padded_differently(bank: Bank, draft_vocab: int, tmp_path: Path) -> None:
    # Ids that only one model knows: the smaller draft cannot look them up, the larger one must not propose them.
    draft = make_checkpoint(tmp_path, seed=9, vocab=draft_vocab, hidden=32, layers=1, kv_heads=1, head_dim=16)
    engine = make_engine(bank.target, draft, k=3)
    prompt = [VOCAB - 1, VOCAB - 2, *bank.prompts[4]]
    job = request(0, prompt, k=3, max_tokens=30, engine_k=3, ignore_eos=True)
    serve(engine, job)
    assert job.output_token_ids == generate(load(bank.target), prompt, 30)
    assert job.acceptance.drafts > 0


def test_more_important_requests_go_first(any_bank: Bank) -> None:
    engine = make_engine(any_bank.target, None, dtype=any_bank.dtype, k=0, max_num_seqs=1)
    jobs = [request(i, any_bank.prompts[i], k=None, max_tokens=4, engine_k=0) for i in range(4)]
    for job, priority in zip(jobs, [1, 0, -1, 0], strict=True):
        job.priority = priority
        engine.add_request(job)
    order = []
    while engine.has_unfinished():
        order += [job.request_id for job in engine.step() if job.finished]
    assert order == [2, 1, 3, 0]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_hit_shares_target_and_draft_blocks(any_bank: Bank, depth: int) -> None:
    engine = make_engine(any_bank.target, any_bank.target, dtype=any_bank.dtype, k=4, max_steps_in_flight=depth)
    first = request(0, any_bank.prompts[5], k=4, max_tokens=20, engine_k=4, ignore_eos=True)
    serve(engine, first)
    passes = engine.stats().draft_passes
    second = request(1, any_bank.prompts[5], k=4, max_tokens=20, engine_k=4, ignore_eos=True)
    serve(engine, second)
    assert second.num_cached_tokens == (len(any_bank.prompts[5]) - 1) // 16 * 16
    assert first.output_token_ids == second.output_token_ids == any_bank.continuations[5][:20]
    assert second.acceptance.acceptance_rate == 1.0, "the shared draft KV is the draft's own"
    assert engine.stats().draft_passes - passes <= passes


def test_other_salts_share_nothing(any_bank: Bank) -> None:
    engine = make_engine(any_bank.target, None, dtype=any_bank.dtype, k=0)
    for i, salt in enumerate(["a", "b", "a"]):
        job = request(i, any_bank.prompts[5], k=None, max_tokens=4, engine_k=0)
        job.cache_salt = salt
        serve(engine, job)
        assert (job.num_cached_tokens > 0) == (i == 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_cached_tokens_are_those_of_the_first_admission(any_bank: Bank, depth: int) -> None:
    """Check that cached tokens are counted at the first admission. A preempted request finds its own 42 tokens again,
    but the cache was cold."""
    engine = make_engine(
        any_bank.target, any_bank.drafts["close"], dtype=any_bank.dtype, k=3, max_steps_in_flight=depth
    )
    prompt = any_bank.prompts[5][:42]
    job = request(0, prompt, k=3, max_tokens=20, engine_k=3, ignore_eos=True)
    found: list[int] = []

    def watch(slot: RingSlot, header: Header, ms: float) -> None:
        found.extend(slot.record_arrays["admit_num_cached"][: header.num_admitted].tolist())

    engine.watch = watch
    engine.add_request(job)
    while len(job.output_token_ids) < 8:
        engine.step()
    engine.scheduler.preempt(0)
    run(engine)
    assert found[0] == 0 < found[1], "it did find its own blocks"
    assert job.num_cached_tokens == engine.stats().num_cached_tokens == 0
    again = request(1, prompt, k=3, max_tokens=4, engine_k=3)
    serve(engine, again)
    assert again.num_cached_tokens == engine.stats().num_cached_tokens == 32
    assert engine.stats().num_cached_tokens <= engine.stats().prompt_tokens
