"""Masks, penalties, grammars and log probabilities between logits and sampling on a GPU, outside CUDA graphs.

Few requests have any of these, so they are ops of `sampling.sampling_state` that allocate. A grammar copies each
drafted token to the host, where its matcher lives, and waits for it. Nothing else here waits. Tokens are drawn by the
same kernels as in graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specrs.backends.cuda.context import Context
from specrs.backends.cuda.drafting import sample_draft
from specrs.backends.cuda.iteration import Adjusted, accept_and_update
from specrs.backends.cuda.sampling.logprobs import sequence_logprobs
from specrs.backends.cuda.sampling.sampling_state import SamplingState, SequenceSampling
from specrs.backends.cuda.sequences import Iteration, flat_rows
from specrs.backends.cuda.shapes import Shape
from specrs.backends.cuda.slots import TensorSlot
from specrs.transfer import to_device


def sequence_sampling(
    ctx: Context,
    sampling: SamplingState,
    planned: Sequence[int],
    rows: Sequence[int],
    max_context: int,
    slot: TensorSlot,
    first: int = 0,
) -> SequenceSampling:
    """Return the adjustments for the sequences of the prepared iteration, whose first is sequence `first` of the step.

    `planned` has their numbers of drafts and `rows` their state rows. The result has views of the buffers that
    `prepare` filled.
    """
    b, count = ctx.buffers, len(planned)
    it = Iteration(
        rows=b.row[:count],
        planned=tuple(planned),
        flat=flat_rows(tuple(planned), b.row.device),
        num_drafts=b.k[:count],
        max_context=min(max_context, ctx.max_model_len),
    )
    return sampling.for_sequences(ctx.state, it, rows, slot, first)


def draft_adjusted(ctx: Context, i: int, count: int, sampling: SequenceSampling, on_host: Sequence[bool]) -> None:
    """Adjust the logits of draft pass i in place, and draw its tokens from them. They are q for the rejection rule.

    Sequences whose drafts are `on_host` keep those drafts. Mutates buffers and row state.
    """
    b, it = ctx.buffers, sampling.it
    logits = b.draft_logits[i - 1, :count]
    top = logits.amax(dim=-1)  # faults are found in raw logits, because masks add -inf
    sequences = torch.arange(count, device=logits.device)
    masks = None
    if sampling.grammar is not None:
        masks = sampling.grammar.masks(torch.arange(count), torch.full((count,), i - 1), logits.device)
    adjusted = sampling.adjust(logits, sequences, b.draft_draws[i - 1, :count], masks)
    if adjusted is not logits:
        logits.copy_(adjusted)
    sample_draft(ctx, i, count)
    b.draft_top[i - 1, :count].copy_(top)
    live = it.num_drafts[:count] >= i
    if any(on_host):
        live &= to_device(~torch.tensor(on_host[:count]), live.device)
    # The penalties of the next pass need these tokens. `assemble` writes them again.
    positions = torch.where(live, b.draft_draws[i - 1, :count], ctx.state.scratch_column)
    ctx.state.tokens[it.rows[:count], positions] = b.drawn[i - 1, :count]
    if sampling.grammar is not None:
        sampling.grammar.observe(b.drawn[i - 1, :count], live)


def accept_adjusted(
    ctx: Context,
    shape: Shape,
    sampling: SequenceSampling,
    slot: TensorSlot,
    first: int,
    logprobs_mode: str,
    prompts: Tensor | None = None,
) -> None:
    """Adjust the target's logits, verify the drafts, update row state, and write log probabilities into `slot`.

    The first sequence here is sequence `first` of the step. `prompts` `[count, L, hidden]` are hidden states of the
    last tokens of prompts that end; None: this is a decode iteration.
    """
    b, it = ctx.buffers, sampling.it
    flat = it.flat
    total = len(flat.sequence)
    raw = b.logits[:total]
    masks = None
    if sampling.grammar is not None:
        on_host = flat_rows(it.planned)
        masks = sampling.grammar.masks(on_host.sequence, on_host.offset, raw.device)
        sampling.grammar.finish()
    adjusted = sampling.adjust(raw, flat.sequence, b.verify_draws[:total], masks)
    exact = Shape(shape.batch, shape.max_k, total, shape.logits_mode)
    raw_top = None if adjusted is raw else raw.amax(dim=-1)
    min_len = None if sampling.min_len is None else ctx.state.min_len.index_copy(0, it.rows, sampling.min_len)
    accept_and_update(ctx, exact, first, Adjusted(adjusted, raw_top, min_len), prompts)
    if sampling.num_logprobs is not None:
        tokens = b.emitted[: len(it.planned), : shape.max_k + 1].clone()
        sequences = range(first, first + len(it.planned))
        slot.logprobs.update(sequence_logprobs(logprobs_mode, sequences, raw, adjusted, tokens, sampling))
