"""Apply a launch's uploads to row state: admitted rows and block table updates. Reads the record only, runs no
model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specrs.runner.ring import Header
from specrs.runner.row_state import RowState
from specrs.runner.sampling_state import SamplingState
from specrs.transfer import to_device

if TYPE_CHECKING:
    from specrs.engine.request import Request

Views = Mapping[str, Tensor]


def apply_uploads(
    state: RowState, sampling: SamplingState, host: Views, device: Views, header: Header, admitted: Sequence[Request]
) -> None:
    """Initialise the rows that the launch admits and write its block table updates; mutates row and sampling state.

    Args:
        host, device: sections of the record, where the host can read them and where row state is; on a CPU the same.
            Nothing is read back from the device.
        admitted: the requests of the admitted rows, in the record's order.
    """
    if header.num_admitted:
        fresh = slice(0, header.num_admitted)
        rows = device["admit_row"][fresh]
        state.num_tokens.index_copy_(0, rows, device["admit_num_tokens"][fresh])
        state.draft_len.index_copy_(0, rows, device["admit_draft_len"][fresh])
        state.limit.index_copy_(0, rows, device["admit_limit"][fresh])
        state.active.index_fill_(0, rows, True)
        state.stop_ids.index_fill_(0, rows, -1)
        lengths = host["admit_num_tokens"][fresh].tolist()
        offset = 0
        for row, length, request in zip(host["admit_row"][fresh].tolist(), lengths, admitted, strict=True):
            state.tokens[row, :length] = device["upload_token"][offset : offset + length]
            state.min_len[row].fill_(request.min_len)
            if request.stop_token_ids:
                ids = torch.tensor(request.stop_token_ids, dtype=torch.int64)
                state.stop_ids[row, : len(ids)] = to_device(ids, state.stop_ids.device)
            sampling.admit(row, request)
            offset += length
    if header.num_block_updates:
        updates = slice(0, header.num_block_updates)
        index = (device["block_row"][updates], device["block_index"][updates])
        state.block_table.index_put_(index, device["block_id"][updates])
