"""The end of an iteration: the kernel against the CPU loop's, row state and results, value for value."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.core import FLAG_DRAFT_NON_FINITE
from specrs.kernels.cuda.row_state import Entries
from specrs.kernels.cuda.update import Decided, update_rows
from specrs.reference.accept import Verdict, update
from specrs.reference.iteration import Drafted, prepare
from specrs.runner.cuda.row_state import RowState
from specrs.runner.cuda.slots import Results
from torch import Tensor

from kernels.cuda.row_states import BLOCK_SIZE, MAX_K, Case, Drafter, cases


def copy(state: RowState) -> RowState:
    return RowState(*(getattr(state, name).clone() for name in RowState.__slots__))


def results(batch: int) -> Results:
    values = [torch.full((batch,), -5) for _ in range(5)]
    return Results(*values, torch.full((batch, MAX_K + 1), -5))


@settings(max_examples=150)
@given(
    cases(),
    st.integers(0, 2**31),
    st.sampled_from((0.0, 0.1, 0.4)),
    st.sampled_from((None, 0, 1, MAX_K)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_update(
    case: Case, seed: int, faults: float, num_unfed: int | None, keeps: bool, mixes: bool, masks: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def chance(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    mine, theirs, width = copy(case.state), copy(case.state), case.planned[0] + 1
    it = prepare(
        theirs,
        torch.tensor(case.rows),
        case.planned,
        torch.tensor(case.capacity),
        block_size=BLOCK_SIZE,
        max_context=1000,
        drafter=Drafter(case.draft_context),
    )
    # Stop ids of the row among the tokens, now and then.
    tokens = torch.randint(1, 90, (case.count, width), generator=generator)
    tokens = torch.where(chance(case.count, width) < 0.2, theirs.stop_ids[it.rows, :1], tokens)
    accepted = (chance(case.count) * (it.num_drafts + 1)).floor().long().clamp(max=it.num_drafts)
    top = torch.where(chance(sum(case.planned) + case.count) < faults, torch.nan, 1.0)
    allowed_top = torch.where(chance(len(top)) < faults, -torch.inf, top) if masks else None
    draft_top = torch.where(chance(MAX_K, case.batch) < faults, torch.inf, 1.0)[: width - 1]
    column = torch.arange(width - 1)
    broken = (~draft_top[:, : case.count].T.isfinite() & (column < it.num_drafts[:, None])).any(dim=1)
    on_host = chance(case.count) < 0.5 if mixes else None
    if on_host is not None:
        broken &= ~on_host

    expected = results(case.count)
    unfed: int | Tensor | None = num_unfed
    if num_unfed is not None and not keeps:
        unfed = it.num_drafts + num_unfed
    drafted = Drafted(broken * FLAG_DRAFT_NON_FINITE, None, unfed, on_host)
    update(theirs, it, Verdict(accepted, tokens, top, top[:, None], allowed_top), drafted, expected)

    def padded(values: Tensor, fill: int) -> Tensor:
        return torch.cat((values.long(), torch.full((case.batch - case.count,), fill)))

    reported = results(case.batch)
    emitted = torch.full((case.batch, MAX_K + 1), 88)[:, :width]
    emitted[: case.count] = tokens
    entries = Entries(
        row=padded(it.rows, theirs.num_tokens.shape[0] - 1),
        n=padded(it.num_tokens, 0),
        k=padded(it.num_drafts, 0),
        alive=padded(it.alive, 0),
        capacity=padded(it.capacity, 0),
        q_start=torch.cat((it.flat.q_start, torch.full((case.batch - case.count,), int(it.flat.q_start[-1])))),
    )
    spare = torch.full((4,), torch.nan)
    decided = Decided(
        padded(accepted, 3),
        emitted,
        torch.cat((top, spare)),
        draft_top,
        num_unfed,
        keeps,
        None if on_host is None else padded(on_host, 1),
        None if allowed_top is None else torch.cat((allowed_top, spare)),
    )
    update_rows(mine, entries, decided, reported)
    for name in RowState.__slots__:
        ours, reference = getattr(mine, name), getattr(theirs, name)
        if name == "tokens":  # the last column is the CPU's scratch
            ours, reference = ours[:, :-1], reference[:, :-1]
        assert ours.equal(reference), name
    for ours, reference in zip(reported.tensors(), expected.tensors(), strict=True):
        assert ours[: case.count].equal(reference)
    for ours in reported.tensors():
        assert (ours[case.count :] == -5).all(), "padding reports nothing"
