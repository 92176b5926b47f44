"""Hidden states kept by row and gathered, and draft logits spread to the target's ids: against references, into
poisoned memory."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cuda.hidden_rows import HiddenRows
from specrs.backends.cuda.slots import Results
from specrs.kernels.cuda.hidden_states import (
    Kept,
    gather_states,
    gather_states_reference,
    keep_states,
    keep_states_reference,
)
from specrs.kernels.cuda.spread_logits import spread_logits, spread_logits_reference
from specrs.kernels.cuda.update import Decided, update_reference, update_rows
from sweep import sweep

from kernels.cuda.row_states import MAX_K, Case, cases, planned, sequence_tensors
from kernels.cuda.test_update import copy as copy_state

LAYERS, HIDDEN = 2, 3


def kept_rows(data: st.DataObject, case: Case) -> HiddenRows:
    """Draw rows with hidden states of some positions before their last one."""
    rows, width = case.state.num_tokens.shape[0], MAX_K + data.draw(st.integers(1, 4))
    hidden = HiddenRows.allocate(rows - 1, width, LAYERS, HIDDEN, torch.float32, torch.device("cpu"))
    hidden.states.copy_(torch.randn(hidden.states.shape))
    for row in range(rows - 1):
        hidden.start[row] = max(0, int(case.state.num_tokens[row]) - 1 - data.draw(st.integers(0, width)))
    return hidden


def copy(hidden: HiddenRows) -> HiddenRows:
    return HiddenRows(*(getattr(hidden, name).clone() for name in HiddenRows.__slots__))


@sweep(40)
@given(st.data())
def test_gather(data: st.DataObject) -> None:
    case = data.draw(cases())
    hidden, rows = kept_rows(data, case), torch.tensor(case.rows)
    column = torch.arange(hidden.width)
    positions = hidden.start[rows][:, None] + column
    positions[(positions >= case.state.num_tokens[rows][:, None] - 1) | (torch.rand(positions.shape) < 0.2)] = -1
    out, expected = torch.full((2, positions.numel(), LAYERS * HIDDEN), torch.nan)
    gather_states(hidden, rows, positions.view(-1), out)
    gather_states_reference(hidden, rows, positions.view(-1), expected)
    assert out.equal(expected)


@sweep(80)
@given(st.data())
def test_keep(data: st.DataObject) -> None:
    """Check what `update_rows` keeps after an iteration, also for prompts that end."""
    case = data.draw(cases())
    is_prompt = case.planned[0] == 0 and data.draw(st.booleans())
    sequences, total, width = planned(case), sum(case.planned) + case.count, case.planned[0] + 1
    rows, states = sequence_tensors(case, sequences), torch.randn(total, LAYERS, HIDDEN)
    decided = Decided(
        (torch.rand(case.batch) * (MAX_K + 1)).long(),
        torch.ones(case.batch, width, dtype=torch.int64),
        torch.ones(total + 4),
        torch.ones(MAX_K, case.batch)[: width - 1],
        1,
        False,
        (torch.rand(case.batch) < 0.3).long(),
    )
    mine, theirs, state = kept_rows(data, case), copy_state(case.state), case.state
    expected = copy(mine)
    for hidden, own, update in ((mine, state, update_rows), (expected, theirs, update_reference)):
        numbers = (torch.zeros(case.batch, dtype=torch.int64) for _ in range(5))
        reported = Results(*numbers, torch.zeros(case.batch, MAX_K + 1).long())
        kept = Kept(*(torch.zeros(case.batch, dtype=torch.int64) for _ in range(2)))
        update(own, rows, decided, reported, (hidden, kept, is_prompt))
        if update is update_rows:
            keep_states(states, rows.q_start, rows.row, kept, hidden, width)
        else:
            keep_states_reference(states, rows.q_start, rows.row, kept, hidden)
    assert mine.start[:-1].equal(expected.start[:-1])
    assert mine.states[:-1, :-1].equal(expected.states[:-1, :-1]), "the last column is scratch, the last row padding"


@sweep(30)
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
