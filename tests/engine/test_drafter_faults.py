"""A drafter that raises costs the drafts of its launch: texts, neighbours and books stay, and it is told once."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.core import DRAFTER_DEVICE, FLAG_DRAFT_NON_FINITE
from specrs.drafters.base import device_drafter
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.weights import load_weights
from specrs.runner.ring import Header, RingSlot
from sweep import sweep

from engine.faulty_drafter import Faulty
from engine.harness import Bank, config, greedy_jobs, poison, request, run, run_greedy
from engine.other_vocabulary import rename
from engine.parallel_draft import with_parallel_draft
from engine.test_equivalence import engine_settings

DRAFTERS: dict[str, dict[str, Any]] = {
    "draft_model": {},
    "parallel": {"parallel_drafting": True},
    "translated": {"use_heterogeneous_vocab": True},
    "eagle3": {"method": "eagle3"},
    "ngram,draft_model": {"method": "ngram,draft_model", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix,eagle3": {"method": "suffix,eagle3"},
}


@pytest.fixture(scope="module")
def drafts(qwen_bank: Bank, head_bank: Bank, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Bank, Path]]:
    """By drafter: a bank and the drafter's folder."""
    folder = tmp_path_factory.mktemp("faulty")
    parallel = with_parallel_draft(qwen_bank, folder / "parallel").drafts["parallel"]
    translated = rename(qwen_bank.drafts["close"], folder / "translated").path
    folders = {"parallel": parallel, "translated": translated}
    return {
        name: (head_bank, head_bank.drafts["fitted"])
        if "eagle3" in name
        else (qwen_bank, folders.get(name, qwen_bank.drafts["close"]))
        for name in DRAFTERS
    }


LOADED: dict[tuple[str, str], Any] = {}


def make_engine(drafts: dict[str, tuple[Bank, Path]], name: str, k: int, **fields: Any) -> tuple[Bank, Engine]:
    bank, draft = drafts[name]
    speculative = {"model": str(draft), "num_speculative_tokens": k} | DRAFTERS[name]
    made = replace(config(bank.target, draft, k=k, **fields), speculative_config=speculative)
    key = name, made.dtype
    if key not in LOADED:
        LOADED[key] = load_weights(made)
    return bank, build_engine(made, LOADED[key])


def watch_books(engine: Engine) -> list[int]:
    """Fills with the flags of all entries; behind every launch the books agree, and what row state calls valid KV of a
    draft model was written. (A head's is fed behind its launch.)"""
    seen: list[int] = []
    cache = device_drafter(engine.drafter).kv_cache

    def watch(slot: RingSlot, header: Header, ms: float) -> None:
        seen.extend(slot.results_arrays["flags"][: header.num_decode].tolist())
        engine.scheduler.check_integrity()
        state = engine.runner.state  # type: ignore[attr-defined]
        for request_id in () if engine.drafter.hidden_layers else engine.scheduler.request_ids():  # type: ignore[union-attr]
            row = engine.scheduler.request(request_id).row
            if row is None:
                continue
            positions = torch.arange(int(state.draft_len[row]))
            blocks = state.block_table[row, positions // cache.block_size]
            for keys in cache.k:
                assert keys[blocks, :, positions % cache.block_size].isfinite().all()

    engine.watch = watch
    return seen


@pytest.mark.parametrize("name", DRAFTERS)
@sweep(6)
@given(data=st.data())
def test_any_pass_may_raise(name: str, data: st.DataObject, drafts: dict[str, tuple[Bank, Path]]) -> None:
    """Its draft KV is not counted as written: nothing reads the NaN that it has left there."""
    fields = data.draw(engine_settings(), label="engine")
    if "," in name:
        fields["launch_depth"] = 1
    k = data.draw(st.integers(1, 6), label="K")
    bank, engine = make_engine(drafts, name, k, **fields)
    poison(engine)
    broken = data.draw(st.sets(st.integers(1, 40), min_size=1, max_size=6), label="passes that raise")
    flags = watch_books(engine)
    with pytest.MonkeyPatch.context() as patch:
        faulty = Faulty(engine, broken.__contains__, patch)
        run_greedy(engine, bank, data.draw(greedy_jobs(bank, k), label="requests"), k)
    stats = engine.stats()
    assert sum(stats.draft_errors.values()) == faulty.raised
    assert not any(flag & FLAG_DRAFT_NON_FINITE for flag in flags)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_go_on_behind_a_failure(
    name: str, depth: int, drafts: dict[str, tuple[Bank, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    """The launch that fails has none, later ones have theirs: as many as without it, but for a few."""
    accepted = []
    for broken in ({0}, {1}, {2}, {4, 5}):
        bank, engine = make_engine(drafts, name, 3, launch_depth=1 if "," in name else depth)
        poison(engine)
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
            faulty = Faulty(engine, broken.__contains__, patch)
            job = request(0, bank.prompts[5], k=None, max_tokens=40, engine_k=3, ignore_eos=True)
            engine.add_request(job)
            run(engine)
        assert job.output_token_ids == bank.continuations[5][:40]
        assert sum(engine.stats().draft_errors.values()) == faulty.raised == len(broken - {0})
        told = [record for record in caplog.records if "failed, and its launch went on" in record.getMessage()]
        assert len(told) == min(faulty.raised, 1)
        assert all("BrokenError" in record.getMessage() for record in told)
        accepted.append(engine.scheduler.acceptance_of(DRAFTER_DEVICE).drafts)
    assert min(accepted[1:]) > accepted[0] / 2 > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", DRAFTERS)
def test_one_that_always_raises_is_left_alone(name: str, depth: int, drafts: dict[str, tuple[Bank, Path]]) -> None:
    """It is tried more and more rarely: launches without drafts are planned as such."""
    bank, engine = make_engine(drafts, name, 3, launch_depth=1 if "," in name else depth)
    poison(engine)
    with pytest.MonkeyPatch.context() as patch:
        faulty = Faulty(engine, lambda call: True, patch)
        jobs = [request(i, bank.prompts[i], k=None, max_tokens=40, engine_k=3, ignore_eos=True) for i in range(6)]
        for job in jobs:
            engine.add_request(job)
        run(engine)
    assert [job.output_token_ids for job in jobs] == [text[:40] for text in bank.continuations[:6]]
    assert engine.scheduler.acceptance_of(DRAFTER_DEVICE).drafts == 0
    assert 0 < faulty.raised <= 1 + engine.scheduler.num_launches.bit_length()
    assert faulty.raised == sum(engine.stats().draft_errors.values())
    engine.reset_stats()
    assert not any(engine.stats().draft_errors.values())
