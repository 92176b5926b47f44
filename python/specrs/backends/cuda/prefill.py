"""Inputs of passes over prompt chunks for the target, and over catch-up chunks for the draft. Runs no model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specrs.backends.cuda.row_state import RowState
from specrs.backends.ring import Header
from specrs.core import FLAG_TARGET_NON_FINITE
from specrs.models.inputs import PassInputs

Views = Mapping[str, Tensor]


def prefill_inputs(state: RowState, host: Views, device: Views, header: Header) -> PassInputs:
    """Return the inputs of the pass over the step's prompt chunks, `[num_prefill_tokens]` rows.

    `host` and `device` are the record's sections in host memory and on the row state's device; on a CPU they are the
    same. Bounds come from the host, so nothing is read back.
    """
    chunks, tokens = slice(0, header.num_prefill), slice(0, header.num_prefill_tokens)
    lengths = host["chunk_len"][chunks]
    rows = device["seq_row"][header.num_decode : header.num_decode + header.num_prefill]
    slots = device["prefill_slot"].view(len(state.tables), -1)[:, tokens]
    several = len(state.tables) > 1
    return PassInputs(
        input_ids=device["prefill_token"][tokens],
        positions=device["prefill_position"][tokens],
        slots=slots[0],
        q_start=device["prefill_q_start"][: header.num_prefill + 1],
        block_table=state.block_table[rows],
        max_q_len=int(lengths.max()),
        max_context=int((host["chunk_start"][chunks] + lengths).max()),
        group_slots=slots[1:] if several else None,
        group_tables=state.group_tables[:, rows] if several else None,
        device_rows=rows,
        prompts=True,
    )


def catch_up_inputs(
    state: RowState, host: Views, device: Views, header: Header, offset: int = 0, *, windowed: bool = False
) -> PassInputs | None:
    """Return the inputs of the draft's pass over committed tokens that it has not seen. None if there are none.

    Token ids come from row state, because with steps in flight the host does not know all of them. Position p gets the
    token at p + `offset`. `windowed` sets `k_start`, because blocks before the draft model's sliding window may have
    been freed.
    """
    if not header.num_draft_tokens:
        return None
    chunks, tokens = slice(0, header.num_draft_chunks), slice(0, header.num_draft_tokens)
    lengths, rows = host["draft_chunk_len"][chunks], device["draft_chunk_row"][chunks]
    positions = device["draft_position"][tokens]
    of_row = rows.repeat_interleave(device["draft_chunk_len"][chunks], output_size=header.num_draft_tokens)
    return PassInputs(
        input_ids=state.tokens[of_row, positions + offset],
        positions=positions,
        slots=device["draft_slot"][tokens],
        q_start=device["draft_q_start"][: header.num_draft_chunks + 1],
        block_table=state.block_table[rows],
        max_q_len=int(lengths.max()),
        max_context=int((host["draft_chunk_start"][chunks] + lengths).max()),
        k_start=device["draft_chunk_k_start"][chunks] if windowed else None,
        prompts=True,
    )


def caught_up(state: RowState, device: Views, header: Header, *, written: bool = True) -> None:
    """Mark the draft KV of the step's draft chunks as valid. Mutates `draft_len`.

    A chunk of length 0 writes nothing: another request has written the KV of a shared prefix. `written` is False if the
    pass over the other chunks failed. Then `draft_len` of their rows becomes at most the chunk's start, because KV may
    be overwritten from there on.
    """
    chunks = slice(0, header.num_draft_chunks)
    rows, lengths = device["draft_chunk_row"][chunks], device["draft_chunk_len"][chunks]
    starts = device["draft_chunk_start"][chunks]
    ends = starts + lengths
    if not written:
        ends = torch.where(lengths > 0, torch.minimum(state.draft_len.index_select(0, rows), starts), ends)
    state.draft_len.index_copy_(0, rows, ends)


def last_chunks(host: Views, header: Header) -> list[int]:
    """Return the indices of the prompt chunks that end their prompt."""
    return [i for i, is_last in enumerate(host["chunk_is_last"][: header.num_prefill].tolist()) if is_last]


def last_rows(device: Views, header: Header) -> Tensor:
    """Return the last flat row of each prompt chunk, `[num_prefill]` int64."""
    return device["prefill_q_start"][1 : header.num_prefill + 1] - 1


def chunk_faults(hidden: Tensor, device: Views, header: Header) -> Tensor:
    """Return zeros `[num_prefill, hidden_size]`, with NaN in the rows of prompt chunks that have a value that is not
    finite in `hidden` `[N, hidden_size]`."""
    rows = torch.repeat_interleave(device["chunk_len"][: header.num_prefill], output_size=hidden.shape[0])
    return hidden.new_zeros(header.num_prefill, hidden.shape[1]).index_add_(0, rows, hidden * 0)


def flag_chunks(last: Tensor, flags: Tensor) -> None:
    """Flag prompt chunks whose values are not finite. Mutates `flags` `[num_prefill]` int64.

    `last` `[num_prefill, hidden_size]` has each chunk's last hidden row. If the last layer attends to all positions, a
    NaN in the KV of any of them reaches this row. With a sliding window it may not, so `chunk_faults` adds it. Chunks
    are flagged before their prompt has logits, because other requests may reuse their blocks once the step has settled.
    """
    flags |= torch.where(last.isfinite().all(dim=1), 0, FLAG_TARGET_NON_FINITE)
