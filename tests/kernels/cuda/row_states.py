"""Random row state and records of iterations, for the kernels that read and write them. Holds no tests."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from specrs.backends.cuda.row_state import RowState
from specrs.kernels.cuda.row_state import Sequences
from torch import Tensor

BLOCK_SIZE, MAX_LEN, MAX_K = 4, 40, 5


@dataclass(frozen=True)
class Case:
    """Row state and the `count` decoding sequences of a record, in arrays of `batch` elements and more."""

    state: RowState
    rows: list[int]
    planned: list[int]
    capacity: list[int]
    draft_context: int
    batch: int  # bucket
    num_rows: int  # bucket of flat rows

    @property
    def count(self) -> int:
        return len(self.rows)

    def section(self, values: list[int]) -> Tensor:
        """Return an array of the record, with random values after those of the sequences."""
        return torch.tensor(values + [77] * (self.batch + 3 - len(values)))


@dataclass(frozen=True, slots=True)
class Planned:
    """A sequence as the device prepares it."""

    row: int
    n: int
    k: int  # K_r, after the device's guards
    alive: bool
    capacity: int
    first: int  # flat row


def planned(case: Case, max_draft_lag: int | None = 2, on_host: Sequence[bool] | None = None) -> list[Planned]:
    """Return the sequences of a case by the rules of docs/start.md. With `max_draft_lag` None the drafter starts
    anew."""
    made, first, state = [], 0, case.state
    for b, (row, k, capacity) in enumerate(zip(case.rows, case.planned, case.capacity, strict=True)):
        n, alive, end = int(state.num_tokens[row]), bool(state.active[row]), int(state.limit[row]) - 1
        ready = alive
        if on_host is None or not on_host[b]:
            end = min(end, case.draft_context + 1)
            ready &= max_draft_lag is None or int(state.draft_len[row]) >= n - max_draft_lag
        made.append(Planned(row, n, max(min(k, end - n), 0) if ready else 0, alive, capacity, first))
        first += k + 1
    return made


def sequence_tensors(case: Case, sequences: Sequence[Planned]) -> Sequences:
    """Return the sequences as tensors for kernels, with padding after them."""
    padding = [Planned(case.state.num_tokens.shape[0] - 1, 0, 0, False, 0, sum(case.planned) + case.count)]
    padded = [*sequences, *padding * (case.batch - case.count + 1)]
    columns = {name: torch.tensor([int(getattr(one, name)) for one in padded]) for name in Planned.__slots__}
    first = columns.pop("first")
    return Sequences(**{name: column[:-1] for name, column in columns.items()}, q_start=first)


@st.composite
def cases(draw: st.DrawFn, max_k: int = MAX_K) -> Case:
    """Draw rows in every condition: ended, at their limit, short of capacity, with draft KV that lags."""
    num_rows = draw(st.integers(1, 6))
    state = RowState.allocate(num_rows, MAX_LEN, BLOCK_SIZE, torch.device("cpu"))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    state.tokens.copy_(torch.randint(1, 90, state.tokens.shape, generator=generator))
    state.block_table.copy_(
        torch.randperm(1000, generator=generator)[: state.block_table.numel()].view_as(state.block_table)
    )
    state.stop_ids[:, :2] = torch.randint(1, 90, (num_rows + 1, 2), generator=generator)
    for row in range(num_rows):
        n = draw(st.integers(1, MAX_LEN - 1))
        state.num_tokens[row] = n
        state.draft_len[row] = max(0, n - draw(st.integers(1, 4)))
        state.limit[row] = min(MAX_LEN, n + draw(st.integers(1, 8)))
        state.min_len[row] = draw(st.integers(0, MAX_LEN))
        state.active[row] = draw(st.booleans()) or draw(st.booleans())
    count = draw(st.integers(1, num_rows))
    rows = draw(st.permutations(range(num_rows)))[:count]
    planned = sorted((draw(st.integers(0, max_k)) for _ in rows), reverse=True)
    lengths = state.num_tokens[rows].tolist()
    capacity = [
        min(n + draw(st.sampled_from((0, 1, k, k + 1, k + 9))), MAX_LEN) for n, k in zip(lengths, planned, strict=True)
    ]
    total = sum(planned) + count
    return Case(
        state=state,
        rows=rows,
        planned=planned,
        capacity=capacity,
        draft_context=draw(st.sampled_from((MAX_LEN, 12))),
        batch=count + draw(st.integers(0, 3)),
        num_rows=total + draw(st.integers(0, 9)),
    )
