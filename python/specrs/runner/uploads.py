"""Apply a launch's uploads to row state: admitted rows and block table updates. Reads the record only, runs no
model."""

from __future__ import annotations

from collections.abc import Sequence

from specrs.runner.ring import Header, RingSlot
from specrs.runner.row_state import RowState


def apply_uploads(
    state: RowState, slot: RingSlot, header: Header, min_lens: Sequence[int], stop_ids: Sequence[Sequence[int]]
) -> None:
    """Initialise the rows that the launch admits and write its block table updates; mutates row state.

    Args:
        min_lens: per admitted row, the position from which stop ids count.
        stop_ids: per admitted row, at most MAX_STOP_IDS ids.
    """
    record = slot.views
    if header.num_admitted:
        admitted = slice(0, header.num_admitted)
        rows = record["admit_row"][admitted]
        state.num_tokens[rows] = record["admit_num_tokens"][admitted]
        state.draft_len[rows] = record["admit_draft_len"][admitted]
        state.limit[rows] = record["admit_limit"][admitted]
        state.active[rows] = True
        state.stop_ids[rows] = -1
        offset = 0
        lengths = record["admit_num_tokens"][admitted].tolist()
        for row, length, min_len, stops in zip(rows.tolist(), lengths, min_lens, stop_ids, strict=True):
            state.tokens[row, :length] = record["upload_token"][offset : offset + length]
            state.min_len[row] = min_len
            if stops:
                state.stop_ids[row, : len(stops)] = state.stop_ids.new_tensor(stops)
            offset += length
    if header.num_block_updates:
        updates = slice(0, header.num_block_updates)
        state.block_table[record["block_row"][updates], record["block_index"][updates]] = record["block_id"][updates]
