"""Hidden states of the target that a drafter will read, kept for every row, and where its KV begins. Runs no model.

Of a row with n tokens, the law that the scheduler's books follow (`rust/core/src/scheduler/hidden.rs`):

    [draft_start, draft_len)  draft KV valid: made of the target's hidden states, with a context from draft_start on
    [start, n - 1)            hidden states kept, the first in column 0; at most W of them

KV is written at [start, n - 1) by the first drafting pass, and behind prompt chunks. Where that leaves a gap behind
draft_len, the drafter starts anew: draft_start is the first position written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.drafters.base import HiddenInputs
from specrs.models.inputs import PassInputs
from specrs.runner.cuda.entries import Iteration
from specrs.runner.cuda.prefill import catch_up_inputs
from specrs.runner.cuda.row_state import RowState
from specrs.runner.ring import Header
from specrs.transfer import to_device

Views = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Persistent per-row tensors, as in `RowState`; the last column of `states` is scratch."""

    states: Tensor  # [R+1, W+1, L, hidden] of the target's `states_dtype`
    start: Tensor  # [R+1] int64
    draft_start: Tensor  # [R+1] int64

    @classmethod
    def allocate(
        cls, max_num_seqs: int, width: int, num_layers: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> HiddenRows:
        """Zeroed, with room for `width` positions a row."""
        rows = max_num_seqs + 1
        states = torch.zeros((rows, width + 1, num_layers, hidden_size), dtype=dtype, device=device)
        return cls(states, *(torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2)))

    @property
    def width(self) -> int:
        """W, positions of a row that have room."""
        return self.states.shape[1] - 1

    def admit(self, record: Views, num_admitted: int) -> None:
        """Forget what rows kept for those that had them before; mutates."""
        rows = record["admit_row"][:num_admitted]
        self.start.index_fill_(0, rows, 0)
        self.draft_start.index_fill_(0, rows, 0)

    def keep_last(self, rows: Tensor, positions: Tensor, entries: Tensor) -> None:
        """Keep the last position of prompts that end: `[C]`, and its hidden states `[C, L, hidden]`; mutates."""
        self.states[rows, 0] = entries
        self.start.index_copy_(0, rows, positions)

    def keep_verified(self, state: RowState, it: Iteration, entries: Tensor, on_host: Tensor | None = None) -> None:
        """Keep those of the tokens that an iteration has committed, `entries` `[N, L, hidden]` being its flat rows';
        mutates. What the drafts of the iteration were made of is given up, and what no longer fits before the new."""
        rows, n = it.rows, it.num_tokens
        grown = state.num_tokens.index_select(0, rows)
        before = self.start.index_select(0, rows)
        drafted = it.num_drafts > 0 if on_host is None else (it.num_drafts > 0) & ~on_host
        full = drafted | (grown - 1 - before > self.width)
        start = torch.where(full, n - 1, before)
        column = torch.arange(it.max_k + 1)
        kept = column < (grown - n)[:, None]
        into = torch.where(kept, (n - 1 - start)[:, None] + column, self.width)
        self.states[rows[:, None], into] = entries[it.flat.index]
        self.start.index_copy_(0, rows, torch.where(grown > n, start, before))

    def begin(self, state: RowState, it: Iteration, drafts: Tensor) -> Tensor:
        """The first position `[B]` that the first drafting pass of each entry feeds; mutates `draft_start` where that
        is a start anew. `drafts` `[B]` bool: entries that it drafts for."""
        start, draft_len = self.start.index_select(0, it.rows), state.draft_len.index_select(0, it.rows)
        self._restart(it.rows, draft_len, start, drafts)
        return torch.maximum(start, draft_len)

    def read(self, rows: Tensor, positions: Tensor) -> HiddenInputs:
        """Of the first pass: positions `[B, C]` of the rows `[B]`, -1 for masked ones."""
        column = (positions - self.start.index_select(0, rows)[:, None]).clamp(0, self.width)
        states = self.states[rows[:, None], column].masked_fill_((positions < 0)[:, :, None, None], 0)
        return HiddenInputs(states.flatten(0, 1), self.draft_start.index_select(0, rows))

    def chunks(
        self, state: RowState, host: Views, device: Views, header: Header, entries: Tensor | None
    ) -> tuple[PassInputs, HiddenInputs] | None:
        """The pass behind the launch's prompt chunks, whose rows have `entries` `[N, L, hidden]`; None where there is
        none. Mutates `draft_start`, before which nothing is read: also where a chunk of length 0 orders a start anew.

        What it returns is its own, so that the pass may be run when the launch's record is gone.
        """
        chunks = slice(0, header.num_draft_chunks)
        rows, starts, lengths = (device[f"draft_chunk_{name}"][chunks] for name in ("row", "start", "len"))
        self._restart(rows, state.draft_len.index_select(0, rows), starts, lengths > 0)
        self.draft_start.index_copy_(0, rows, self.draft_start.index_select(0, rows) * (lengths > 0))
        inputs = catch_up_inputs(state, host, device, header, offset=1)
        if inputs is None or entries is None:
            return None
        of_row = host["entry_row"][header.num_decode : header.num_decode + header.num_prefill].tolist()
        first = dict(zip(of_row, host["prefill_q_start"][: header.num_prefill].tolist(), strict=True))
        index = torch.cat(
            [
                torch.arange(first.get(row, 0), first.get(row, 0) + length)
                for row, length in zip(
                    host["draft_chunk_row"][chunks].tolist(), host["draft_chunk_len"][chunks].tolist(), strict=True
                )
            ]
        )
        own = PassInputs(
            input_ids=inputs.input_ids,
            positions=inputs.positions.clone(),
            slots=inputs.slots.clone(),
            q_start=inputs.q_start.clone(),
            block_table=inputs.block_table,
            max_q_len=inputs.max_q_len,
            max_context=inputs.max_context,
        )
        states = entries.index_select(0, to_device(index, entries.device))
        return own, HiddenInputs(states, self.draft_start.index_select(0, rows))

    def _restart(self, rows: Tensor, draft_len: Tensor, first: Tensor, writes: Tensor) -> None:
        before = self.draft_start.index_select(0, rows)
        self.draft_start.index_copy_(0, rows, torch.where((draft_len < first) & writes, first, before))
