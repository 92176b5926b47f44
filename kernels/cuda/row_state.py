"""Protocols of the tensors that kernels read and write: row state, and the sequences of one iteration. Launches
nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class RowTensors(Protocol):
    """Row state in the form that kernels read and write, int64 unless said otherwise.
    `specrs.backends.cuda.row_state.RowState` has these members.

    There are R rows, and a padding row after them.
    """

    @property
    def num_tokens(self) -> Tensor:
        """[R + 1], number of tokens n."""

    @property
    def draft_len(self) -> Tensor:
        """[R + 1], draft KV is valid on [0, draft_len), or on [draft_start, draft_len) for a head."""

    @property
    def limit(self) -> Tensor:
        """[R + 1], maximum n of the row."""

    @property
    def min_len(self) -> Tensor:
        """[R + 1], first position at which stop ids count."""

    @property
    def active(self) -> Tensor:
        """[R + 1] bool, True while the row's request runs."""

    @property
    def tokens(self) -> Tensor:
        """[R + 1, max_model_len + 1] token ids."""

    @property
    def block_table(self) -> Tensor:
        """[R + 1, max_blocks], block ids in the first KV group."""

    @property
    def group_tables(self) -> Tensor:
        """[G - 1, R + 1, max_blocks] contiguous, block ids in the KV groups after the first."""

    @property
    def stop_ids(self) -> Tensor:
        """[R + 1, S] stop token ids of each row; -1 is padding."""


class HiddenTensors(Protocol):
    """Hidden states that are kept by row for an EAGLE-3 head. `specrs.backends.cuda.hidden_rows.HiddenRows` has these
    members."""

    @property
    def states(self) -> Tensor:
        """[R + 1, W + 1, L, hidden] contiguous; the last column is scratch."""

    @property
    def start(self) -> Tensor:
        """[R + 1] int64, position of the state in column 0."""

    @property
    def draft_start(self) -> Tensor:
        """[R + 1] int64, first position with draft KV."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """The B sequences of an iteration, as `prepare_iteration` writes them: int64, `[B]` unless said otherwise."""

    row: Tensor
    """State row of each sequence; the padding row for padding."""
    n: Tensor
    k: Tensor
    """Number of drafts K_r of each sequence, after the device's limits."""
    alive: Tensor
    """1 for sequences that are active and emit, 0 for others."""
    capacity: Tensor
    """Number of positions that the row's blocks cover."""
    q_start: Tensor
    """[B + 1], first flat row of each sequence."""

    def tensors(self) -> list[Tensor]:
        """Return the fields in order, as kernels take them."""
        return [self.row, self.n, self.k, self.alive, self.capacity, self.q_start]
