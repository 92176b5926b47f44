"""Masks, penalties, grammars and log probabilities between logits and sampling on a GPU, outside CUDA graphs.

Few requests have any of these. Kernels change logits of their rows alone, and the rows of other requests cost what they
cost without. A grammar copies each drafted token to the host, where its matcher lives, and waits for it when the next
pass is enqueued. Nothing else here waits. Tokens are drawn by the same kernels as in graphs.
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
    b, it, plan = ctx.buffers, sampling.it, sampling.plan
    at = (i - 1, slice(0, count))
    rows = None if plan is None else plan.drafting(count)
    if rows is None:
        sample_draft(ctx, i, count)
        return
    logits, grammar, masks = b.draft_logits[at], sampling.grammar, None
    if grammar is not None:
        masks = grammar.masks(torch.arange(count), torch.full((count,), i - 1), logits.device)
    raw_top = sampling.adjust(logits, b.draft_draws[at], rows, b.n, masks, ctx.scratch)
    sample_draft(ctx, i, count)
    b.draft_top[at].index_copy_(0, rows.row, raw_top)  # faults are found in raw logits, because masks add -inf
    assert plan is not None
    if grammar is None and not plan.reads_tokens:
        return
    live = it.num_drafts[:count] >= i
    if any(on_host):
        live &= to_device(~torch.tensor(on_host[:count]), live.device)
    if plan.reads_tokens:
        # Adjustments of the next pass need these tokens. `assemble` writes them again.
        positions = torch.where(live, b.draft_draws[at], ctx.state.scratch_column)
        ctx.state.tokens[it.rows[:count], positions] = b.drawn[at]
    if grammar is not None:
        grammar.observe(b.drawn[at], live)


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
    b, it, plan = ctx.buffers, sampling.it, sampling.plan
    total = len(it.flat.sequence)
    logits, adjusted, kept = b.logits[:total], None, None
    if plan is not None:
        masks = None
        if sampling.grammar is not None:
            on_host = flat_rows(it.planned)
            masks = sampling.grammar.masks(on_host.sequence, on_host.offset, logits.device)
            sampling.grammar.finish()
        if logprobs_mode.startswith("raw"):
            kept = plan.rows_of(sampling.logprobs)
        raw = None if kept is None else logits[kept]
        raw_top = sampling.adjust(logits, b.verify_draws[:total], plan.verify, b.n, masks, ctx.scratch)
        min_len = None if sampling.min_len is None else ctx.state.min_len.index_copy(0, it.rows, sampling.min_len)
        adjusted = Adjusted(plan.verify.row, raw_top, min_len)
    exact = Shape(shape.batch, shape.max_k, total, shape.logits_mode)
    accept_and_update(ctx, exact, first, adjusted, prompts)
    if not sampling.logprobs:
        return
    if kept is not None and raw is not None:
        logits.index_copy_(0, kept, raw)
    tokens = b.emitted[: len(it.planned), : shape.max_k + 1]
    for sequence, found in sequence_logprobs(logprobs_mode, logits, tokens, sampling):
        slot.logprobs[first + sequence] = found
