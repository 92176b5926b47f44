"""The draft passes of an iteration as functions that a CUDA graph can hold, see `iteration`. Verifies nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from specrs.core import PURPOSE_DRAFT, PURPOSE_GUMBEL
from specrs.drafters.base import device_drafter, model_drafter
from specrs.kernels.cuda.draw import draw
from specrs.kernels.cuda.hidden_states import gather_states
from specrs.kernels.cuda.sampling_cut import sampling_cut
from specrs.kernels.cuda.sampling_structs import Cut
from specrs.kernels.cuda.spread_logits import spread_logits
from specrs.models.base import TorchModel
from specrs.models.eagle3_cuda import CudaEagle3Head
from specrs.models.inputs import PassInputs
from specrs.runner.cuda.context import Context
from specrs.runner.cuda.shapes import Shape, Tail


def draft(ctx: Context, shape: Shape) -> None:
    """The drafts of a shape into `drawn`, by passes, each feeding the token that the one before drew, or by one for all
    of them; entries whose drafts the record has are masked in them."""
    for i in range(1, (min(1, shape.depth) if ctx.in_parallel else shape.depth) + 1):
        draft_pass(ctx, i, shape.batch, shape.tail)


def draft_pass(ctx: Context, i: int, batch: int, tail: Tail) -> None:
    """Pass i >= 1 for the first `batch` entries; writes row i - 1 of `drawn`, or only of `draft_logits` for LOGITS. One
    that makes all drafts writes all rows."""
    b, rows = ctx.buffers, ctx.sizes.first_pass_rows if i == 1 else 1
    ids, positions, slots = (
        (b.first_ids[: batch * rows], b.first_positions[: batch * rows], b.first_slots[: batch * rows])
        if i == 1
        else (b.drawn[i - 2, :batch], b.draft_positions[i - 1, :batch], b.draft_slots[i - 1, :batch])
    )
    inputs = PassInputs(
        input_ids=_known(ctx, ids),
        positions=positions,
        slots=slots,
        q_start=b.uniform_start[rows, : batch + 1],
        block_table=b.table[:batch],
        max_q_len=rows,
        max_context=ctx.max_model_len,
        k_start=_k_start(ctx, i, batch),
    )
    final = _forward(ctx, i, inputs)
    if ctx.in_parallel:
        _choose_all(ctx, final.view(batch, rows, -1), tail)
    else:
        _choose(ctx, i, final[rows - 1 :: rows], tail)


def sample_draft(ctx: Context, i: int, batch: int) -> None:
    """Draw draft i of the first `batch` entries from its logits; cut and normaliser stay beside the logits, which
    together are q."""
    b, at = ctx.buffers, (i - 1, slice(0, batch))
    logits, rows, cut = b.draft_logits[at], b.row[:batch], Cut(b.draft_cut[at], b.draft_lse[at], b.draft_top[at])
    sampling_cut(logits, rows, ctx.params.values, cut, ctx.scratch, coarse=True)
    purpose = PURPOSE_GUMBEL if ctx.rule == "coupled" else PURPOSE_DRAFT
    draw(logits, rows, ctx.params, cut.cut, b.draft_draws[at], purpose, b.drawn[at], ctx.scratch)


def _k_start(ctx: Context, i: int, batch: int) -> Tensor | None:
    """Where the draft KV of the entries begins, as pass 1 finds it."""
    if ctx.draft_start is None:
        return None
    begins = ctx.buffers.k_start[:batch]
    return torch.index_select(ctx.draft_start, 0, ctx.buffers.row[:batch], out=begins) if i == 1 else begins


def _known(ctx: Context, ids: Tensor) -> Tensor:
    """The drafter's ids for the target's; a head has the target's embedding."""
    out = ctx.buffers.draft_ids[: len(ids)]
    if ctx.fed_ids is not None:
        return torch.index_select(ctx.fed_ids, 0, ids, out=out)
    if ctx.head is None:
        drafter = model_drafter(ctx.drafter)
        if drafter.model.vocab_size < drafter.vocab_size:
            return torch.clamp(ids, max=drafter.model.vocab_size - 1, out=out)
    return ids


def _forward(ctx: Context, i: int, inputs: PassInputs) -> Tensor:
    """The final states of pass i, `[N, hidden]`; of a head's what the next pass reads stays in `left`."""
    b, drafter = ctx.buffers, device_drafter(ctx.drafter)
    if ctx.head is None:
        return model_drafter(drafter).model.forward(inputs, drafter.kv_cache).final
    batch, rows = inputs.block_table.shape[0], inputs.max_q_len
    left = b.left[:batch]
    if i == 1:
        states = b.first_states[: batch * rows]
        gather_states(ctx.head.rows, b.row[:batch], inputs.positions, states)
        hidden = ctx.head.model.fuse(states)
    else:
        hidden = left
    recurrent, final = ctx.head.model.forward(inputs, hidden, drafter.kv_cache, b.k_start[:batch])
    left.copy_(recurrent[rows - 1 :: rows])
    return final


def _choose(ctx: Context, i: int, hidden: Tensor, tail: Tail) -> None:
    """The tokens of pass i from `hidden` `[batch, hidden]`."""
    b, at = ctx.buffers, (i - 1, slice(0, hidden.shape[0]))
    if tail is Tail.GREEDY:
        if ctx.reduced is None:
            _argmax(ctx, hidden, b.drawn[at], b.draft_top[at])
            return
        own = b.own_ids[: hidden.shape[0]]
        _argmax(ctx, hidden, own, b.draft_top[at])
        torch.index_select(ctx.reduced.target_ids, 0, own, out=b.drawn[at])
        return
    _logits(ctx, hidden, b.draft_logits[at])
    if tail is Tail.SAMPLED:
        sample_draft(ctx, i, hidden.shape[0])


def _choose_all(ctx: Context, final: Tensor, tail: Tail) -> None:
    """All drafts from the last K rows of each entry, `final` `[batch, rows, hidden]`."""
    b, k, batch = ctx.buffers, ctx.sizes.max_k, final.shape[0]
    hidden = b.left[: batch * k]
    hidden.view(batch, k, -1).copy_(final[:, -k:])
    if tail is Tail.GREEDY:
        ids, top = b.own_ids[: batch * k], b.own_top[: batch * k]
        _argmax(ctx, hidden, ids, top)
        b.drawn[:, :batch].copy_(ids.view(batch, k).t())
        b.draft_top[:, :batch].copy_(top.view(batch, k).t())
        return
    _logits(ctx, hidden, b.draft_logits[:, :batch].transpose(0, 1).view(batch * k, -1))
    for i in range(1, k + 1 if tail is Tail.SAMPLED else 1):
        sample_draft(ctx, i, batch)


def _argmax(ctx: Context, hidden: Tensor, ids: Tensor, top: Tensor) -> None:
    """The drafter's own ids."""
    if ctx.head is not None:
        ctx.head.model.compute_argmax(hidden, ids, top)
        return
    drafter = model_drafter(ctx.drafter)
    known = None if ctx.reduced is not None else min(drafter.model.vocab_size, drafter.vocab_size)
    drafter.model.compute_argmax(hidden, ids, top, known)


def _logits(ctx: Context, hidden: Tensor, out: Tensor) -> None:
    """Logits over the target's ids, `[N, V]`."""
    model: TorchModel | CudaEagle3Head = model_drafter(ctx.drafter).model if ctx.head is None else ctx.head.model
    if ctx.reduced is None:
        known = out.shape[1] if ctx.head is not None else model_drafter(ctx.drafter).model.vocab_size
        model.compute_logits(hidden, out[:, :known])
        return
    own = ctx.buffers.own_logits[: hidden.shape[0]]
    model.compute_logits(hidden, own)
    spread_logits(own, ctx.reduced.source, out)
