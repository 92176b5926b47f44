"""The end of an iteration: the kernel's row state and results against its reference, value for value."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cuda.row_state import RowState
from specrs.backends.cuda.slots import Results
from specrs.kernels.cuda.update import Decided, update_reference, update_rows
from sweep import sweep
from torch import Tensor

from kernels.cuda.row_states import MAX_K, Case, cases, planned, sequence_tensors


def copy(state: RowState) -> RowState:
    return RowState(*(getattr(state, name).clone() for name in RowState.__slots__))


def results(batch: int) -> Results:
    values = [torch.full((batch,), -5) for _ in range(5)]
    return Results(*values, torch.full((batch, MAX_K + 1), -5))


@sweep(150)
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
    sequences = planned(case)
    total = sum(case.planned) + case.count
    # Stop ids of the row among the tokens, now and then.
    tokens = torch.randint(1, 90, (case.batch, width), generator=generator)
    stop_ids = case.state.stop_ids[[*case.rows, *[0] * (case.batch - case.count)], :1]
    tokens = torch.where(chance(case.batch, width) < 0.2, stop_ids, tokens)
    accepted = (chance(case.batch) * (MAX_K + 2)).long()
    top = torch.where(chance(total + 4) < faults, torch.nan, 1.0)
    decided = Decided(
        accepted,
        tokens,
        top,
        torch.where(chance(MAX_K, case.batch) < faults, torch.inf, 1.0)[: width - 1],
        num_unfed,
        keeps,
        (chance(case.batch) < 0.5).long() if mixes else None,
        torch.where(chance(total + 4) < faults, -torch.inf, top) if masks else None,
    )
    reported, expected = results(case.batch), results(case.batch)
    update_reference(theirs, sequence_tensors(case, sequences), decided, expected)
    update_rows(mine, sequence_tensors(case, sequences), decided, reported)
    for name in RowState.__slots__:
        assert getattr(mine, name).equal(getattr(theirs, name)), name
    for ours, reference in zip(reported.tensors(), expected.tensors(), strict=True):
        assert ours.equal(reference)
    assert (expected.num_emitted[case.count :] == -5).all(), "padding reports nothing"
