"""Uploads of a step into row state: admitted rows and block table updates. Reads only the record."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from specrs.backends.cuda.row_state import RowState
from specrs.backends.cuda.sampling.sampling_state import SamplingState
from specrs.backends.ring import Header

Views = Mapping[str, Tensor]


def apply_uploads(state: RowState, sampling: SamplingState, host: Views, device: Views, header: Header) -> None:
    """Initialise the rows that the step admits, and write its block table updates. Mutates row state and sampling
    state.

    Args:
        host, device: sections of the record in host memory and on the row state's device; on a CPU they are the same.
            Nothing is read back from the device.
    """
    if header.num_admitted:
        fresh = slice(0, header.num_admitted)
        rows = device["admit_row"][fresh]
        for own, section in (
            (state.num_tokens, "admit_num_tokens"),
            (state.draft_len, "admit_draft_len"),
            (state.limit, "admit_limit"),
            (state.min_len, "admit_min_len"),
        ):
            own.index_copy_(0, rows, device[section][fresh])
        state.active.index_fill_(0, rows, True)
        state.stop_ids.index_copy_(0, rows, device["admit_stop_ids"].view(-1, state.stop_ids.shape[1])[fresh])
        lengths = host["admit_num_tokens"][fresh].tolist()
        offset = 0
        for row, length in zip(host["admit_row"][fresh].tolist(), lengths, strict=True):
            state.tokens[row, :length] = device["upload_token"][offset : offset + length]
            offset += length
        sampling.admit(device, header.num_admitted)
    if header.num_block_updates:
        updates = slice(0, header.num_block_updates)
        rows, indices, ids = (device[name][updates] for name in ("block_row", "block_index", "block_id"))
        if len(state.tables) == 1:
            state.block_table.index_put_((rows, indices), ids)
        else:
            state.tables.index_put_((device["block_group"][updates], rows, indices), ids)
