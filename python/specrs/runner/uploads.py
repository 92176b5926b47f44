"""Apply a launch's uploads to row state: admitted rows and block table updates. Reads the record only, runs no
model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specrs.runner.ring import Header, RingSlot
from specrs.runner.row_state import RowState
from specrs.runner.sampling_state import SamplingState

if TYPE_CHECKING:
    from specrs.engine.request import Request


def apply_uploads(
    state: RowState, sampling: SamplingState, slot: RingSlot, header: Header, admitted: Sequence[Request]
) -> None:
    """Initialise the rows that the launch admits and write its block table updates; mutates row and sampling state.

    `admitted` are the requests of those rows, in the record's order.
    """
    record = slot.views
    if header.num_admitted:
        fresh = slice(0, header.num_admitted)
        rows, lengths = record["admit_row"][fresh], record["admit_num_tokens"][fresh]
        state.num_tokens[rows] = lengths
        state.draft_len[rows] = record["admit_draft_len"][fresh]
        state.limit[rows] = record["admit_limit"][fresh]
        state.active[rows] = True
        state.stop_ids[rows] = -1
        offset = 0
        for row, length, request in zip(rows.tolist(), lengths.tolist(), admitted, strict=True):
            state.tokens[row, :length] = record["upload_token"][offset : offset + length]
            state.min_len[row] = request.min_len
            if request.stop_token_ids:
                state.stop_ids[row, : len(request.stop_token_ids)] = torch.tensor(request.stop_token_ids)
            sampling.admit(row, request)
            offset += length
    if header.num_block_updates:
        updates = slice(0, header.num_block_updates)
        state.block_table[record["block_row"][updates], record["block_index"][updates]] = record["block_id"][updates]
