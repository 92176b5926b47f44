"""A drafter that raises costs the drafts of its step: texts, neighbours and counts stay, and it is logged once."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.ring import Header, RingSlot
from specrs.core import DRAFTER_DEVICE, FLAG_DRAFT_NON_FINITE
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.weights import load_weights
from sweep import some, sweep

from engine.faulty_drafter import Faulty
from engine.harness import Bank, config, greedy_jobs, native_bank, poison, request, run, run_greedy
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
Drafts = dict[tuple[str, str], tuple[Bank, Path]]
"""Banks and drafter folders, by drafter and dtype. torch computes in float64, native passes in fp32."""


@pytest.fixture(scope="module")
def drafts(qwen_bank: Bank, head_bank: Bank, tmp_path_factory: pytest.TempPathFactory) -> Drafts:
    """Return the banks and drafters of every kind."""
    folder = tmp_path_factory.mktemp("faulty")
    parallel = with_parallel_draft(qwen_bank, folder / "parallel").drafts["parallel"]
    translated = rename(qwen_bank.drafts["close"], folder / "translated").path
    folders = {"parallel": parallel, "translated": translated}
    native = {bank.target: native_bank(bank, "float32") for bank in (qwen_bank, head_bank)}
    found = {}
    for name in DRAFTERS:
        bank = head_bank if "eagle3" in name else qwen_bank
        draft = bank.drafts["fitted"] if "eagle3" in name else folders.get(name, bank.drafts["close"])
        found |= {(name, "float64"): (bank, draft), (name, "float32"): (native[bank.target], draft)}
    return found


LOADED: dict[tuple[str, str], Any] = {}


def make_engine(drafts: Drafts, name: str, dtype: str, k: int, **fields: Any) -> tuple[Bank, Engine]:
    """Make an engine whose KV is NaN at first."""
    bank, draft = drafts[name, dtype]
    if "," in name:
        fields["max_steps_in_flight"] = 1
    speculative = {"model": str(draft), "num_speculative_tokens": k} | DRAFTERS[name]
    made = replace(config(bank.target, draft, k=k, dtype=dtype, **fields), speculative_config=speculative)
    if (name, dtype) not in LOADED:
        LOADED[name, dtype] = load_weights(made)
    engine = build_engine(made, LOADED[name, dtype])
    assert engine.runner.is_native == (dtype == "float32")
    poison(engine)
    return bank, engine


def watch_integrity(engine: Engine) -> list[int]:
    """Check after every step that the scheduler's invariants hold, and that draft KV counted as valid has been written.
    Return a list that fills with the error flags of decoding sequences.

    The KV of a head is not checked, because it is fed after its step.
    """
    seen: list[int] = []
    cache = engine.drafter.kv_cache
    has_head = hasattr(engine.drafter.model, "aux_layer_ids")

    def watch(slot: RingSlot, header: Header, ms: float) -> None:
        seen.extend(slot.results_arrays["flags"][: header.num_decode].tolist())
        engine.scheduler.check_integrity()
        state = engine.runner.state
        for request_id in () if has_head else engine.scheduler.request_ids():
            row = engine.scheduler.request(request_id).row
            if row is None:
                continue
            positions = np.arange(state.draft_len[row])
            blocks = state.block_table[row, positions // cache.block_size]
            for keys in cache.k:
                assert torch.as_tensor(keys)[blocks, :, positions % cache.block_size].isfinite().all()

    engine.watch = watch
    return seen


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", DRAFTERS)
@sweep(6)
@given(data=st.data())
def test_any_pass_may_raise(name: str, dtype: str, data: st.DataObject, drafts: Drafts) -> None:
    """Check that any pass of a drafter may raise: the draft KV of that step is not counted as written, so its NaN is
    never read."""
    fields = data.draw(engine_settings(), label="engine")
    k = data.draw(st.integers(1, 6), label="K")
    broken = data.draw(st.sets(st.integers(1, 40), min_size=1, max_size=6), label="passes that raise")
    with pytest.MonkeyPatch.context() as patch:
        faulty = Faulty(broken.__contains__, patch)
        bank, engine = make_engine(drafts, name, dtype, k, **fields)
    flags = watch_integrity(engine)
    reported = data.draw(st.sampled_from([{}, {"logprobs": 1}]), label="reported")
    run_greedy(engine, bank, data.draw(greedy_jobs(bank, k), label="requests"), k, **reported)
    stats = engine.stats()
    assert sum(stats.draft_errors.values()) == faulty.raised
    assert not any(flag & FLAG_DRAFT_NON_FINITE for flag in flags)


@pytest.mark.parametrize(("name", "dtype", "depth"), some(3, DRAFTERS, ["float64", "float32"], [1, 2]))
def test_drafts_go_on_after_a_failure(
    name: str, dtype: str, depth: int, drafts: Drafts, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that drafts go on after a pass has failed: there are more than half as many as without a failure, and it is
    logged once."""
    made = []
    for broken in ({0}, {1}, {2}, {4, 6}):
        with pytest.MonkeyPatch.context() as patch:
            faulty = Faulty(broken.__contains__, patch)
            bank, engine = make_engine(drafts, name, dtype, 3, max_steps_in_flight=depth)
        flags = watch_integrity(engine)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            job = request(0, bank.prompts[5], k=None, max_tokens=40, engine_k=3, ignore_eos=True)
            engine.add_request(job)
            run(engine)
        assert job.output_token_ids == bank.continuations[5][:40]
        assert sum(engine.stats().draft_errors.values()) == faulty.raised == len(broken - {0})
        logged = [record for record in caplog.records if "failed, and its step went on" in record.getMessage()]
        assert len(logged) == min(faulty.raised, 1)
        assert all("BrokenError" in record.getMessage() for record in logged)
        made.append(engine.scheduler.acceptance_of(DRAFTER_DEVICE).drafts)
        assert not any(flag & FLAG_DRAFT_NON_FINITE for flag in flags)
    assert min(made[1:]) > made[0] / 2 > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_one_that_always_raises_is_left_alone(name: str, dtype: str, depth: int, drafts: Drafts) -> None:
    """Check that a drafter that always raises is tried more and more rarely."""
    with pytest.MonkeyPatch.context() as patch:
        faulty = Faulty(lambda call: True, patch)
        bank, engine = make_engine(drafts, name, dtype, 3, max_steps_in_flight=depth)
    jobs = [request(i, bank.prompts[i], k=None, max_tokens=40, engine_k=3, ignore_eos=True) for i in range(6)]
    for job in jobs:
        engine.add_request(job)
    run(engine)
    assert [job.output_token_ids for job in jobs] == [text[:40] for text in bank.continuations[:6]]
    assert engine.scheduler.acceptance_of(DRAFTER_DEVICE).drafts == 0
    assert 0 < faulty.raised <= 1 + engine.scheduler.num_steps.bit_length()
    assert faulty.raised == sum(engine.stats().draft_errors.values())
    engine.reset_stats()
    assert not any(engine.stats().draft_errors.values())
