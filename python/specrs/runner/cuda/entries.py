"""The entries of one decode iteration, and their rows laid out flat. Reads no state and runs no model."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.transfer import to_device
from specrs.verify.rejection import row_index


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Flat rows of a verification pass, constants of its plan: entry b has planned[b] + 1 of them, W is the most."""

    q_start: Tensor  # [B+1] int64
    entry: Tensor  # [N] int64
    offset: Tensor  # [N] int64, row within the entry
    index: Tensor  # [B, W] int64, flat row of each column, held at the entry's last row
    planned: Tensor  # [B] int64
    uniform: bool  # every entry has W rows

    def to(self, device: torch.device) -> FlatRows:
        """The same on `device`, without waiting for it."""
        q_start, entry, offset, index, planned = (
            to_device(t, device) for t in (self.q_start, self.entry, self.offset, self.index, self.planned)
        )
        return FlatRows(q_start, entry, offset, index, planned, self.uniform)

    def take(self, matrix: Tensor) -> Tensor:
        """The values `[N]` of flat rows from a matrix `[B, W]`."""
        return matrix.reshape(-1) if self.uniform else matrix[self.entry, self.offset]

    def columns(self, values: Tensor) -> Tensor:
        """The values `[N]` of flat rows as a matrix `[B, W]`; a shorter entry repeats its last."""
        return values.view(self.index.shape) if self.uniform else values[self.index]


@functools.lru_cache(maxsize=64)
def flat_rows(planned: tuple[int, ...], device: torch.device | None = None) -> FlatRows:
    """The flat rows of a plan; cached, because a steady batch repeats its plan launch after launch."""
    if device is not None and device.type != "cpu":
        return flat_rows(planned).to(device)
    counts = torch.tensor(planned, dtype=torch.int64) + 1
    total, width = sum(planned) + len(planned), planned[0] + 1
    q_start = torch.zeros(len(planned) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=q_start[1:])
    entry = torch.arange(len(planned)).repeat_interleave(counts, output_size=total)
    return FlatRows(
        q_start=q_start,
        entry=entry,
        offset=torch.arange(total) - q_start[entry],
        index=row_index(q_start, width),
        planned=counts - 1,
        uniform=planned[-1] == planned[0],
    )


@dataclass(frozen=True, slots=True)
class Iteration:
    """The rows of one launch's decode iteration, B entries sorted by planned K descending."""

    rows: Tensor  # [B] int64, row of each entry
    planned: tuple[int, ...]  # K_r as planned, descending
    flat: FlatRows
    num_tokens: Tensor  # [B] int64, n at the start of the iteration
    num_drafts: Tensor  # [B] int64, K_r after the device's own guards
    alive: Tensor  # [B] bool, false for rows that ended before this launch
    capacity: Tensor  # [B] int64, positions covered by the block table
    block_table: Tensor  # [B, blocks] int64
    block_size: int
    max_context: int  # host bound of position + 1 over all passes
    group_tables: Tensor | None = None  # [G-1, B, blocks] int64, of the KV groups behind the first; None: there is one

    @property
    def max_k(self) -> int:
        """Largest planned K_r."""
        return self.planned[0]

    def slots(self, positions: Tensor) -> Tensor:
        """Slots of positions `[B, C]` int64 of each entry, the same shape; -1 for masked ones and beyond capacity."""
        return self._slots(positions, self.block_table)

    def flat_group_slots(self, positions: Tensor) -> Tensor | None:
        """The same of flat rows in the groups behind the first, `[G-1, N]`; None: there is one group."""
        if self.group_tables is None:
            return None
        return torch.stack([self.flat.take(self._slots(positions, table)) for table in self.group_tables])

    def _slots(self, positions: Tensor, table: Tensor) -> Tensor:
        index = (positions // self.block_size).clamp_(0, table.shape[1] - 1)
        slots = table.gather(1, index) * self.block_size + positions % self.block_size
        return slots.masked_fill_((positions < 0) | (positions >= self.capacity[:, None]), -1)
