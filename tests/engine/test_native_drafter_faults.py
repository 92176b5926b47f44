"""A native drafter whose own passes fail costs the drafts of its step, as one that raises in Python does.

The failure is real: the drafter's KV cache has fewer blocks than the target's, which each of its passes checks.
"""

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cpu.runner import CpuRunner
from specrs.backends.ring import Header, RingSlot
from specrs.core import DRAFTER_DEVICE, FLAG_DRAFT_NON_FINITE
from specrs.drafters.cpu import CpuDrafter
from specrs.models.native_cache import NativeKVCache, native_cache
from sweep import sweep

from engine.harness import Bank, greedy_jobs, request, run, run_greedy
from engine.test_drafter_faults import DRAFTERS, Drafts, Engine, make_engine, watch_integrity
from engine.test_drafter_faults import drafts as drafts
from engine.test_equivalence import engine_settings


def shorten(patch: pytest.MonkeyPatch, blocks: int) -> None:
    """Give drafters of engines made from now on KV caches of `blocks` blocks."""
    source = CpuRunner._draft_source

    def short(runner: CpuRunner, drafter: CpuDrafter) -> Any:
        decoder, _ = source(runner, drafter)
        return decoder, first_blocks(drafter.kv_cache, blocks)

    patch.setattr(CpuRunner, "_draft_source", short)


def first_blocks(cache: NativeKVCache, count: int) -> Any:
    """Return the first `count` blocks of the cache in the same memory. The scratch block is the next one; native passes
    do not use it."""
    return native_cache([layer[: count + 1] for layer in cache.layers])


def count_faults(engine: Engine, patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that fills with the numbers of steps whose drafter failed."""
    failed: list[int] = []
    execute = engine.runner.execute

    def executed(slot: RingSlot, header: Header) -> None:
        execute(slot, header)
        if slot.draft_fault is not None:
            failed.append(header.step_id)

    patch.setattr(engine.runner, "execute", executed)
    return failed


def engine_of(drafts: Drafts, name: str, k: int, blocks: int, **fields: Any) -> tuple[Bank, Engine]:
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch, blocks)
        return make_engine(drafts, name, "float32", k, **fields)


@pytest.mark.parametrize("name", DRAFTERS)
@sweep(8)
@given(data=st.data())
def test_any_step_may_fail(name: str, data: st.DataObject, drafts: Drafts) -> None:
    """Check that any pass of a drafter may fail: after prompts, in catch-up, or at the draft that needs a missing
    block."""
    fields = data.draw(engine_settings(), label="engine")
    k = data.draw(st.integers(1, 6), label="K")
    size = fields.get("block_size", 16)
    most = max(8 * 128 // size, 1)
    blocks = data.draw(st.integers(0, most // 2), label="blocks of the drafter")
    bank, engine = engine_of(drafts, name, k, blocks, **fields)
    flags = watch_integrity(engine)
    with pytest.MonkeyPatch.context() as patch:
        failed = count_faults(engine, patch)
        run_greedy(engine, bank, data.draw(greedy_jobs(bank, k), label="requests"), k)
    assert sum(engine.stats().draft_errors.values()) == len(failed)
    assert not any(flag & FLAG_DRAFT_NON_FINITE for flag in flags)


@pytest.mark.parametrize("name", DRAFTERS)
def test_one_that_always_fails_is_left_alone(name: str, drafts: Drafts, caplog: pytest.LogCaptureFixture) -> None:
    bank, engine = engine_of(drafts, name, 3, 0, block_size=8)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        failed = count_faults(engine, patch)
        jobs = [request(i, bank.prompts[i], k=None, max_tokens=40, engine_k=3, ignore_eos=True) for i in range(6)]
        for job in jobs:
            engine.add_request(job)
        run(engine)
    assert [job.output_token_ids for job in jobs] == [text[:40] for text in bank.continuations[:6]]
    assert engine.scheduler.acceptance_of(DRAFTER_DEVICE).drafts == 0
    assert 0 < len(failed) <= 1 + engine.scheduler.num_steps.bit_length()
    assert len(failed) == sum(engine.stats().draft_errors.values())
    (logged,) = [record.getMessage() for record in caplog.records if "went on without drafts" in record.getMessage()]
    assert "InvalidBufferError" in logged
    assert "slots[" in logged or "num_blocks" in logged


def test_a_target_that_fails_still_ends_the_step(drafts: Drafts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a failing target ends the step's requests: only failures of the drafter are tolerated."""
    source = CpuRunner._source

    def short(runner: CpuRunner, model: Any, kv_cache: NativeKVCache) -> Any:
        decoder, _ = source(runner, model, kv_cache)
        return decoder, first_blocks(kv_cache, 0)

    monkeypatch.setattr(CpuRunner, "_source", short)
    bank, engine = make_engine(drafts, "draft_model", "float32", 3, block_size=8)
    job = request(0, bank.prompts[4], k=None, max_tokens=4, engine_k=3, ignore_eos=True)
    engine.add_request(job)
    with pytest.raises(Exception, match=r"slots\[0\]"):
        engine.step()
    assert job.finished
    assert not any(engine.stats().draft_errors.values())
