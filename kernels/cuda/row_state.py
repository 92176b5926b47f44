"""What the kernels know of running requests: row state, and the entries of one iteration. Launches nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class RowTensors(Protocol):
    """Row state as kernels read and write it, int64 unless said otherwise: `specrs.runner.cuda.row_state.RowState`.

    R rows, and the padding row behind them.
    """

    @property
    def num_tokens(self) -> Tensor:
        """[R + 1], n"""

    @property
    def draft_len(self) -> Tensor:
        """[R + 1], draft KV is valid on [0, draft_len)"""

    @property
    def limit(self) -> Tensor:
        """[R + 1], the largest n that the row may reach"""

    @property
    def min_len(self) -> Tensor:
        """[R + 1], stop ids count only at positions from here on"""

    @property
    def active(self) -> Tensor:
        """[R + 1] bool"""

    @property
    def tokens(self) -> Tensor:
        """[R + 1, max_model_len + 1]"""

    @property
    def block_table(self) -> Tensor:
        """[R + 1, max_blocks], in the first KV group"""

    @property
    def group_tables(self) -> Tensor:
        """[G - 1, R + 1, max_blocks], in those behind it, contiguous"""

    @property
    def stop_ids(self) -> Tensor:
        """[R + 1, S], -1 is padding"""


class HiddenTensors(Protocol):
    """Hidden states kept by row for an EAGLE-3 head: `specrs.runner.cuda.hidden_rows.HiddenRows`."""

    @property
    def states(self) -> Tensor:
        """[R + 1, W + 1, L, hidden], contiguous; the last column is scratch"""

    @property
    def start(self) -> Tensor:
        """[R + 1] int64, the position in column 0"""

    @property
    def draft_start(self) -> Tensor:
        """[R + 1] int64, the first position with draft KV"""


@dataclass(frozen=True, slots=True)
class Entries:
    """The B entries of an iteration, int64, as `prepare_iteration` writes them; `[B]` unless said otherwise."""

    row: Tensor
    """Row of state; the padding row behind the launch's entries."""
    n: Tensor
    k: Tensor
    """K_r, after the device's guards."""
    alive: Tensor
    """0 or 1."""
    capacity: Tensor
    """Positions that the row's blocks cover."""
    q_start: Tensor
    """[B + 1], the first flat row of each."""

    def tensors(self) -> list[Tensor]:
        """The fields in order, as kernels take them."""
        return [self.row, self.n, self.k, self.alive, self.capacity, self.q_start]
