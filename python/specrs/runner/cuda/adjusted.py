"""Masks, penalties, grammars and log probabilities between logits and draw, on the device. Draws by the same kernels.

Ops of `runner.sampling_state` on device tensors, outside graphs: few requests have any of these. They allocate, and a
grammar reads each drafted token back, because its matcher lives on the host; nothing else here waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specrs.runner.cuda.context import Context
from specrs.runner.cuda.drafting import sample_draft
from specrs.runner.cuda.entries import Iteration, flat_rows
from specrs.runner.cuda.iteration import Adjusted, accept_and_update
from specrs.runner.cuda.logprobs import entry_logprobs
from specrs.runner.cuda.sampling_state import EntrySampling, SamplingState
from specrs.runner.cuda.shapes import Shape
from specrs.runner.cuda.slots import TensorSlot
from specrs.transfer import to_device


def entry_sampling(
    ctx: Context,
    sampling: SamplingState,
    planned: Sequence[int],
    rows: Sequence[int],
    max_context: int,
    slot: TensorSlot,
    first: int = 0,
) -> EntrySampling:
    """What the prepared iteration's entries, from the launch's entry `first` on, ask for; views of the buffers that
    `prepare` has filled."""
    b, count = ctx.buffers, len(planned)
    it = Iteration(
        rows=b.row[:count],
        planned=tuple(planned),
        flat=flat_rows(tuple(planned), b.row.device),
        num_tokens=b.n[:count],
        num_drafts=b.k[:count],
        alive=b.alive[:count],
        capacity=b.capacity[:count],
        block_table=b.table[:count],
        block_size=ctx.sizes.block_size,
        max_context=min(max_context, ctx.max_model_len),
    )
    return sampling.for_entries(ctx.state, it, rows, slot, first)


def draft_adjusted(ctx: Context, i: int, count: int, sampling: EntrySampling, on_host: Sequence[bool]) -> None:
    """Adjust the logits of pass i in place and draw its tokens; q is what was drawn from. Drafts that are `on_host`
    stay."""
    b, it = ctx.buffers, sampling.it
    logits = b.draft_logits[i - 1, :count]
    top = logits.amax(dim=-1)  # the fault flag is of raw logits: a mask may well forbid everything else
    entries = torch.arange(count, device=logits.device)
    forbidden = None
    if sampling.grammar is not None:
        forbidden = sampling.grammar.forbidden(torch.arange(count), torch.full((count,), i - 1))
    adjusted = sampling.adjust(logits, entries, b.draft_draws[i - 1, :count], _on(logits, forbidden))
    if adjusted is not logits:
        logits.copy_(adjusted)
    sample_draft(ctx, i, count)
    b.draft_top[i - 1, :count].copy_(top)
    live = it.num_drafts[:count] >= i
    if any(on_host):
        live &= to_device(~torch.tensor(on_host[:count]), live.device)
    # Seen by the penalties of the next pass; `assemble` writes the same again.
    positions = torch.where(live, b.draft_draws[i - 1, :count], ctx.state.scratch_column)
    ctx.state.tokens[it.rows[:count], positions] = b.drawn[i - 1, :count]
    if sampling.grammar is not None:
        sampling.grammar.observe(b.drawn[i - 1, :count], live)


def accept_adjusted(
    ctx: Context,
    shape: Shape,
    sampling: EntrySampling,
    slot: TensorSlot,
    first: int,
    logprobs_mode: str,
    prompts: Tensor | None = None,
) -> None:
    """Adjust the target's logits, verify, update, and report log probabilities for the entries from `first` on;
    `prompts` as of `accept_and_update`."""
    b, it = ctx.buffers, sampling.it
    flat = it.flat
    total = len(flat.entry)
    raw = b.logits[:total]
    forbidden = None
    if sampling.grammar is not None:
        on_host = flat_rows(it.planned)
        forbidden = sampling.grammar.forbidden(on_host.entry, on_host.offset)
        sampling.grammar.finish()
    adjusted = sampling.adjust(raw, flat.entry, b.verify_draws[:total], _on(raw, forbidden))
    exact = Shape(shape.batch, shape.max_k, total, shape.tail)
    raw_top = None if adjusted is raw else raw.amax(dim=-1)
    min_len = None if sampling.min_len is None else ctx.state.min_len.index_copy(0, it.rows, sampling.min_len)
    accept_and_update(ctx, exact, first, Adjusted(adjusted, raw_top, min_len), prompts)
    if sampling.num_logprobs is not None:
        tokens = b.emitted[: len(it.planned), : shape.max_k + 1].clone()
        entries = range(first, first + len(it.planned))
        slot.logprobs.update(entry_logprobs(logprobs_mode, entries, raw, adjusted, tokens, sampling))


def _on(logits: Tensor, forbidden: Tensor | None) -> Tensor | None:
    return None if forbidden is None else to_device(forbidden, logits.device)
