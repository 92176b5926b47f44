"""Greedy text equals transformers `generate`, for any K, batch, blocks, chunks, prefixes, preemption and depth.

This holds for torch passes in float64. With native passes in fp32 and bf16, text equals the engine's own text without
drafts.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cpu.callable_model import CallableModel
from specrs.drafters.draft_model import DRAFT_MODEL_LAG
from sweep import sweep

from engine.conftest import FAMILIES
from engine.harness import LONGEST, Bank, make_engine, poison, request, run


@st.composite
def engine_settings(draw: st.DrawFn) -> dict[str, object]:
    """Draw settings that change how the text is computed and must not change the text."""
    block_size = draw(st.sampled_from([8, 16, 32]))
    blocks_of_one = -(-128 // block_size)
    return {
        "block_size": block_size,
        "max_num_batched_tokens": draw(st.sampled_from([7, 64, 512])),
        "enable_prefix_caching": draw(st.booleans()),
        "max_num_seqs": draw(st.sampled_from([1, 3, 8])),
        "max_steps_in_flight": draw(st.sampled_from([1, 2])),
        # From a pool that one long request fills (so that others are preempted) to one that never runs short.
        "num_gpu_blocks_override": draw(
            st.sampled_from([blocks_of_one, blocks_of_one + 2, 2 * blocks_of_one, 8 * blocks_of_one])
        ),
    }


@pytest.mark.parametrize("family", FAMILIES)
@sweep(40)
@given(data=st.data())
def test_greedy_text(family: str, data: st.DataObject, request_bank: dict[str, Bank]) -> None:
    bank = request_bank[family]
    fields = data.draw(engine_settings(), label="engine")
    engine_k = data.draw(st.integers(0, 8), label="engine K")
    draft = data.draw(st.sampled_from(["close", "small", "equal"]), label="draft")
    engine = make_engine(bank.target, bank.drafts[draft], k=engine_k, dtype=bank.dtype, **fields)
    poison(engine)
    jobs = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, len(bank.prompts) - 1),
                st.one_of(st.none(), st.integers(0, engine_k)),  # K of the request
                st.integers(1, LONGEST),
                st.booleans(),  # ignore_eos
                st.integers(0, 5),  # steps before the next arrives
            ),
            min_size=1,
            max_size=10,
        ),
        label="requests",
    )
    requests = []
    for i, (prompt, k, max_tokens, ignore_eos, wait) in enumerate(jobs):
        job = request(i, bank.prompts[prompt], k=k, max_tokens=max_tokens, engine_k=engine_k, ignore_eos=ignore_eos)
        engine.add_request(job)
        requests.append((job, bank.expected(prompt, max_tokens, ignore_eos=ignore_eos)))
        for _ in range(wait):
            engine.step()
    run(engine)
    for job, expected in requests:
        assert job.output_token_ids == expected
        stopped = not job.params.ignore_eos and expected[-1] in bank.eos
        assert job.finish_reason == ("stop" if stopped else "length")
    stats = engine.stats()
    assert stats.drafts == sum(job.acceptance.drafts for job, _ in requests)
    assert stats.draft_tokens == sum(job.acceptance.draft_tokens for job, _ in requests)
    assert stats.accepted_tokens == sum(job.acceptance.accepted_tokens for job, _ in requests)


@pytest.mark.parametrize("k", range(1, 17))
def test_a_draft_equal_to_the_target_is_always_accepted(any_bank: Bank, k: int) -> None:
    engine = make_engine(any_bank.target, any_bank.target, k=k, dtype=any_bank.dtype)
    # 1 + 2 (K + 1) new tokens: one from the prefill, then whole iterations, so that the limit cuts no draft.
    job = request(0, any_bank.prompts[4], k=None, max_tokens=1 + 2 * (k + 1), engine_k=k, ignore_eos=True)
    engine.add_request(job)
    run(engine)
    assert engine.stats().acceptance_length == k + 1
    assert job.acceptance.acceptance_length == k + 1
    assert engine.stats().draft_passes == 2 * k + 1  # one catch-up chunk for the prompt


def test_a_batch_at_k_0_does_no_draft_work(any_bank: Bank) -> None:
    engine = make_engine(any_bank.target, any_bank.drafts["close"], k=5, dtype=any_bank.dtype)
    for i in range(6):
        engine.add_request(request(i, any_bank.prompts[i], k=0, max_tokens=20, engine_k=5))
    run(engine)
    assert engine.stats().draft_passes == 0
    assert engine.stats().drafts == 0


def test_requests_at_k_0_cost_no_draft_rows_in_a_mixed_batch(qwen_bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = qwen_bank
    engine = make_engine(bank.target, bank.drafts["close"], k=4, max_num_batched_tokens=512)
    rows, forward = [], CallableModel.forward

    def count_rows(own: CallableModel, inputs: dict[str, Any], *args: Any) -> Any:
        if own._model is engine.drafter.model:
            rows.append(len(inputs["positions"]))
        return forward(own, inputs, *args)

    monkeypatch.setattr(CallableModel, "forward", count_rows)
    engine.add_request(request(0, bank.prompts[4], k=4, max_tokens=30, engine_k=4, ignore_eos=True))
    for i in range(1, 6):
        engine.add_request(request(i, bank.prompts[i], k=0, max_tokens=30, engine_k=4, ignore_eos=True))
    run(engine)
    catch_up, *passes = rows
    assert catch_up == len(bank.prompts[4]) + 1 - DRAFT_MODEL_LAG
    assert set(passes) == {1, DRAFT_MODEL_LAG}
    # Two rows only where a token is left behind: by the catch-up, and where every draft was accepted.
    assert passes.count(DRAFT_MODEL_LAG) < engine.stats().drafts / 2
