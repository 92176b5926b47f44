"""Slots and block tables in the KV groups after the first: the kernel against the CPU's, integer for integer, into
poisoned buffers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.kernels.cuda import group_rows
from specrs.kernels.cuda.group_rows import GroupRows, prepare_groups
from specrs.kernels.cuda.prepare import VerifyRows
from sweep import sweep

from kernels.cuda import test_prepare
from kernels.cuda.row_states import BLOCK_SIZE, Case, cases
from kernels.cuda.test_prepare import POISON, sequences_of


def run(case: Case, out: dict[str, torch.Tensor], further: int) -> tuple[GroupRows, torch.Tensor]:
    """Run the kernel over random tables of `further` groups after `prepare_iteration` wrote `out`. Return what the
    kernel writes, and the tables."""
    rows, blocks = case.state.block_table.shape
    tables = torch.randperm(2000)[: further * rows * blocks].view(further, rows, blocks)
    verify = VerifyRows(**{name: out[f"verify_{name}"] for name in ("ids", "positions", "slots", "draws", "rows")})
    # As in an engine, where buffers are for more sequences and rows than a step has.
    made = GroupRows(
        torch.full((further, case.batch + 2, blocks), POISON)[:, : case.batch],
        torch.full((further, case.num_rows + 3), POISON)[:, : case.num_rows],
    )
    prepare_groups(tables, sequences_of(out), verify, made, BLOCK_SIZE)
    return made, tables


@sweep(60)
@given(cases(), st.integers(1, 3), st.sampled_from([2, 64]))
def test_prepare_groups(case: Case, further: int, step: int) -> None:
    """Check the kernel if a program has several steps, of two rows and blocks each."""
    out, planned = test_prepare.run(case), test_prepare.sequences(case)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_BLOCK_ROWS", "_BLOCK_TABLE"):
            patch.setattr(group_rows, name, step)
        made, tables = run(case, out, further)
    for group, table in enumerate(tables.tolist()):
        slots = [-1] * case.num_rows
        for it in planned:
            for i in range(it.k + 1 if it.alive else 0):
                position = it.n - 1 + i
                if position < it.capacity:
                    block = table[it.row][position // BLOCK_SIZE]
                    slots[it.first + i] = block * BLOCK_SIZE + position % BLOCK_SIZE
        assert made.slots[group].tolist() == slots
        for sequence in range(case.batch):
            it = planned[sequence] if sequence < case.count else None
            blocks = -(-(it.n + it.k) // BLOCK_SIZE) if it is not None and it.alive else 0
            blocks = min(blocks, len(table[0]))
            written = made.tables[group, sequence].tolist()
            assert written[:blocks] == ([] if it is None else table[it.row][:blocks])
            assert set(written[blocks:]) <= {POISON}


def test_one_group_launches_nothing() -> None:
    """Check that one group launches nothing: its buffers are empty."""
    tables, slots = torch.empty(0, 4, 3, dtype=torch.int64), torch.empty(0, 5, dtype=torch.int64)
    prepare_groups(tables, None, None, GroupRows(tables, slots), BLOCK_SIZE)  # type: ignore[arg-type]
