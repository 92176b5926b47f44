"""The law of docs/start.md as one table: what an iteration drafts, emits and leaves behind, by hand.

PyTorch, the Triton kernels, the native launch and the Rust scheduler, which plans and settles the same iteration, are
all held to it.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from models.native_models import table_model
from specrs import core
from specrs.core import CachedDrafter, Scheduler
from specrs.drafters.cpu import CpuDrafter
from specrs.drafters.draft_model import DraftModel
from specrs.kernels.cuda.update import Decided, update_rows
from specrs.reference.accept import Verdict, update
from specrs.reference.iteration import Drafted, prepare
from specrs.runner.cpu import CpuRunner
from specrs.runner.cuda.row_state import RowState as TensorRowState
from specrs.runner.cuda.slots import Results
from specrs.runner.ring import RingSlot
from specrs.runner.row_state import RowState

from kernels.cuda import row_states, test_prepare

MAX_LEN, MAX_K, BLOCK_SIZE = 40, row_states.MAX_K, row_states.BLOCK_SIZE
STOP, OTHER, START, UNKNOWN, DRAFT, VOCAB = 7, 50, 1, 0, 20, 64
NONE, ENDS_BY_STOP, LENGTH, ERROR = core.FINISH_NONE, core.FINISH_STOP, core.FINISH_LENGTH, core.FINISH_ERROR


@dataclass(frozen=True)
class Case:
    """A row before an iteration, what verification says of it, and the row behind it."""

    # The row, the K planned for it, and the bounds.
    n: int
    k: int
    limit: int = MAX_LEN
    context: int = MAX_LEN  # the draft's
    draft_len: int | None = None  # n - 1
    capacity: int = MAX_LEN
    min_len: int = 0
    active: bool = True
    # What verification says: m of the drafts, the one token of the m + 1 or behind that is a stop token.
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
        """Whether the scheduler plans such an iteration: with draft KV caught up, blocks for all drafts, a live row."""
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
    "stop: the token behind the drafts": Case(
        10, 4, m=4, stop=4, k_r=4, emitted=5, n_after=15, draft_len_after=13, reason=ENDS_BY_STOP
    ),
    "stop: behind what is emitted": Case(10, 4, m=1, stop=2, k_r=4, emitted=2, n_after=12, draft_len_after=11),
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


def verdict(case: Case) -> Verdict:
    top, allowed_top = torch.full((2, case.k + 1), 1.0)
    if case.not_finite is not None:
        top[case.not_finite] = allowed_top[case.not_finite] = torch.nan
    if case.empty is not None:
        allowed_top[case.empty] = -torch.inf
    masked = None if case.empty is None else allowed_top
    return Verdict(torch.tensor([case.m]), torch.tensor([case.tokens]), top, top[:, None], masked)


def check(case: Case, k_r: int, state: TensorRowState, reported: Results, drafts: list[int]) -> None:
    """`drafts`: those that the row had before verification."""
    assert k_r == case.k_r
    assert int(state.num_tokens[0]) == case.n_after
    assert int(state.draft_len[0]) == case.draft_len_after
    assert bool(state.active[0]) == (case.reason == NONE and case.active)
    assert int(reported.num_emitted) == case.emitted
    assert reported.tokens[0, : case.emitted].tolist() == case.tokens[: case.emitted]
    assert state.tokens[0, case.n : case.n_after].tolist() == case.tokens[: case.emitted]
    counted = case.active and case.reason != ERROR
    assert int(reported.num_drafted) == (case.k_r if counted else 0)
    accepted = case.m if case.accepted is None else case.accepted
    assert int(reported.num_accepted) == (accepted if counted else 0)
    assert int(reported.finish_reason) == (case.reason if counted else NONE)
    if counted:
        assert reported.tokens[0, accepted + 1 : k_r + 1].tolist() == drafts[accepted:k_r]


def drafts_of(case: Case, state: TensorRowState) -> list[int]:
    """Made up, in the row. Verification says how many stand, whatever they are."""
    drafts = [DRAFT + i for i in range(case.k)]
    state.tokens[0, case.n : case.n + case.k] = torch.tensor(drafts)
    return drafts


def run_torch(case: Case) -> tuple[int, TensorRowState, Results, list[int]]:
    state, reported = row_state(case), results()
    drafts = drafts_of(case, state)
    it = prepare(
        state,
        torch.tensor([0]),
        [case.k],
        torch.tensor([case.capacity]),
        block_size=BLOCK_SIZE,
        max_context=MAX_LEN,
        drafter=row_states.Drafter(case.context),
    )
    k_r = int(it.num_drafts[0])
    update(
        state,
        it,
        verdict(case),
        Drafted(torch.zeros(1, dtype=torch.int64), None, DraftModel.num_unfed_drafts),
        reported,
    )
    return k_r, state, reported, drafts


@ANY
def test_torch(case: Case) -> None:
    check(case, *run_torch(case))


@ANY
def test_triton(case: Case) -> None:
    state, reported = row_state(case), results()
    drafts = drafts_of(case, state)
    out = test_prepare.run(row_states.Case(state, [0], [case.k], [case.capacity], case.context, 1, case.k + 1))
    k_r = int(out["k"][0])
    said = verdict(case)
    decided = Decided(
        said.num_accepted,
        said.tokens,
        said.top,
        torch.ones(MAX_K, 1)[: case.k],
        DraftModel.num_unfed_drafts,
        allowed_top=said.allowed_top,
    )
    update_rows(state, test_prepare.entries_of(out), decided, reported)
    check(case, k_r, state, reported, drafts)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in TABLE.items() if case.empty is None])
def test_native(case: Case) -> None:
    """A whole launch, without masks. The target writes the case's tokens in turn, the draft the first m of them."""
    chain = dict(itertools.pairwise([START, *case.tokens]))
    drafted = dict(itertools.pairwise([START, *case.tokens[: case.m]]))
    # What each row is fed: behind the accepted drafts those that the draft makes of a token that it does not know.
    fed = [START, *case.tokens[: case.m], *[UNKNOWN] * (case.k - case.m)]
    broken = None if case.not_finite is None else fed[case.not_finite]
    blocks = -(-MAX_LEN // BLOCK_SIZE)
    scheduler = Scheduler(
        max_num_seqs=1,
        max_model_len=MAX_LEN,
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=2 * MAX_LEN,
        num_speculative_tokens=MAX_K,
        drafter=CachedDrafter(max_model_len=case.context, max_draft_lag=2),
    )
    target, draft = table_model(chain, VOCAB, not_finite=broken), table_model(drafted, VOCAB)
    caches = [model.allocate_cache(blocks, BLOCK_SIZE) for model in (target, draft)]
    given, slot = row_state(case), RingSlot(scheduler, MAX_K)
    given.block_table[0] = torch.arange(blocks)
    given.tokens[0, case.n - 1] = START
    state = RowState.allocate(1, MAX_LEN, BLOCK_SIZE)
    for name, array in state.arrays().items():
        if hasattr(given, name):
            array[...] = getattr(given, name).numpy().reshape(array.shape)
    runner = CpuRunner(
        scheduler,
        target,
        caches[0],
        CpuDrafter(model=draft, kv_cache=caches[1]),
        state,
        pool=None,
        rule="rejection",
        logprobs_mode="raw_logprobs",
    )
    slot.results[:] = -5
    for name, value in {"k": case.k, "capacity": case.capacity, "n_upper": case.n}.items():
        slot.record_arrays[f"entry_{name}"][0] = value
    slot.record[[core.HEADER_FIELDS.index(name) for name in ("num_decode", "max_k")]] = 1, case.k
    runner.launch(slot, slot.header())
    sections = {name: torch.from_numpy(array) for name, array in slot.results_arrays.items()}
    reported = Results.of(sections, MAX_K).narrow(0, 1)
    for name, array in state.arrays().items():
        if hasattr(given, name):
            getattr(given, name).copy_(torch.from_numpy(array).reshape(getattr(given, name).shape))
    counted = case.active and case.reason != ERROR
    # Behind the tokens that the target writes the draft knows but one, which every unknown token has.
    drafts = [*case.tokens[: case.m], *[UNKNOWN] * (case.k - case.m)]
    check(case, int(reported.num_drafted) if counted else case.k_r, given, reported, drafts)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in TABLE.items() if case.planned_by_the_host]
)
def test_rust(case: Case) -> None:
    """The scheduler plans the row's iteration, and settles what PyTorch reports of it.

    With `max_draft_lag` = 1 the next plan shows the draft length that it knows: a chunk closes the lag behind n' - 1.
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
        """`reported` of entry 0, to the scheduler; how many tokens are new, and the finish reason."""
        for name, values in zip(Results.__slots__, reported.tensors(), strict=True):
            reports[name][: values.numel()] = values.flatten().numpy()
        scheduler.settle(int(record["header"][core.HEADER_FIELDS.index("launch_id")]), buffers[1], settled)
        layout = scheduler.settled_layout()
        return int(settled[layout["num_new"][0]]), int(settled[layout["finish_reason"][0]])

    def plan() -> int:
        assert scheduler.plan(buffers[0]) == core.PLAN_LAUNCH
        scheduler.check_integrity()
        return int(record["entry_k"][0])

    # The prompt, whose last chunk emits the n-th token.
    assert plan() == 0
    one, nothing = torch.tensor([1]), torch.tensor([0])
    assert settle(Results(one, nothing, nothing, nothing, nothing, torch.full((1, MAX_K + 1), OTHER))) == (1, NONE)

    assert plan() == case.k_r, "what the device would draft, so that no verification row is idle"
    assert record["entry_n_upper"][0] == case.n
    assert record["entry_capacity"][0] >= min(case.n + case.k_r, case.limit)
    _, state, reported, _ = run_torch(case)
    assert settle(reported) == (case.emitted, case.reason)
    assert scheduler.has_unfinished() == bool(state.active[0])
    books = scheduler.acceptance()
    counted = case.k_r > 0 and case.reason != ERROR
    assert (books.drafts, books.draft_tokens) == ((1, case.k_r) if counted else (0, 0))
    accepted = case.m if case.accepted is None else case.accepted
    assert books.accepted_tokens == (accepted if counted else 0)
    if case.reason != NONE:
        return

    left = min(case.k, case.limit - case.n_after - 1, case.context - case.n_after + 1)
    assert plan() == max(left, 0)
    assert record["entry_n_upper"][0] == case.n_after
    lag = case.n_after - 1 - case.draft_len_after
    if case.k_r and left > 0:
        chunks = int(record["header"][core.HEADER_FIELDS.index("num_draft_chunks")])
        assert chunks == (lag > 0)
        if lag:
            chunk = [int(record[f"draft_chunk_{name}"][0]) for name in ("row", "start", "len")]
            assert chunk == [0, case.draft_len_after, lag]
