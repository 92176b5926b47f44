"""Hidden states of the target that a head will read, kept per row, and the start of its KV. Runs no model.

For a row with n tokens these ranges hold. The scheduler (`rust/core/src/scheduler/hidden.rs`) tracks the same ones:

    [draft_start, draft_len)  draft KV is valid: made from the target's hidden states, with context from draft_start on
    [start, n - 1)            hidden states are kept, the first in column 0; at most W of them

The first drafting pass writes KV at [start, n - 1), and the head's pass after prompt chunks writes KV of the chunks. If
that leaves a gap after draft_len, the head starts anew: draft_start becomes the first position written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specrs.backends.cuda.prefill import catch_up_inputs
from specrs.backends.cuda.row_state import RowState
from specrs.backends.ring import Header
from specrs.models.inputs import PassInputs
from specrs.transfer import to_device

Views = Mapping[str, Tensor]


class HiddenInputs(NamedTuple):
    """Further inputs of a head's pass, for N rows of B sequences: the target's hidden states."""

    states: Tensor
    """[N, L, the target's hidden size]"""
    k_start: Tensor
    """[B] int64, the first position that a sequence's rows attend to."""


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Persistent tensors by state row, as in `RowState`. The last column of `states` is scratch."""

    states: Tensor  # [R+1, W+1, L, hidden] of the target's `states_dtype`
    start: Tensor  # [R+1] int64, position of the first state that is kept
    draft_start: Tensor  # [R+1] int64, first position of valid draft KV

    @classmethod
    def allocate(
        cls, max_num_seqs: int, width: int, num_layers: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> HiddenRows:
        """Return zeroed tensors with room for `width` positions per row."""
        rows = max_num_seqs + 1
        states = torch.zeros((rows, width + 1, num_layers, hidden_size), dtype=dtype, device=device)
        return cls(states, *(torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2)))

    @property
    def width(self) -> int:
        """Number of positions per row that have room (W)."""
        return self.states.shape[1] - 1

    def admit(self, record: Views, num_admitted: int) -> None:
        """Reset the rows that a record admits. Mutates `start` and `draft_start`."""
        rows = record["admit_row"][:num_admitted]
        self.start.index_fill_(0, rows, 0)
        self.draft_start.index_fill_(0, rows, 0)

    def chunks(
        self, state: RowState, host: Views, device: Views, header: Header, entries: Tensor | None
    ) -> tuple[PassInputs, HiddenInputs] | None:
        """Return the inputs of the head's pass over the step's prompt chunks, whose hidden states are `entries` `[N, L,
        hidden]`.

        None if there is no such pass. Mutates `draft_start`; a chunk of length 0 resets it to 0. The returned tensors
        are copies, so the pass may run after the step's record is gone.
        """
        chunks = slice(0, header.num_draft_chunks)
        rows, starts, lengths = (device[f"draft_chunk_{name}"][chunks] for name in ("row", "start", "len"))
        self._restart(rows, state.draft_len.index_select(0, rows), starts, lengths > 0)
        self.draft_start.index_copy_(0, rows, self.draft_start.index_select(0, rows) * (lengths > 0))
        inputs = catch_up_inputs(state, host, device, header, offset=1)
        if inputs is None or entries is None:
            return None
        of_row = host["seq_row"][header.num_decode : header.num_decode + header.num_prefill].tolist()
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
        """Start the draft KV of `rows` anew at position `first` (`draft_start`), for rows that the pass writes
        (`writes`), if that would leave a gap after `draft_len`."""
        before = self.draft_start.index_select(0, rows)
        self.draft_start.index_copy_(0, rows, torch.where((draft_len < first) & writes, first, before))
