"""Hidden states kept by row and gathered, and reduced logits spread: against the CPU loop's, into poisoned memory."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.kernels.cuda.hidden_states import Kept, gather_states, keep_states
from specrs.kernels.cuda.row_state import Entries
from specrs.kernels.cuda.spread_logits import spread_logits, spread_logits_reference
from specrs.kernels.cuda.update import Decided, update_rows
from specrs.reference.iteration import prepare
from specrs.runner.cuda.hidden_rows import HiddenRows
from specrs.runner.cuda.slots import Results
from torch import Tensor

from kernels.cuda.row_states import BLOCK_SIZE, MAX_K, Case, Drafter, cases

LAYERS, HIDDEN = 2, 3


def kept_rows(data: st.DataObject, case: Case) -> HiddenRows:
    """Rows with states of some positions before their last."""
    rows, width = case.state.num_tokens.shape[0], MAX_K + data.draw(st.integers(1, 4))
    hidden = HiddenRows.allocate(rows - 1, width, LAYERS, HIDDEN, torch.float32, torch.device("cpu"))
    hidden.states.copy_(torch.randn(hidden.states.shape))
    for row in range(rows - 1):
        hidden.start[row] = max(0, int(case.state.num_tokens[row]) - 1 - data.draw(st.integers(0, width)))
    return hidden


def copy(hidden: HiddenRows) -> HiddenRows:
    return HiddenRows(*(getattr(hidden, name).clone() for name in HiddenRows.__slots__))


@settings(max_examples=40)
@given(st.data())
def test_gather(data: st.DataObject) -> None:
    case = data.draw(cases())
    hidden, rows = kept_rows(data, case), torch.tensor(case.rows)
    column = torch.arange(hidden.width)
    positions = hidden.start[rows][:, None] + column
    positions[(positions >= case.state.num_tokens[rows][:, None] - 1) | (torch.rand(positions.shape) < 0.2)] = -1
    out = torch.full((positions.numel(), LAYERS * HIDDEN), torch.nan)
    gather_states(hidden, rows, positions.view(-1), out)
    assert out.view(-1, LAYERS, HIDDEN).equal(hidden.read(rows, positions).states)


@settings(max_examples=80)
@given(st.data())
def test_keep(data: st.DataObject) -> None:
    """Behind `update_rows`, which says what is kept; also of prompts that end."""
    case = data.draw(cases())
    is_prompt = case.planned[0] == 0 and data.draw(st.booleans())
    mine = kept_rows(data, case)
    theirs, state = copy(mine), case.state
    it = prepare(
        state,
        torch.tensor(case.rows),
        case.planned,
        torch.tensor(case.capacity),
        block_size=BLOCK_SIZE,
        max_context=1000,
        drafter=Drafter(case.draft_context),
    )
    count, total, width = case.count, sum(case.planned) + case.count, case.planned[0] + 1
    on_host = torch.rand(count) < 0.3
    entries = torch.randn(total, LAYERS, HIDDEN)
    accepted = (torch.rand(count) * (it.num_drafts + 1)).long().clamp(max=it.num_drafts)

    def padded(values: Tensor, fill: int) -> Tensor:
        return torch.cat((values.long(), torch.full((case.batch - count,), fill)))

    rows = Entries(
        row=padded(it.rows, state.num_tokens.shape[0] - 1),
        n=padded(it.num_tokens, 0),
        k=padded(it.num_drafts, 0),
        alive=padded(it.alive, 0),
        capacity=padded(it.capacity, 0),
        q_start=torch.cat((it.flat.q_start, torch.full((case.batch - count,), total))),
    )
    decided = Decided(
        padded(accepted, 0),
        torch.ones(case.batch, width, dtype=torch.int64),
        torch.ones(total + 4),
        torch.ones(MAX_K, case.batch)[: width - 1],
        1,
        False,
        padded(on_host, 1),
    )
    reported = Results(
        *(torch.zeros(case.batch, dtype=torch.int64) for _ in range(5)), torch.zeros(case.batch, 9).long()
    )
    kept = Kept(*(torch.full((case.batch,), -(2**30)) for _ in range(2)))
    before = it.num_tokens
    update_rows(state, rows, decided, reported, (mine, kept, is_prompt))
    keep_states(entries, rows.q_start, rows.row, kept, mine, width)
    if is_prompt:
        grew = state.num_tokens[it.rows] > before
        theirs.keep_last(it.rows[grew], (before - 1)[grew], entries[it.flat.q_start[:-1]][grew])
    else:
        theirs.keep_verified(state, it, entries, on_host)
    assert mine.start.equal(theirs.start)
    assert mine.states[:-1, :-1].equal(theirs.states[:-1, :-1]), "the last column is scratch, the last row padding"


@settings(max_examples=30)
@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 4), st.integers(0, 2**31))
def test_spread(own_ids: int, others: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = own_ids + others
    target_ids = torch.randperm(size, generator=generator)[:own_ids].sort().values
    source = torch.full((size,), -1).index_copy_(0, target_ids, torch.arange(own_ids))
    own = torch.randn(rows, own_ids + 3, generator=generator)[:, :own_ids]
    out, expected = torch.full((rows, size + 5), torch.nan)[:, :size], torch.empty(rows, size)
    spread_logits(own, source, out)
    spread_logits_reference(own, source, expected)
    assert out.equal(expected)
    assert out[:, target_ids].equal(own)


def test_several_tiles_are_spread() -> None:
    source = torch.full((20_000,), -1)
    source[::7] = torch.arange(len(source[::7]))
    own = torch.randn(2, len(source[::7]))
    out, expected = torch.full((2, 20_000), torch.nan), torch.empty(2, 20_000)
    spread_logits(own, source, out)
    spread_logits_reference(own, source, expected)
    assert out.equal(expected)
