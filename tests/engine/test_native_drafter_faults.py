"""A drafter that fails inside the native call costs the drafts of its launch, as one that raises elsewhere does.

What fails is real: its KV cache has fewer blocks than the target's, which each of its passes checks. Where a launch is
to fail, the cache is the first blocks of the whole one, in the same memory.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from specrs.core import DRAFTER_DEVICE, FLAG_DRAFT_NON_FINITE
from specrs.drafters.base import device_drafter
from specrs.engine.engine import Engine
from specrs.models.native_cache import NativeKVCache, native_cache
from specrs.runner.ring import Header, RingSlot
from sweep import sweep

from engine.harness import Bank, greedy_jobs, native_bank, poison, request, run, run_greedy
from engine.test_drafter_faults import DRAFTERS, make_engine, watch_books
from engine.test_drafter_faults import drafts as drafts
from engine.test_equivalence import engine_settings

NATIVE = [name for name in DRAFTERS if name != "translated"]


@pytest.fixture(scope="module")
def native_drafts(drafts: dict[str, tuple[Bank, Path]]) -> dict[str, tuple[Bank, Path]]:
    """The same with the texts of the native pass without drafts."""
    made = {bank.target: native_bank(bank, "float32") for bank, _ in drafts.values()}
    return {name: (made[bank.target], folder) for name, (bank, folder) in drafts.items()}


class Short:
    """In each launch the drafter's cache has as many blocks as `blocks` says of its number; None: all."""

    def __init__(self, engine: Engine, blocks: Callable[[int], int | None], patch: pytest.MonkeyPatch) -> None:
        self.launches = self.failed = 0
        runner, drafter = engine.runner, device_drafter(engine.drafter)
        assert runner.is_native
        whole, launch, cut_before = drafter.kv_cache, runner.launch, None
        admissions: list[NDArray[np.int64]] = []  # what the requests in the rows ask for

        def launched(slot: RingSlot, header: Header) -> None:
            nonlocal cut_before
            self.launches += 1
            cut = blocks(self.launches)
            if cut != cut_before:
                drafter.kv_cache = whole if cut is None else first_blocks(whole, cut)
                # So that the next launch reads what there is.
                runner._feed_behind_call(slot)
                runner._iteration = runner._make()
                for record in admissions:
                    runner._iteration.admit(record)
            cut_before = cut
            if header.num_admitted:
                admissions.append(slot.record.copy())
            launch(slot, header)
            self.failed += slot.draft_fault is not None

        patch.setattr(runner, "launch", launched)


def first_blocks(cache: NativeKVCache, count: int) -> NativeKVCache:
    """`count` blocks; the one behind is taken for the scratch block, which native passes do not use."""
    layers = [layer[: count + 1] for layer in cache.layers]
    return NativeKVCache(layers, cache.block_size, native_cache(layers))


def engine_of(native_drafts: dict[str, tuple[Bank, Path]], name: str, k: int, **fields: object) -> tuple[Bank, Engine]:
    if "," in name:
        fields["launch_depth"] = 1
    bank, engine = make_engine(native_drafts, name, k, dtype="float32", **fields)
    poison(engine)
    return bank, engine


@pytest.mark.parametrize("name", NATIVE)
@sweep(8)
@given(data=st.data())
def test_any_launch_may_fail(name: str, data: st.DataObject, native_drafts: dict[str, tuple[Bank, Path]]) -> None:
    """At any of its passes: behind prompts, catching up, or at the draft that needs a block that is not there."""
    fields = data.draw(engine_settings(), label="engine")
    k = data.draw(st.integers(1, 6), label="K")
    bank, engine = engine_of(native_drafts, name, k, **fields)
    blocks = engine.scheduler.num_blocks
    cut = st.lists(st.one_of(st.none(), st.integers(1, blocks)), min_size=1, max_size=6)
    cuts = data.draw(cut, label="blocks of the drafter, in turn")
    flags = watch_books(engine)
    with pytest.MonkeyPatch.context() as patch:
        short = Short(engine, lambda launch: cuts[launch // 3 % len(cuts)], patch)
        jobs = data.draw(greedy_jobs(bank, k), label="requests")
        reported = data.draw(st.sampled_from([{}, {"logprobs": 1}]), label="reported")
        run_greedy(engine, bank, jobs, k, **reported)
    assert sum(engine.stats().draft_errors.values()) == short.failed
    assert not any(flag & FLAG_DRAFT_NON_FINITE for flag in flags)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", NATIVE)
def test_drafts_go_on_behind_a_failure(
    name: str, depth: int, native_drafts: dict[str, tuple[Bank, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    """One launch fails, at each place in turn; it is counted and told, and all but a few drafts are made."""
    counted = set()
    for broken in range(1, 12):
        bank, engine = engine_of(native_drafts, name, 3, launch_depth=depth, block_size=8)
        flags = watch_books(engine)
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
            short = Short(engine, lambda launch, broken=broken: 1 if launch == broken else None, patch)  # type: ignore[misc]
            job = request(0, bank.prompts[4], k=None, max_tokens=40, engine_k=3, ignore_eos=True)
            engine.add_request(job)
            run(engine)
        assert job.output_token_ids == bank.continuations[4][:40]
        errors = sum(engine.stats().draft_errors.values())
        counted.add(errors)
        assert errors == short.failed <= 1
        told = [record.getMessage() for record in caplog.records if "went on without drafts" in record.getMessage()]
        assert len(told) == errors
        assert all(("InvalidBufferError" in said and "num_blocks" in said) or "slots[" in said for said in told)
        assert engine.scheduler.acceptance_of(DRAFTER_DEVICE).drafts > 4
        assert not any(flags)
    assert 1 in counted


@pytest.mark.parametrize("name", NATIVE)
def test_one_that_always_fails_is_left_alone(name: str, native_drafts: dict[str, tuple[Bank, Path]]) -> None:
    bank, engine = engine_of(native_drafts, name, 3, block_size=8)
    with pytest.MonkeyPatch.context() as patch:
        short = Short(engine, lambda launch: 0, patch)
        jobs = [request(i, bank.prompts[i], k=None, max_tokens=40, engine_k=3, ignore_eos=True) for i in range(6)]
        for job in jobs:
            engine.add_request(job)
        run(engine)
    assert [job.output_token_ids for job in jobs] == [text[:40] for text in bank.continuations[:6]]
    assert engine.scheduler.acceptance_of(DRAFTER_DEVICE).drafts == 0
    assert 0 < short.failed <= 1 + engine.scheduler.num_launches.bit_length()
    assert short.failed == sum(engine.stats().draft_errors.values())


def test_a_target_that_fails_still_ends_the_launch(native_drafts: dict[str, tuple[Bank, Path]]) -> None:
    """Only the drafter's failures are the drafter's."""
    bank, engine = engine_of(native_drafts, "draft_model", 3, block_size=8)
    runner = engine.runner
    assert runner.is_native
    runner.kv_cache = first_blocks(runner.kv_cache, 0)
    job = request(0, bank.prompts[4], k=None, max_tokens=4, engine_k=3, ignore_eos=True)
    engine.add_request(job)
    with pytest.raises(Exception, match=r"slots\[0\]"):
        engine.step()
    assert job.finished
    assert not any(engine.stats().draft_errors.values())
