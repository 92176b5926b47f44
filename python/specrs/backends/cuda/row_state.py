"""Row state on the device: tokens, lengths and block tables of every running request. Makes no decisions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.core import MAX_STOP_IDS


@dataclass(frozen=True, slots=True)
class RowState:
    """Persistent tensors by state row: R = max_num_seqs rows, then one padding row of length 0.

    Positions [0, num_tokens) of `tokens` are committed. [num_tokens, num_tokens + K_r) hold the drafts of the running
    iteration. The last column is scratch for masked writes, so that no write needs a shape that depends on data.
    """

    num_tokens: Tensor  # [R+1] int64, n, number of committed tokens
    draft_len: Tensor  # [R+1] int64, draft KV valid on [0, draft_len), or on [draft_start, draft_len) for a head
    limit: Tensor  # [R+1] int64, the largest n the row may reach
    min_len: Tensor  # [R+1] int64, stop ids count only for tokens at positions >= min_len
    active: Tensor  # [R+1] bool
    tokens: Tensor  # [R+1, max_model_len + 1] int64
    stop_ids: Tensor  # [R+1, MAX_STOP_IDS] int64, -1 is padding
    tables: Tensor  # [G, R+1, max_blocks] int64, block tables by KV group

    @classmethod
    def allocate(
        cls, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device, num_groups: int = 1
    ) -> RowState:
        """Return zeroed state for `max_num_seqs` rows and the padding row."""
        rows, blocks = max_num_seqs + 1, -(-max_model_len // block_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            num_tokens=zeros(rows),
            draft_len=zeros(rows),
            limit=zeros(rows),
            min_len=zeros(rows),
            active=zeros(rows, dtype=torch.bool),
            tokens=zeros(rows, max_model_len + 1),
            stop_ids=torch.full((rows, MAX_STOP_IDS), -1, dtype=torch.int64, device=device),
            tables=zeros(num_groups, rows, blocks),
        )

    @property
    def block_table(self) -> Tensor:
        """[R+1, max_blocks] int64, block table of the first KV group; a view."""
        return self.tables[0]

    @property
    def group_tables(self) -> Tensor:
        """[G-1, R+1, max_blocks] int64, block tables of the KV groups after the first; a view."""
        return self.tables[1:]

    @property
    def scratch_column(self) -> int:
        """Index of the column of `tokens` that takes masked writes."""
        return self.tokens.shape[1] - 1
