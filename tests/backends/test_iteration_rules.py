"""The rules of docs/start.md as one table: what an iteration drafts, emits and leaves, written by hand.

The reference, a step on a CPU, the Triton kernels, and the Rust scheduler, which plans and settles the same iteration,
are all checked against it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
import torch
from models.native_models import table_model
from models.native_passes import over_tensors
from numpy.typing import NDArray
from specrs import core
from specrs.backends.cpu.row_state import RowState
from specrs.backends.cpu.runner import CpuRunner
from specrs.backends.cuda.row_state import RowState as TensorRowState
from specrs.backends.cuda.slots import Results
from specrs.backends.extras import ExtrasLookup, RequestExtras, no_extras
from specrs.backends.ring import RingSlot
from specrs.core import CachedDrafter, Scheduler
from specrs.drafters.cpu import CpuDrafter
from specrs.kernels.cuda.update import Decided, update_rows
from specrs.reference.drafting import ModelDrafter
from specrs.reference.step import ReferenceRunner
from specrs.structured.matcher import GrammarMatcher

from kernels.cuda import row_states, test_prepare

MAX_LEN, MAX_K, BLOCK_SIZE = 40, row_states.MAX_K, row_states.BLOCK_SIZE
STOP, OTHER, START, UNKNOWN, DRAFT, VOCAB = 7, 50, 1, 0, 20, 64
NONE, ENDS_BY_STOP, LENGTH, ERROR = core.FINISH_NONE, core.FINISH_STOP, core.FINISH_LENGTH, core.FINISH_ERROR


@dataclass(frozen=True)
class Case:
    """A row before an iteration, and what verification finds."""

    # The row, the K planned for it, and the bounds.
    n: int
    k: int
    limit: int = MAX_LEN
    context: int = MAX_LEN  # the draft's
    draft_len: int | None = None  # n - 1
    capacity: int = MAX_LEN
    min_len: int = 0
    active: bool = True
    # What verification says: m of the drafts, the one token of the m + 1 or after them that is a stop token.
    m: int = 0
    stop: int | None = None
    not_finite: int | None = None  # the row whose logits are not
    empty: int | None = None  # the row in which no token is allowed
    # Expected.
    k_r: int = 0
    emitted: int = 1
    n_after: int = 0
    draft_len_after: int = 0
    reason: int = NONE
    accepted: int | None = None  # as reported; m

    @property
    def planned_by_the_host(self) -> bool:
        """True if the scheduler plans such an iteration: draft KV is caught up, there are blocks for all drafts, and
        the row is live."""
        return self.draft_len is None and self.capacity == MAX_LEN and self.active

    @property
    def tokens(self) -> list[int]:
        return [STOP if i == self.stop else OTHER + i for i in range(self.k + 1)]


TABLE = {
    "all accepted": Case(10, 4, m=4, k_r=4, emitted=5, n_after=15, draft_len_after=13),
    "some accepted": Case(10, 4, m=2, k_r=4, emitted=3, n_after=13, draft_len_after=12),
    "all but one accepted": Case(10, 4, m=3, k_r=4, emitted=4, n_after=14, draft_len_after=13),
    "none accepted": Case(10, 4, k_r=4, n_after=11, draft_len_after=10),
    "one draft, accepted": Case(10, 1, m=1, k_r=1, emitted=2, n_after=12, draft_len_after=10),
    "one draft, rejected": Case(10, 1, k_r=1, n_after=11, draft_len_after=10),
    "no drafts": Case(10, 0, n_after=11, draft_len_after=9),
    "no drafts, draft KV far behind": Case(10, 0, draft_len=3, n_after=11, draft_len_after=3),
    "lag of 2": Case(10, 4, draft_len=8, m=4, k_r=4, emitted=5, n_after=15, draft_len_after=13),
    "lag of 3": Case(10, 4, draft_len=7, n_after=11, draft_len_after=7),
    "two tokens, no draft KV": Case(2, 3, draft_len=0, m=1, k_r=3, emitted=2, n_after=4, draft_len_after=3),
    "limit: 3 left, all accepted": Case(
        10, 5, limit=13, m=2, k_r=2, emitted=3, n_after=13, draft_len_after=11, reason=LENGTH
    ),
    "limit: 3 left, some accepted": Case(10, 5, limit=13, m=1, k_r=2, emitted=2, n_after=12, draft_len_after=11),
    "limit: 2 left": Case(10, 5, limit=12, m=1, k_r=1, emitted=2, n_after=12, draft_len_after=10, reason=LENGTH),
    "limit: 1 left": Case(10, 5, limit=11, n_after=11, draft_len_after=9, reason=LENGTH),
    "limit: K + 1 left": Case(10, 5, limit=16, m=5, k_r=5, emitted=6, n_after=16, draft_len_after=14, reason=LENGTH),
    "draft context: 2 positions left": Case(10, 5, context=12, m=3, k_r=3, emitted=4, n_after=14, draft_len_after=12),
    "draft context: full": Case(12, 5, context=12, m=1, k_r=1, emitted=2, n_after=14, draft_len_after=12),
    "draft context: 1 beyond": Case(13, 5, context=12, n_after=14, draft_len_after=12),
    "draft context: far beyond": Case(30, 5, context=12, draft_len=12, n_after=31, draft_len_after=12),
    "limit before the draft context": Case(
        10, 5, limit=12, context=12, k_r=1, m=1, emitted=2, n_after=12, draft_len_after=10, reason=LENGTH
    ),
    "draft context before the limit": Case(
        10, 5, limit=15, context=11, k_r=2, m=2, emitted=3, n_after=13, draft_len_after=11
    ),
    "stop: the first token": Case(
        10, 4, m=4, stop=0, k_r=4, emitted=1, n_after=11, draft_len_after=10, reason=ENDS_BY_STOP
    ),
    "stop: the last draft": Case(
        10, 4, m=4, stop=3, k_r=4, emitted=4, n_after=14, draft_len_after=13, reason=ENDS_BY_STOP
    ),
    "stop: the token after the drafts": Case(
        10, 4, m=4, stop=4, k_r=4, emitted=5, n_after=15, draft_len_after=13, reason=ENDS_BY_STOP
    ),
    "stop: after what is emitted": Case(10, 4, m=1, stop=2, k_r=4, emitted=2, n_after=12, draft_len_after=11),
    "stop: before min_len": Case(10, 4, m=4, stop=1, min_len=12, k_r=4, emitted=5, n_after=15, draft_len_after=13),
    "stop: at min_len": Case(
        10, 4, m=4, stop=2, min_len=12, k_r=4, emitted=3, n_after=13, draft_len_after=12, reason=ENDS_BY_STOP
    ),
    "stop: at the limit": Case(
        10, 5, limit=13, m=2, stop=2, k_r=2, emitted=3, n_after=13, draft_len_after=11, reason=ENDS_BY_STOP
    ),
    "stop: without drafts": Case(10, 0, stop=0, n_after=11, draft_len_after=9, reason=ENDS_BY_STOP),
    "blocks for all drafts": Case(10, 4, capacity=14, m=4, k_r=4, emitted=5, n_after=15, draft_len_after=13),
    "blocks for fewer": Case(10, 4, capacity=13, m=4, k_r=4, emitted=0, n_after=10, draft_len_after=9, reason=ERROR),
    "not finite: the last row": Case(
        10, 4, m=4, not_finite=4, k_r=4, emitted=0, n_after=10, draft_len_after=9, reason=ERROR
    ),
    "not finite: the row of the first rejected": Case(
        10, 4, m=2, not_finite=2, k_r=4, emitted=0, n_after=10, draft_len_after=9, reason=ERROR
    ),
    "not finite: a row that is not reached": Case(
        10, 4, m=2, not_finite=3, k_r=4, emitted=3, n_after=13, draft_len_after=12
    ),
    "no token allowed: the first row": Case(
        10, 4, m=4, empty=0, k_r=4, emitted=0, n_after=10, draft_len_after=9, reason=ERROR
    ),
    "no token allowed: without drafts": Case(10, 0, empty=0, emitted=0, n_after=10, draft_len_after=9, reason=ERROR),
    "no token allowed: a later row": Case(
        10, 4, m=4, empty=2, k_r=4, emitted=2, n_after=12, draft_len_after=11, accepted=1
    ),
    "no token allowed: the last row": Case(
        10, 4, m=4, empty=4, k_r=4, emitted=4, n_after=14, draft_len_after=13, accepted=3
    ),
    "no token allowed: a row that is not reached": Case(
        10, 4, m=1, empty=2, k_r=4, emitted=2, n_after=12, draft_len_after=11
    ),
    "no token allowed before a row that is not finite": Case(
        10, 4, m=4, empty=1, not_finite=2, k_r=4, emitted=1, n_after=11, draft_len_after=10, accepted=0
    ),
    "no token allowed after a row that is not finite": Case(
        10, 4, m=4, empty=2, not_finite=1, k_r=4, emitted=0, n_after=10, draft_len_after=9, reason=ERROR
    ),
    "ended before": Case(10, 4, active=False, emitted=0, n_after=10, draft_len_after=9),
}
ANY = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in TABLE.items()])


def row_state(case: Case) -> TensorRowState:
    state = TensorRowState.allocate(1, MAX_LEN, BLOCK_SIZE, torch.device("cpu"))
    state.num_tokens[0] = case.n
    state.draft_len[0] = case.n - 1 if case.draft_len is None else case.draft_len
    state.limit[0], state.min_len[0], state.active[0] = case.limit, case.min_len, case.active
    state.stop_ids[0, 1] = STOP
    return state


def results() -> Results:
    return Results(*(torch.full((1,), -5) for _ in range(5)), torch.full((1, MAX_K + 1), -5))


@dataclass(frozen=True)
class After:
    """Expected row after an iteration."""

    tokens: list[int]
    draft_len: int
    active: bool

    @classmethod
    def of(cls, state: TensorRowState | RowState) -> After:
        tokens = state.tokens[0, : int(state.num_tokens[0])].tolist()
        return cls(tokens, int(state.draft_len[0]), bool(state.active[0]))


def check(case: Case, k_r: int, after: After, reported: Results, drafts: list[int]) -> None:
    """Check the row and its results after an iteration. `drafts`: the drafts that the row had before verification."""
    assert k_r == case.k_r
    assert len(after.tokens) == case.n_after
    assert after.draft_len == case.draft_len_after
    assert after.active == (case.reason == NONE and case.active)
    assert int(reported.num_emitted) == case.emitted
    assert reported.tokens[0, : case.emitted].tolist() == case.tokens[: case.emitted]
    assert after.tokens[case.n :] == case.tokens[: case.emitted]
    counted = case.active and case.reason != ERROR
    assert int(reported.num_drafted) == (case.k_r if counted else 0)
    accepted = case.m if case.accepted is None else case.accepted
    assert int(reported.num_accepted) == (accepted if counted else 0)
    assert int(reported.finish_reason) == (case.reason if counted else NONE)
    if counted:
        assert reported.tokens[0, accepted + 1 : k_r + 1].tolist() == drafts[accepted:k_r]


def drafts_of(case: Case, state: TensorRowState) -> list[int]:
    """Put made-up drafts in the row and return them. The case says how many are accepted, whatever they are."""
    drafts = [DRAFT + i for i in range(case.k)]
    state.tokens[0, case.n : case.n + case.k] = torch.tensor(drafts)
    return drafts


@ANY
def test_triton(case: Case) -> None:
    state, reported = row_state(case), results()
    drafts = drafts_of(case, state)
    out = test_prepare.run(row_states.Case(state, [0], [case.k], [case.capacity], case.context, 1, case.k + 1))
    k_r = int(out["k"][0])
    top, allowed_top = torch.full((2, case.k + 1), 1.0)
    if case.not_finite is not None:
        top[case.not_finite] = allowed_top[case.not_finite] = torch.nan
    if case.empty is not None:
        allowed_top[case.empty] = -torch.inf
    decided = Decided(
        torch.tensor([case.m]),
        torch.tensor([case.tokens]),
        top,
        torch.ones(MAX_K, 1)[: case.k],
        1,  # unfed drafts of a draft model: the last one
        allowed_top=None if case.empty is None else allowed_top,
    )
    update_rows(state, test_prepare.sequences_of(out), decided, reported)
    check(case, k_r, After.of(state), reported, drafts)


class Exhausted:
    """A grammar that allows every token up to a number of drafts, and none after that."""

    def __init__(self, after: int) -> None:
        self.after, self.num_accepted = after, 0

    def fill_mask(self, out: NDArray[np.int32]) -> None:
        out.fill(0 if self.num_accepted == self.after else -1)

    def accept(self, token: int) -> bool:
        self.num_accepted += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        self.num_accepted -= num_tokens

    def __call__(self, request_id: int) -> RequestExtras:
        return RequestExtras(cast(GrammarMatcher, self))


class Step:
    """Runs a case as a whole step: the target writes the case's tokens in turn, and the draft model the first m of
    them.

    After the accepted drafts each draft is one that the target does not write.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.num_blocks = case, -(-MAX_LEN // BLOCK_SIZE)
        known = case.m if case.empty is None else min(case.m, case.empty)  # a mask without tokens holds for drafts too
        self.drafts = [*case.tokens[:known], *[UNKNOWN] * (case.k - known)]
        broken = None if case.not_finite is None else [START, *self.drafts][case.not_finite]
        self.target = table_model(dict(itertools.pairwise([START, *case.tokens])), VOCAB, not_finite=broken)
        self.draft = table_model(dict(itertools.pairwise([START, *case.tokens[:known]])), VOCAB)
        self.caches = [model.allocate_cache(self.num_blocks, BLOCK_SIZE) for model in (self.target, self.draft)]
        self.extras: ExtrasLookup = no_extras if case.empty is None else Exhausted(case.empty)
        self.scheduler = Scheduler(
            max_num_seqs=1,
            max_model_len=MAX_LEN,
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=2 * MAX_LEN,
            num_speculative_tokens=MAX_K,
            drafter=CachedDrafter(max_model_len=case.context, max_draft_lag=2),
        )
        self.slot = RingSlot(self.scheduler, MAX_K)

    def run(self, runner: CpuRunner | ReferenceRunner, end: Callable[[], None]) -> None:
        """Admit the row in a step, call `end` if the case's row has ended, and run the iteration."""
        case, record = self.case, self.slot.record_arrays
        values, steps = core.RequestSampling(temperature=0.0, has_extras=case.empty is not None).columns("float32")
        admitted = {
            "num_tokens": case.n,
            "prompt_len": 1,
            "draft_len": case.n - 1 if case.draft_len is None else case.draft_len,
            "limit": case.limit,
            "min_len": case.min_len,
            "steps": steps,
            "logprobs": core.LOGPROBS_NONE,
            "prompt_logprobs": core.LOGPROBS_NONE,
        }
        for name, value in admitted.items():
            record[f"admit_{name}"][0] = value
        record["admit_params"][: len(values)] = np.array(values).view(np.int64)
        record["admit_stop_ids"][: core.MAX_STOP_IDS] = [-1, STOP, *[-1] * (core.MAX_STOP_IDS - 2)]
        record["upload_token"][case.n - 1] = START
        record["block_index"][: self.num_blocks] = record["block_id"][: self.num_blocks] = range(self.num_blocks)
        self._execute(runner, num_admitted=1, num_upload_tokens=case.n, num_block_updates=self.num_blocks)
        if not case.active:
            end()
        self.slot.results[:] = -5
        for name, value in {"k": case.k, "capacity": case.capacity, "n_upper": case.n}.items():
            record[f"seq_{name}"][0] = value
        self._execute(runner, num_decode=1, max_k=case.k)

    def _execute(self, runner: CpuRunner | ReferenceRunner, **header: int) -> None:
        self.slot.record_arrays["header"][: len(core.HEADER_FIELDS)] = [header.get(x, 0) for x in core.HEADER_FIELDS]
        runner.execute(self.slot, self.slot.header())

    @property
    def reported(self) -> Results:
        """Return the row's results."""
        sections = {name: torch.from_numpy(array) for name, array in self.slot.results_arrays.items()}
        return Results.of(sections, MAX_K).narrow(0, 1)

    def check(self, after: After) -> None:
        """Check the row and the results."""
        counted = self.case.active and self.case.reason != ERROR
        k_r = int(self.reported.num_drafted) if counted else self.case.k_r
        check(self.case, k_r, after, self.reported, self.drafts)


def run_reference(case: Case) -> tuple[Step, After]:
    step = Step(case)
    target, draft = over_tensors(step.target), over_tensors(step.draft)
    drafter, tables = ModelDrafter(draft, step.caches[1], VOCAB, case.context), torch.zeros(1, 1, step.num_blocks)
    runner = ReferenceRunner(target, step.caches[0], drafter, tables.long(), rule="rejection")
    runner.extras = step.extras
    step.run(runner, lambda: setattr(runner.rows[0], "active", False))
    row = runner.rows[0]
    return step, After(row.tokens, row.draft_len, row.active)


@ANY
def test_reference(case: Case) -> None:
    step, after = run_reference(case)
    step.check(after)


@ANY
def test_native(case: Case) -> None:
    step, state = Step(case), RowState.allocate(1, MAX_LEN, BLOCK_SIZE)
    runner = CpuRunner(
        step.scheduler,
        step.target,
        step.caches[0],
        CpuDrafter(model=step.draft, kv_cache=step.caches[1]),
        state,
        pool=None,
        rule="rejection",
        logprobs_mode="raw_logprobs",
    )
    runner.use_extras(step.extras)
    step.run(runner, lambda: state.active.fill(False))
    step.check(After.of(state))


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in TABLE.items() if case.planned_by_the_host]
)
def test_rust(case: Case) -> None:
    """Check that the Rust scheduler plans the row's iteration, and settles the results that the reference reports.

    With `max_draft_lag` = 1 the next plan shows the draft length that it knows: a chunk closes the lag up to n' - 1.
    """
    scheduler = Scheduler(
        max_num_seqs=1,
        max_model_len=MAX_LEN,
        num_blocks=MAX_LEN,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=2 * MAX_LEN,
        num_speculative_tokens=MAX_K,
        drafter=CachedDrafter(max_model_len=case.context, max_draft_lag=1),
    )
    prompt = np.arange(case.n - 1)
    scheduler.add_request(
        3,
        prompt,
        limit=case.limit,
        min_tokens=max(case.min_len - len(prompt), 0),
        num_speculative_tokens=case.k,
        stop_token_ids=np.array([STOP]),
    )
    buffers = [np.zeros(size, np.int64) for size in (scheduler.record_size, scheduler.results_size)]
    settled = np.zeros(scheduler.settled_size, np.int64)
    record, reports = (
        {name: buffer[start : start + length] for name, (start, length) in layout.items()}
        for buffer, layout in zip(buffers, (scheduler.record_layout(), scheduler.results_layout()), strict=True)
    )

    def settle(reported: Results) -> tuple[int, int]:
        """Settle a step with `reported` as the results of sequence 0. Return the number of new tokens, and the finish
        reason."""
        for name, values in zip(Results.__slots__, reported.tensors(), strict=True):
            reports[name][: values.numel()] = values.flatten().numpy()
        scheduler.settle(int(record["header"][core.HEADER_FIELDS.index("step_id")]), buffers[1], settled)
        layout = scheduler.settled_layout()
        return int(settled[layout["num_new"][0]]), int(settled[layout["finish_reason"][0]])

    def plan() -> int:
        assert scheduler.plan(buffers[0]) == core.PLAN_STEP
        scheduler.check_integrity()
        return int(record["seq_k"][0])

    # The prompt, whose last chunk emits the n-th token.
    assert plan() == 0
    one, nothing = torch.tensor([1]), torch.tensor([0])
    assert settle(Results(one, nothing, nothing, nothing, nothing, torch.full((1, MAX_K + 1), OTHER))) == (1, NONE)

    assert plan() == case.k_r, "what the device would draft, so that no verification row is idle"
    assert record["seq_n_upper"][0] == case.n
    assert record["seq_capacity"][0] >= min(case.n + case.k_r, case.limit)
    step, after = run_reference(case)
    assert settle(step.reported) == (case.emitted, case.reason)
    assert scheduler.has_unfinished() == after.active
    statistics = scheduler.acceptance()
    counted = case.k_r > 0 and case.reason != ERROR
    assert (statistics.drafts, statistics.draft_tokens) == ((1, case.k_r) if counted else (0, 0))
    accepted = case.m if case.accepted is None else case.accepted
    assert statistics.accepted_tokens == (accepted if counted else 0)
    if case.reason != NONE:
        return

    left = min(case.k, case.limit - case.n_after - 1, case.context - case.n_after + 1)
    assert plan() == max(left, 0)
    assert record["seq_n_upper"][0] == case.n_after
    lag = case.n_after - 1 - case.draft_len_after
    if case.k_r and left > 0:
        chunks = int(record["header"][core.HEADER_FIELDS.index("num_draft_chunks")])
        assert chunks == (lag > 0)
        if lag:
            chunk = [int(record[f"draft_chunk_{name}"][0]) for name in ("row", "start", "len")]
            assert chunk == [0, case.draft_len_after, lag]
