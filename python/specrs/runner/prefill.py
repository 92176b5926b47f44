"""Prefill chunks of the target and catch-up chunks of the draft: eager, varlen passes. Accepts and samples nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from specrs.drafters.draft_model import DraftModel
from specrs.models.decoder import Decoder
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.runner.ring import Header, RingSlot
from specrs.runner.row_state import RowState


def prefill(state: RowState, slot: RingSlot, header: Header, target: Decoder, kv_cache: KVCache) -> Tensor:
    """Feed the launch's prompt chunks to the target in one pass; hidden states `[num_prefill_tokens, hidden]`.

    Mutates the target's KV cache only.
    """
    record, chunks = slot.views, slice(0, header.num_prefill)
    lengths = record["chunk_len"][chunks]
    ends = record["chunk_start"][chunks] + lengths
    rows = record["entry_row"][header.num_decode : header.num_decode + header.num_prefill]
    tokens = slice(0, header.num_prefill_tokens)
    inputs = PassInputs(
        input_ids=record["prefill_token"][tokens],
        positions=record["prefill_position"][tokens],
        slots=record["prefill_slot"][tokens],
        q_start=record["prefill_q_start"][: header.num_prefill + 1],
        block_table=state.block_table[rows],
        max_q_len=int(lengths.max()),
        max_context=int(ends.max()),
    )
    return target.forward(inputs, kv_cache)


def catch_up(state: RowState, slot: RingSlot, header: Header, drafter: DraftModel) -> None:
    """Feed committed tokens to the draft where its KV lags behind (deferred drafting); mutates its KV cache and
    `draft_len`.

    Token ids come from row state: with launches in flight the host does not know them all. A chunk of length 0 only
    sets `draft_len`, where another request has written the KV of a shared prefix.
    """
    record = slot.views
    chunks = slice(0, header.num_draft_chunks)
    rows = record["draft_chunk_row"][chunks]
    lengths = record["draft_chunk_len"][chunks]
    ends = record["draft_chunk_start"][chunks] + lengths
    if header.num_draft_tokens:
        tokens = slice(0, header.num_draft_tokens)
        positions = record["draft_position"][tokens]
        q_start = record["draft_q_start"][: header.num_draft_chunks + 1]
        of_row = rows.repeat_interleave(lengths, output_size=header.num_draft_tokens)
        drafter.feed(
            PassInputs(
                input_ids=state.tokens[of_row, positions],
                positions=positions,
                slots=record["draft_slot"][tokens],
                q_start=q_start,
                block_table=state.block_table[rows],
                max_q_len=int(lengths.max()),
                max_context=int(ends.max()),
            )
        )
    state.draft_len[rows] = ends


def last_rows(slot: RingSlot, header: Header) -> tuple[list[int], Tensor]:
    """Prompt chunks that end their prompt: `(their indices among the chunks, their last flat rows [F] int64)`."""
    final = slot.views["chunk_is_last"][: header.num_prefill].tolist()
    chunks = [i for i, is_last in enumerate(final) if is_last]
    ends = slot.views["prefill_q_start"][1 : header.num_prefill + 1]
    return chunks, ends[torch.tensor(chunks, dtype=torch.int64)] - 1
