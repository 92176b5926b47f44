"""Engines whose steps run on the reference (plain torch): they write the same texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cpu.runner import CpuRunner
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from sweep import sweep

from engine.conftest import FAMILIES
from engine.harness import Bank, greedy_jobs, make_engine, poison, run, run_greedy
from engine.reference_runner import on_reference
from engine.test_equivalence import engine_settings
from engine.test_sampling import SAMPLED, sampled


@sweep(18)
@given(data=st.data())
def test_greedy_text(data: st.DataObject, request_bank: dict[str, Bank], head_bank: Bank) -> None:
    """Check greedy text: in float64 that of transformers, with native passes to the bit theirs without drafts."""
    banks = {**{name: request_bank[name] for name in FAMILIES}, "head_bank": head_bank}
    name = data.draw(st.sampled_from(sorted(banks)), label="bank")
    bank, fields = banks[name], data.draw(engine_settings(), label="engine")
    k = data.draw(st.integers(0, 5), label="K")
    draft = bank.drafts[data.draw(st.sampled_from(sorted(bank.drafts)), label="draft")]
    method = "eagle3" if name == "head_bank" else "draft_model"
    engine = make_engine(bank.target, draft, k=k, dtype=bank.dtype, method=method, **fields)
    poison(engine)
    runner = on_reference(engine)
    run_greedy(engine, bank, data.draw(greedy_jobs(bank, k), label="requests"), k)
    assert runner.num_steps > 0


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_sampled_text_is_that_of_a_cpu(rule: str, native_qwen_bank: Bank) -> None:
    """Check sampled text and log probabilities against the CPU runner, with all constraints on logits, drafts, and too
    few blocks."""
    bank = native_qwen_bank

    def texts(use: Callable[[Engine], object]) -> list[Request]:
        engine = make_engine(
            bank.target,
            bank.drafts["close"],
            k=3,
            dtype=bank.dtype,
            rule=rule,
            block_size=8,
            num_gpu_blocks_override=18,
        )
        use(engine)
        made = []
        for i, params in enumerate(SAMPLED):
            made.append(sampled(i, bank.prompts[i], 100 + i, None, 3, max_tokens=24, logprobs=2, **params))
            engine.add_request(made[-1])
            engine.step()
        run(engine)
        assert engine.stats().accepted_tokens > 0
        return made

    expected = texts(lambda engine: isinstance(engine.runner, CpuRunner))
    for mine, theirs in zip(texts(on_reference), expected, strict=True):
        assert mine.output_token_ids == theirs.output_token_ids
        assert repr(mine.acceptance) == repr(theirs.acceptance)
        assert mine.logprobs is not None
        assert theirs.logprobs is not None
        for own, other in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert own.rank == other.rank
            assert own.logprob == pytest.approx(other.logprob)
