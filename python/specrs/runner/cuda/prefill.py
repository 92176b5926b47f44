"""Inputs of prompt chunks for the target and of catch-up chunks for the draft: varlen passes. Runs no model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specrs.core import FLAG_TARGET_NON_FINITE
from specrs.models.inputs import PassInputs
from specrs.runner.cuda.row_state import RowState
from specrs.runner.ring import Header

Views = Mapping[str, Tensor]


def prefill_inputs(state: RowState, host: Views, device: Views, header: Header) -> PassInputs:
    """The pass over the launch's prompt chunks, `[num_prefill_tokens]` rows.

    `host` and `device` are the record's sections where the host can read them and where row state is; on a CPU the
    same. Bounds come from the host, so nothing is read back.
    """
    chunks, tokens = slice(0, header.num_prefill), slice(0, header.num_prefill_tokens)
    lengths = host["chunk_len"][chunks]
    rows = device["entry_row"][header.num_decode : header.num_decode + header.num_prefill]
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
        prompts=True,
    )


def catch_up_inputs(
    state: RowState, host: Views, device: Views, header: Header, offset: int = 0, *, windowed: bool = False
) -> PassInputs | None:
    """The draft's pass over committed tokens that it has not seen (deferred drafting); None where there are none.

    Token ids come from row state, position p's from p + `offset`: with launches in flight the host does not know them
    all. `windowed`: blocks come back behind a window, so the pass has a `k_start`.
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
    """The chunks' draft KV is valid now; mutates `draft_len`.

    A chunk of length 0 does no more than this, where another request has written the KV of a shared prefix. Where the
    others were not `written`, none of their draft KV is valid: a chunk may have begun before the end of what was.
    """
    chunks = slice(0, header.num_draft_chunks)
    rows, lengths = device["draft_chunk_row"][chunks], device["draft_chunk_len"][chunks]
    starts = device["draft_chunk_start"][chunks]
    ends = starts + lengths
    if not written:
        ends = torch.where(lengths > 0, torch.minimum(state.draft_len.index_select(0, rows), starts), ends)
    state.draft_len.index_copy_(0, rows, ends)


def last_chunks(host: Views, header: Header) -> list[int]:
    """Prompt chunks that end their prompt, by their index among the chunks."""
    return [i for i, is_last in enumerate(host["chunk_is_last"][: header.num_prefill].tolist()) if is_last]


def last_rows(device: Views, header: Header) -> Tensor:
    """The last flat row of each prompt chunk, `[num_prefill]` int64."""
    return device["prefill_q_start"][1 : header.num_prefill + 1] - 1


def chunk_faults(hidden: Tensor, device: Views, header: Header) -> Tensor:
    """Zeros `[num_prefill, hidden_size]`, but NaN where a row of the prompt chunk is not finite in `hidden`
    `[N, hidden_size]`."""
    rows = torch.repeat_interleave(device["chunk_len"][: header.num_prefill], output_size=hidden.shape[0])
    return hidden.new_zeros(header.num_prefill, hidden.shape[1]).index_add_(0, rows, hidden * 0)


def flag_chunks(last: Tensor, flags: Tensor) -> None:
    """Report prompt chunks that are not finite; mutates `flags` `[num_prefill]` int64.

    `last` `[num_prefill, hidden_size]` is each chunk's last hidden row. Where the last layer has attended to all
    positions up to its own, what is not finite in the KV of any of them is in it, too; where it has a window that is
    not so (`chunk_faults`). Others may find a chunk's blocks once it has settled, before the end of its prompt has
    logits to tell.
    """
    flags |= torch.where(last.isfinite().all(dim=1), 0, FLAG_TARGET_NON_FINITE)
