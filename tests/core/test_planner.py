"""SpeculationPlanner through Python, on its own and with a scheduler. Wrong input is rejected and changes nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from specrs import core

K = 3


def planner(rows: int = 4, draft_ms: float = 0.1, k: int = K) -> core.SpeculationPlanner:
    table = [[1.0 + draft_ms * i for i in range(k + 1)]] * 2
    costs = core.CostModel([1, 4], list(range(k + 1)), table)
    return core.SpeculationPlanner(max_num_seqs=rows, num_speculative_tokens=k, costs=costs)


def scheduler_for(*drafters: core.CachedDrafter | core.HostDrafter) -> core.Scheduler:
    return core.Scheduler(
        max_num_seqs=4,
        max_model_len=32,
        num_blocks=16,
        block_size=4,
        max_num_batched_tokens=16,
        num_speculative_tokens=K,
        drafter=drafters or None,
    )


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def decide(own: core.SpeculationPlanner, caps: NDArray[np.int64]) -> NDArray[np.int64]:
    ks = np.full(len(caps), -1)
    own.decide(np.arange(len(caps)), caps, np.zeros_like(caps), ks)
    return ks


def test_it_learns_which_draft_is_good() -> None:
    for accepted, most in ((K, K), (0, 0)):
        own, chosen = planner(), []
        for _ in range(200):
            ks = decide(own, ints(K, K))
            own.settle(ints(0, 1), ks, ks, np.minimum(ks, accepted), 1.0 + 0.1 * int(ks.max()))
            chosen.append(ks.tolist())
        # The others are probes and trials.
        assert chosen[100:].count([most, most]) > 80
        assert (own.conditional_acceptance()[0] > 0.9) == (accepted > 0)


def test_its_costs_are_a_copy() -> None:
    own = planner()
    before = own.costs().table
    own.costs().observe(1, 1, 50.0, 1.0)
    assert own.costs().table == before
    own.settle(ints(0), ints(1), ints(1), ints(1), 50.0)
    assert own.costs().table == before, "the first step of a batch and K may compile or upload something"
    own.settle(ints(0), ints(1), ints(1), ints(1), 50.0)
    assert own.costs().table != before


def test_a_collapse_is_reported_once() -> None:
    own = planner()
    for accepted in itertools.chain([K] * 50, [0] * 12):
        ks = decide(own, ints(K))
        own.settle(ints(0), ks, ks, np.minimum(ks, accepted))
    assert own.take_collapsed() == [0]
    assert own.take_collapsed() == []


def test_an_empty_step_is_nothing() -> None:
    own = planner()
    assert decide(own, ints()).tolist() == []
    own.settle(ints(), ints(), ints(), ints(), 1.0)


@pytest.mark.parametrize("field", ["rows", "caps", "lags", "ks"])
def test_buffers_are_checked(field: str) -> None:
    own = planner()
    good = {"rows": ints(0, 1), "caps": ints(K, K), "lags": ints(0, 0), "ks": ints(7, 7)}
    wrong: list[object] = [good[field].astype(np.int32), [0, 1], np.zeros(4, dtype=np.int64)[::2], ints(0)]
    if field == "ks":
        frozen = ints(0, 0)
        frozen.setflags(write=False)
        wrong.append(frozen)
    else:
        wrong.append(ints(0, -1))
    for value in wrong:
        before = repr(own)
        with pytest.raises(core.InvalidBufferError, match=rf"\b{field}\b|elements: must be 1\b"):
            own.decide(**(good | {field: value}))  # type: ignore[arg-type]
        assert repr(own) == before
        assert good["ks"].tolist() == [7, 7]


def test_results_are_checked() -> None:
    own = planner()
    for arguments in (
        (ints(9), ints(1), ints(1), ints(1)),
        (ints(0), ints(K + 1), ints(1), ints(1)),
        (ints(0, 1), ints(1), ints(1), ints(1)),
    ):
        with pytest.raises(core.InvalidBufferError):
            own.settle(*arguments)
    for drafted, accepted in ((2, 0), (1, 2)):
        with pytest.raises(core.InvalidAcceptanceError):
            own.settle(ints(0), ints(1), ints(drafted), ints(accepted))
    for ms in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(core.InvalidBufferError, match="ms"):
            own.settle(ints(0), ints(1), ints(1), ints(1), ms)
    with pytest.raises(core.InvalidBufferError, match="rows=4"):
        own.reset(4)


def test_sizes_are_checked() -> None:
    costs = core.CostModel([1], [0, 1], [[1.0, 1.1]])
    good = {"max_num_seqs": 1, "num_speculative_tokens": 1, "costs": costs}
    for field, value in (
        ("max_num_seqs", 0),
        ("max_num_seqs", -1),
        ("num_speculative_tokens", 0),
        ("catch_up_ms", -1.0),
        ("catch_up_ms", float("nan")),
    ):
        with pytest.raises(core.InvalidConfigError, match=field):
            core.SpeculationPlanner(**(good | {field: value}))  # type: ignore[arg-type]


def test_a_planner_of_another_size_is_rejected_by_the_scheduler() -> None:
    scheduler = scheduler_for(core.CachedDrafter(max_model_len=32))
    scheduler.speculate(planner())
    for other in (planner(rows=5), planner(k=2)):
        with pytest.raises(core.InvalidConfigError, match=r"the scheduler's$"):
            scheduler.speculate(other)
    with pytest.raises(core.UnknownRequestError):
        scheduler.rebuild_draft(1)
    scheduler.check_integrity()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(0, 9)), min_size=1, max_size=4),
        max_size=40,
    ),
    st.floats(0.001, 2.0),
)
def test_any_stream_of_steps_stays_within_bounds(steps: list[list[tuple[int, int, int]]], draft_ms: float) -> None:
    own = planner(draft_ms=draft_ms)
    for step in steps:
        caps, lags, wanted = (ints(*column) for column in zip(*step, strict=True))
        ks = np.full(len(caps), -1)
        own.decide(np.arange(len(caps)), caps, lags, ks)
        assert ((ks >= 0) & (ks <= np.minimum(caps, K))).all()
        own.settle(np.arange(len(caps)), ks, ks, np.minimum(ks, wanted), 1.0 + float(ks.max()))
        assert all(0.0 < chance < 1.0 for chance in own.conditional_acceptance())


Step = tuple[list[tuple[int, ...]], int, int]
"""A settled step: for each sequence row, K, drafter, drafts verified, drafts accepted and flags; then the numbers of
prompt and draft chunks."""


@st.composite
def steps(draw: st.DrawFn) -> Step:
    sequences: list[tuple[int, ...]] = []
    for row in draw(st.lists(st.integers(0, 3), unique=True)):
        k = draw(st.integers(0, K))
        drafted = draw(st.integers(0, k))
        flags = core.FLAG_NOTHING_DRAFTED if k and not drafted and draw(st.booleans()) else 0
        kind = draw(st.sampled_from([core.DRAFTER_DEVICE, core.DRAFTERS.index("ngram")])) if k else core.DRAFTER_DEVICE
        sequences.append((row, k, kind, drafted, draw(st.integers(0, drafted)), flags))
    chunks = st.just(0) | st.integers(1, 2)
    return sequences, draw(chunks), draw(chunks)


@settings(max_examples=100, deadline=None)
@given(st.lists(steps(), max_size=4), st.booleans(), st.booleans(), st.floats(0.5, 9.0))
def test_a_scheduler_tells_what_settle_would(told: list[Step], on_device: bool, on_host: bool, ms: float) -> None:
    scheduler = scheduler_for(
        *[core.CachedDrafter(max_model_len=32)] * on_device, *[core.HostDrafter("ngram")] * on_host
    )
    by_scheduler, by_hand = planner(), planner()
    for sequences, num_prefill, num_draft_chunks in told:
        # What is not written holds anything.
        record, results = np.full(scheduler.record_size, 77), np.full(scheduler.results_size, 77)
        for field, value in (
            ("num_decode", len(sequences)),
            ("num_prefill", num_prefill),
            ("num_draft_chunks", num_draft_chunks),
        ):
            record[core.HEADER_FIELDS.index(field)] = value
        columns = ("seq_row", "seq_k", "seq_drafter"), ("num_drafted", "num_accepted", "flags")
        layouts = scheduler.record_layout(), scheduler.results_layout()
        for i, sequence in enumerate(sequences):
            for buffer, layout, names, values in zip(
                (record, results), layouts, columns, (sequence[:3], sequence[3:]), strict=True
            ):
                for name, value in zip(names, values, strict=True):
                    buffer[layout[name][0] + i] = value
        scheduler.tell(by_scheduler, record, results, ms)
        heard = [
            sequence for sequence in sequences if not (on_device and on_host) or sequence[2] == core.DRAFTER_DEVICE
        ]
        if sequences:
            rows, ks, _, drafted, accepted, flags = zip(*heard, strict=True) if heard else ((),) * 6
            counts = [
                1 if flag == core.FLAG_NOTHING_DRAFTED else count for count, flag in zip(drafted, flags, strict=True)
            ]
            timed = num_prefill == num_draft_chunks == 0 and len(heard) == len(sequences)
            by_hand.settle(ints(*rows), ints(*ks), ints(*counts), ints(*accepted), ms if timed else None)
        assert by_scheduler.conditional_acceptance() == by_hand.conditional_acceptance()
        assert by_scheduler.costs().table == by_hand.costs().table
        assert by_scheduler.take_collapsed() == by_hand.take_collapsed()
    for record_size, results_size in ((1, 0), (0, 1)):
        with pytest.raises(core.InvalidBufferError, match="elements"):
            scheduler.tell(
                by_scheduler,
                np.zeros(scheduler.record_size - record_size, dtype=np.int64),
                np.zeros(scheduler.results_size - results_size, dtype=np.int64),
            )
