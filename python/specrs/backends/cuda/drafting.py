"""Draft passes of an iteration as functions that a CUDA graph can capture: see `iteration`. Verifies nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from specrs.backends.cuda.context import Context
from specrs.backends.cuda.draft_passes import DraftPasses
from specrs.backends.cuda.shapes import LogitsMode, Shape
from specrs.core import PURPOSE_DRAFT, PURPOSE_GUMBEL
from specrs.kernels.cuda.draw import draw
from specrs.kernels.cuda.sampling_cut import sampling_cut
from specrs.kernels.cuda.sampling_structs import Cut
from specrs.kernels.cuda.spread_logits import spread_logits
from specrs.models.inputs import PassInputs


def draft(ctx: Context, shape: Shape) -> None:
    """Run the draft passes of a shape, and write their tokens into `drawn`. Each pass feeds the token that the previous
    pass drew; in parallel drafting, one pass makes all. Sequences whose drafts are in the record are masked."""
    for i in range(1, (min(1, shape.depth) if ctx.in_parallel else shape.depth) + 1):
        draft_pass(ctx, i, shape.batch, shape.logits_mode)


def draft_pass(ctx: Context, i: int, batch: int, logits_mode: LogitsMode) -> None:
    """Run draft pass i >= 1 for the first `batch` sequences. Writes row i - 1 of `drawn`, or with `LogitsMode.LOGITS`
    only that of `draft_logits`. A pass that makes all drafts writes all rows."""
    b, passes, rows = ctx.buffers, _passes(ctx), ctx.sizes.first_pass_rows if i == 1 else 1
    ids, positions, slots = (
        (b.first_ids[: batch * rows], b.first_positions[: batch * rows], b.first_slots[: batch * rows])
        if i == 1
        else (b.drawn[i - 2, :batch], b.draft_positions[i - 1, :batch], b.draft_slots[i - 1, :batch])
    )
    inputs = PassInputs(
        input_ids=passes.known(ids, b.draft_ids[: len(ids)]),
        positions=positions,
        slots=slots,
        q_start=b.uniform_start[rows, : batch + 1],
        block_table=b.table[:batch],
        max_q_len=rows,
        max_context=ctx.max_model_len,
        k_start=_k_start(ctx, i, batch),
    )
    final = passes.forward(b, i, inputs)
    if ctx.in_parallel:
        _choose_all(ctx, final.view(batch, rows, -1), logits_mode)
    else:
        _choose(ctx, i, final[rows - 1 :: rows], logits_mode)


def sample_draft(ctx: Context, i: int, batch: int) -> None:
    """Draw draft i of the first `batch` sequences from its logits. Stores threshold and normaliser next to the logits;
    together they are q of the rejection rule."""
    b, at = ctx.buffers, (i - 1, slice(0, batch))
    logits, rows, cut = b.draft_logits[at], b.row[:batch], Cut(b.draft_cut[at], b.draft_lse[at], b.draft_top[at])
    sampling_cut(logits, rows, ctx.params.values, cut, ctx.scratch, coarse=True)
    purpose = PURPOSE_GUMBEL if ctx.rule == "coupled" else PURPOSE_DRAFT
    draw(logits, rows, ctx.params, cut.cut, b.draft_draws[at], purpose, b.drawn[at], ctx.scratch)


def _k_start(ctx: Context, i: int, batch: int) -> Tensor | None:
    """Return the position at which each sequence's draft KV begins, `[batch]`; None: 0. Pass 1 looks it up for later
    ones."""
    if ctx.draft_start is None:
        return None
    begins = ctx.buffers.k_start[:batch]
    return torch.index_select(ctx.draft_start, 0, ctx.buffers.row[:batch], out=begins) if i == 1 else begins


def _passes(ctx: Context) -> DraftPasses:
    assert ctx.drafter is not None, "steps without a drafter have no draft passes"
    return ctx.drafter


def _choose(ctx: Context, i: int, hidden: Tensor, logits_mode: LogitsMode) -> None:
    """Choose the tokens of pass i from final states `hidden` `[batch, hidden]`."""
    b, passes, at = ctx.buffers, _passes(ctx), (i - 1, slice(0, hidden.shape[0]))
    if logits_mode is LogitsMode.GREEDY:
        if passes.reduced is None:
            passes.compute_argmax(hidden, b.drawn[at], b.draft_top[at])
            return
        own = b.own_ids[: hidden.shape[0]]
        passes.compute_argmax(hidden, own, b.draft_top[at])
        torch.index_select(passes.reduced.target_ids, 0, own, out=b.drawn[at])
        return
    _logits(ctx, hidden, b.draft_logits[at])
    if logits_mode is LogitsMode.SAMPLED:
        sample_draft(ctx, i, hidden.shape[0])


def _choose_all(ctx: Context, final: Tensor, logits_mode: LogitsMode) -> None:
    """Choose all drafts from the last K rows of each sequence in `final` `[batch, rows, hidden]`."""
    b, k, batch = ctx.buffers, ctx.sizes.max_k, final.shape[0]
    hidden = b.left[: batch * k]
    hidden.view(batch, k, -1).copy_(final[:, -k:])
    if logits_mode is LogitsMode.GREEDY:
        ids, top = b.own_ids[: batch * k], b.own_top[: batch * k]
        _passes(ctx).compute_argmax(hidden, ids, top)
        b.drawn[:, :batch].copy_(ids.view(batch, k).t())
        b.draft_top[:, :batch].copy_(top.view(batch, k).t())
        return
    _logits(ctx, hidden, b.draft_logits[:, :batch].transpose(0, 1).view(batch * k, -1))
    for i in range(1, k + 1 if logits_mode is LogitsMode.SAMPLED else 1):
        sample_draft(ctx, i, batch)


def _logits(ctx: Context, hidden: Tensor, out: Tensor) -> None:
    """Write logits over the target's ids into `out` `[N, V]`."""
    passes = _passes(ctx)
    if passes.reduced is None:
        passes.compute_logits(hidden, out)
        return
    own = ctx.buffers.own_logits[: hidden.shape[0]]
    passes.compute_logits(hidden, own)
    spread_logits(own, passes.reduced.source, out)
