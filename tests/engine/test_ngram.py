"""Prompt lookup through the engine: the text is that of K = 0 under every rule, and drafts are those of a script of ten
lines."""

import functools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import FinishReason, Request
from specrs.sampling import SamplingParams
from sweep import sweep

from engine import harness
from engine.conftest import FAMILIES
from engine.harness import Bank, greedy_jobs, poison, run, submit, weights

MAX_MODEL_LEN = 128


def make_engine(target: Path, *, k: int | str, sizes: tuple[int, int] = (1, 3), **fields: object) -> Engine:
    """Make an engine with prompt lookup on cached weights. torch computes in float64."""
    rule, dtype = fields.pop("rule", "rejection"), str(fields.pop("dtype", "float64"))
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": k,
        "prompt_lookup_min": sizes[0],
        "prompt_lookup_max": sizes[1],
        "rejection_sample_method": rule,
    }
    defaults: dict[str, object] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = EngineConfig(model=str(target), speculative_config=speculative, dtype=dtype, **(defaults | fields))
    return build_engine(config, Weights(weights(target, None, dtype).target, None))


def lookup(tokens: list[int], sizes: tuple[int, int], k: int) -> list[int]:
    """Return the drafts for `tokens`: what followed the last place of the longest n-gram that occurs before."""
    for n in range(sizes[1], sizes[0] - 1, -1):
        for place in range(len(tokens) - n - 1, -1, -1):
            if tokens[place : place + n] == tokens[-n:]:
                text = list(tokens)
                for i in range(k):
                    text.append(text[place + n + i])
                return text[len(tokens) :]
    return []


def script(prompt: list[int], text: list[int], sizes: tuple[int, int], k: int) -> list[tuple[int, int]]:
    """Return (drafts, accepted) of each iteration that drafts while `text` is written after `prompt`. The first token
    comes without drafts, and K leaves room for one token of the target."""
    done, counts = 1, []
    while done < len(text):
        drafts = lookup(prompt + text[:done], sizes, min(k, len(text) - done - 1))
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == text[done + accepted]:
            accepted += 1
        if drafts:
            counts.append((len(drafts), accepted))
        done += accepted + 1
    return counts


@pytest.mark.parametrize("family", FAMILIES)
@sweep(40)
@given(data=st.data())
def test_greedy_text_and_drafts(family: str, data: st.DataObject, request: pytest.FixtureRequest) -> None:
    """Check that texts are the bank's, and that drafts and acceptance equal those of a plain script, whatever other
    requests are in the batch."""
    bank: Bank = request.getfixturevalue(family)
    least = data.draw(st.integers(1, 4), label="prompt_lookup_min")
    sizes = (least, least + data.draw(st.integers(0, 3), label="more"))
    engine_k = data.draw(st.integers(0, 8), label="engine K")
    blocks_of_one = MAX_MODEL_LEN // 16
    engine = make_engine(
        bank.target,
        k=engine_k,
        sizes=sizes,
        dtype=bank.dtype,
        max_num_batched_tokens=data.draw(st.sampled_from([7, 64, 512])),
        enable_prefix_caching=data.draw(st.booleans()),
        max_num_seqs=data.draw(st.sampled_from([1, 3, 8])),
        num_gpu_blocks_override=data.draw(st.sampled_from([blocks_of_one, 2 * blocks_of_one, 8 * blocks_of_one])),
    )
    poison(engine)
    jobs = data.draw(greedy_jobs(bank, engine_k), label="requests")
    requests = submit(engine, bank, jobs, engine_k, ignore_eos=True)
    expected = [
        script(bank.prompts[which], bank.continuations[which][:max_tokens], sizes, engine_k if k is None else k)
        for which, k, max_tokens, _ in jobs
    ]
    run(engine)
    short_of_blocks = engine.stats().num_preemptions > 0
    for (which, _, max_tokens, _), job, counts in zip(jobs, requests, expected, strict=True):
        assert job.output_token_ids == bank.continuations[which][:max_tokens]
        # A row that is short of blocks drafts less, and one that was preempted gets its next token from its prefill.
        if not short_of_blocks and engine.scheduler.num_blocks == 8 * blocks_of_one:
            assert (job.acceptance.drafts, job.acceptance.draft_tokens, job.acceptance.accepted_tokens) == (
                len(counts),
                sum(k for k, _ in counts),
                sum(accepted for _, accepted in counts),
            )
    assert engine.stats().draft_passes == 0


def test_the_sample_has_drafts_that_stand_and_that_fall(qwen_bank: Bank) -> None:
    counts = [
        pair
        for prompt, text in zip(qwen_bank.prompts, qwen_bank.continuations, strict=True)
        for pair in script(prompt, text, (1, 3), 5)
    ]
    assert {accepted == k for k, accepted in counts} == {True, False}
    assert any(0 < accepted < k for k, accepted in counts)


SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.3, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 3, "repetition_penalty": 1.3},
    {"temperature": 0.8, "presence_penalty": 0.7, "logit_bias": {3: 6.0, 17: 6.0, 40: 6.0}},
    {"temperature": 0.9, "allowed_token_ids": [5, 9, 14], "min_tokens": 9},
    {"temperature": 0.0, "repetition_penalty": 1.2},
]


@functools.cache
def texts(
    target: Path, prompts: tuple[tuple[int, ...], ...], k: int, rule: str, dtype: str
) -> tuple[list[list[int]], int]:
    """Return the text of each prompt, sampled with the entries of `SAMPLED` in turn, and the number of accepted
    drafts."""
    engine = make_engine(target, k=k, sizes=(1, 2), rule=rule, dtype=dtype)
    jobs = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=30, detokenize=False, ignore_eos=True, **SAMPLED[i % len(SAMPLED)])  # type: ignore[arg-type]
        jobs.append(Request(i, list(prompt), params, num_speculative_tokens=k, seed=900 + i))
        engine.add_request(jobs[-1])
    run(engine)
    return [job.output_token_ids for job in jobs], engine.stats().accepted_tokens


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_sampled_text_is_that_of_k_0_under_both_rules(rule: str, either: Bank) -> None:
    """Check sampled text against K = 0 under both rules. With a point mass as q both rules draw the target's token in
    every row, so even `rejection` does not depend on K."""
    prompts = tuple(tuple(prompt) for prompt in either.prompts[:12])
    vanilla, none = texts(either.target, prompts, 0, "coupled", either.dtype)
    drafted, accepted = texts(either.target, prompts, 4, rule, either.dtype)
    assert drafted == vanilla
    assert (none, accepted > 0) == (0, True)


def test_auto_measures_and_plans(qwen_bank: Bank) -> None:
    """Check `auto` with prompt lookup: the engine has a planner, statistics count no drafts of the warm-up, and texts
    are those of K = 0."""
    engine = make_engine(qwen_bank.target, k="auto", max_num_seqs=4)
    assert engine.planner is not None
    assert engine.stats().drafts == 0
    k = engine.num_speculative_tokens
    jobs = [
        harness.request(i, qwen_bank.prompts[i], k=None, max_tokens=40, engine_k=k, ignore_eos=True) for i in range(8)
    ]
    for job in jobs:
        engine.add_request(job)
    run(engine)
    assert [job.output_token_ids for job in jobs] == [text[:40] for text in qwen_bank.continuations[:8]]


def test_a_target_that_is_not_finite_ends_the_request_and_no_other(either: Bank) -> None:
    engine = make_engine(either.target, k=4, dtype=either.dtype, enable_prefix_caching=False)
    first, second = (
        harness.request(i, either.prompts[i], k=None, max_tokens=30, engine_k=4, ignore_eos=True) for i in (4, 5)
    )
    engine.add_request(first)
    for _ in range(6):
        engine.step()
    block = int(engine.runner.state.block_table[0, 0])  # type: ignore[attr-defined]
    with torch.inference_mode():
        for tensor in engine.runner.kv_cache.v:
            tensor[block] = torch.nan
    engine.add_request(second)
    run(engine)
    assert first.finish_reason == FinishReason.ERROR
    assert second.output_token_ids == either.continuations[5][:30]
