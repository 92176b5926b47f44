"""Row state on a CPU: tokens, lengths and parameters of every running request. Makes no decisions."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from specrs.core import MAX_STOP_IDS, RequestSampling

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowState:
    """Persistent arrays by row; R = max_num_seqs rows and one reserved padding row of length 0 after them.

    Positions [0, num_tokens) of `tokens` are committed. [num_tokens, num_tokens + K_r) hold the drafts of the running
    iteration. `specrs.core.CpuIteration` writes all of it.
    """

    num_tokens: _Ints  # [R+1], n
    draft_len: _Ints  # [R+1], draft KV is valid on [draft_start, draft_len)
    draft_start: _Ints  # [R+1], first position of valid draft KV
    limit: _Ints  # [R+1], the largest n that the row may reach
    min_len: _Ints  # [R+1], stop ids count only for tokens at positions >= min_len
    prompt_len: _Ints  # [R+1]
    seeds: _Ints  # [R+1], unsigned 64 bit seeds, reinterpreted
    active: NDArray[np.bool_]  # [R+1]
    tokens: _Ints  # [R+1, max_model_len + 1], the last column is scratch
    block_table: _Ints  # [R+1, max_blocks], of the first KV group
    group_tables: _Ints  # [(G-1) * (R+1), max_blocks], of the other KV groups
    stop_ids: _Ints  # [R+1, MAX_STOP_IDS], -1 is padding
    params: NDArray[np.float32]  # [R+1, len(PARAM_COLUMNS)], sampling parameters
    hidden_states: NDArray[np.float32] | None  # [R+1, max_draft_lag * size of a position's states], for a head
    hidden_start: _Ints | None  # [R+1], the position of the first hidden state that is kept

    @classmethod
    def allocate(
        cls, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int = 1, hidden_size: int = 0
    ) -> RowState:
        """Return the state of an engine without requests: `max_num_seqs` rows and a padding row.

        Args:
            hidden_size: number of hidden state values of the target that are kept per row, over all kept positions and
                layers; 0 if no drafter reads them.
        """
        rows, blocks = max_num_seqs + 1, -(-max_model_len // block_size)
        greedy, _ = RequestSampling(temperature=0.0).columns("float32")

        def zeros(*shape: int) -> _Ints:
            return np.zeros(shape, dtype=np.int64)

        return cls(
            num_tokens=zeros(rows),
            draft_len=zeros(rows),
            draft_start=zeros(rows),
            limit=zeros(rows),
            min_len=zeros(rows),
            prompt_len=zeros(rows),
            seeds=zeros(rows),
            active=np.zeros(rows, dtype=np.bool_),
            tokens=zeros(rows, max_model_len + 1),
            block_table=zeros(rows, blocks),
            group_tables=zeros((num_groups - 1) * rows, blocks),
            stop_ids=np.full((rows, MAX_STOP_IDS), -1, dtype=np.int64),
            params=np.tile(np.array(greedy, dtype=np.float32), (rows, 1)),
            hidden_states=np.zeros((rows, hidden_size), dtype=np.float32) if hidden_size else None,
            hidden_start=zeros(rows) if hidden_size else None,
        )

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the arrays that exist, by field name. `CpuIteration` takes them in this form."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in found.items() if array is not None}
