"""Sequences of one decode iteration, and their rows laid out flat. Reads no state and runs no model."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.transfer import to_device
from specrs.verify.rejection import row_index


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Flat rows of a verification pass. Sequence b has planned[b] + 1 of them; W is the largest number."""

    sequence: Tensor  # [N] int64, sequence of each row
    offset: Tensor  # [N] int64, row within the sequence
    index: Tensor  # [B, W] int64, flat row of each column; columns past the sequence's rows have its last row

    def to(self, device: torch.device) -> FlatRows:
        """Return a copy on `device`, without waiting for it."""
        return FlatRows(*(to_device(tensor, device) for tensor in (self.sequence, self.offset, self.index)))


@functools.lru_cache(maxsize=64)
def flat_rows(planned: tuple[int, ...], device: torch.device | None = None) -> FlatRows:
    """Return the flat rows of a plan: the number of drafts of each sequence, descending. Cached, because a steady batch
    repeats its plan step after step."""
    if device is not None and device.type != "cpu":
        return flat_rows(planned).to(device)
    counts = torch.tensor(planned, dtype=torch.int64) + 1
    total, width = sum(planned) + len(planned), planned[0] + 1
    q_start = torch.zeros(len(planned) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=q_start[1:])
    sequence = torch.arange(len(planned)).repeat_interleave(counts, output_size=total)
    return FlatRows(sequence, torch.arange(total) - q_start[sequence], row_index(q_start, width))


@dataclass(frozen=True, slots=True)
class Iteration:
    """The rows of one step's decode iteration, B sequences sorted by planned K descending."""

    rows: Tensor  # [B] int64, state row
    planned: tuple[int, ...]  # K_r as planned, descending
    flat: FlatRows
    num_drafts: Tensor  # [B] int64, K_r after the device's own guards
    max_context: int  # host bound of position + 1 over all passes

    @property
    def max_k(self) -> int:
        """Largest planned number of drafts of a sequence, K_r."""
        return self.planned[0]
