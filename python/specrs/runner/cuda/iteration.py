"""One iteration as functions that a CUDA graph can hold: prepare, draft, verify, accept_and_update.

They enqueue ops on persistent buffers and return nothing: no allocation, no shape that depends on data, no value read
back, no copy between devices. What differs between launches is read on the device; what is fixed in a `Shape` is fixed
in its graph. `runner.iteration` and `runner.accept` are the same on a CPU, and the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.core import PURPOSE_DRAFT, PURPOSE_GUMBEL
from specrs.drafters.base import Drafter, host_drafts, model_drafter
from specrs.kernels.cuda.accept import AtRates
from specrs.kernels.cuda.draw import draw
from specrs.kernels.cuda.prepare import PlannedEntries, Sizes, assemble_drafts, prepare_iteration
from specrs.kernels.cuda.rules import verify_coupled, verify_greedy, verify_rejection, verify_synthetic
from specrs.kernels.cuda.sampling_cut import sampling_cut
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.kernels.cuda.sampling_structs import Accepted, Cut, Distribution, Drafted, RowParams
from specrs.kernels.cuda.update import Decided, update_rows
from specrs.models.base import Model
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.runner.cuda.buffers import Buffers, DeviceRecord
from specrs.runner.cuda.shapes import Shape, Tail
from specrs.runner.row_state import RowState


@dataclass(frozen=True, slots=True)
class Context:
    """All that an iteration reads and writes; fixed for the engine's life, so its addresses are too."""

    state: RowState
    params: RowParams
    record: DeviceRecord
    buffers: Buffers
    scratch: SamplingScratch
    target: Model
    kv_cache: KVCache
    drafter: Drafter | None
    sizes: Sizes
    max_model_len: int
    rule: str  # rejection or coupled; the same with a point mass as q, and then coupled
    rates: Tensor | None  # [K] fp32, for timing only: drafts stand at these rates, whatever the models say


@dataclass(frozen=True, slots=True)
class LaunchEntries:
    """Which of the launch's entries an iteration is for: decode entries, or the prompt chunks behind them."""

    count: Tensor  # [1], in the record's header
    first: int = 0
    emits: Tensor | None = None  # [>= B] 1 for the last chunk of a prompt


def prepare(ctx: Context, shape: Shape, entries: LaunchEntries) -> None:
    """Lengths, guards, positions and slots of the iteration, from row state and the device's record."""
    views, first = ctx.record.views, entries.first
    planned = PlannedEntries(
        count=entries.count,
        row=views["entry_row"][first:],
        k=views["entry_k"][first:],
        capacity=views["entry_capacity"][first:],
        emits=entries.emits,
    )
    prepare_iteration(ctx.state, planned, ctx.buffers.inputs(shape), ctx.sizes)


def draft(ctx: Context, shape: Shape) -> None:
    """The drafts of a shape into `drawn`: by passes, each feeding the token that the one before drew, or from the
    record."""
    if ctx.drafter is not None and ctx.drafter.on_host:
        take_drafts(ctx, shape)
        return
    for i in range(1, shape.max_k + 1):
        draft_pass(ctx, i, shape.batch, shape.tail)


def take_drafts(ctx: Context, shape: Shape) -> None:
    """The drafts that the record has, into `drawn`."""
    b, batch, k = ctx.buffers, shape.batch, shape.max_k
    b.drawn[:k, :batch].copy_(host_drafts(ctx.record.views, ctx.state.limit.shape[0] - 1)[:batch, :k].t())
    b.draft_top[:k, :batch].zero_()  # without logits there is no fault


def draft_pass(ctx: Context, i: int, batch: int, tail: Tail) -> None:
    """Pass i >= 1 for the first `batch` entries; writes row i - 1 of `drawn`, or only of `draft_logits` for LOGITS."""
    b, drafter = ctx.buffers, model_drafter(ctx.drafter)
    rows = ctx.sizes.max_draft_lag if i == 1 else 1
    ids, positions, slots = (
        (b.first_ids[: batch * rows], b.first_positions[: batch * rows], b.first_slots[: batch * rows])
        if i == 1
        else (b.drawn[i - 2, :batch], b.draft_positions[i - 1, :batch], b.draft_slots[i - 1, :batch])
    )
    known = drafter.model.vocab_size
    if known < drafter.vocab_size:
        ids = torch.clamp(ids, max=known - 1, out=b.draft_ids[: len(ids)])
    inputs = PassInputs(
        input_ids=ids,
        positions=positions,
        slots=slots,
        q_start=b.uniform_start[rows, : batch + 1],
        block_table=b.table[:batch],
        max_q_len=rows,
        max_context=ctx.max_model_len,
    )
    hidden = drafter.model.forward(inputs, drafter.kv_cache).final[rows - 1 :: rows]
    if tail is Tail.GREEDY:
        at = (i - 1, slice(0, batch))
        drafter.model.compute_argmax(hidden, b.drawn[at], b.draft_top[at], min(known, drafter.vocab_size))
        return
    logits = b.draft_logits[i - 1, :batch]
    drafter.model.compute_logits(hidden, logits[:, :known])
    if tail is Tail.SAMPLED:
        sample_draft(ctx, i, batch)


def sample_draft(ctx: Context, i: int, batch: int) -> None:
    """Draw pass i's tokens from its logits; cut and normaliser stay beside the logits, which together are q."""
    b, at = ctx.buffers, (i - 1, slice(0, batch))
    logits, rows, cut = b.draft_logits[at], b.row[:batch], Cut(b.draft_cut[at], b.draft_lse[at], b.draft_top[at])
    sampling_cut(logits, rows, ctx.params.values, cut, ctx.scratch, coarse=True)
    purpose = PURPOSE_GUMBEL if ctx.rule == "coupled" else PURPOSE_DRAFT
    draw(logits, rows, ctx.params, cut.cut, b.draft_draws[at], purpose, b.drawn[at], ctx.scratch)


def verify(ctx: Context, shape: Shape) -> None:
    """One target pass over t_{n-1}, d_1 .. d_K of every entry; `logits`, or `target_ids` and `target_top` if greedy."""
    if shape.max_k:
        assemble(ctx, shape)
    verify_pass(ctx, shape.batch, shape.rows, shape.max_k + 1, greedy=shape.tail is Tail.GREEDY)


def assemble(ctx: Context, shape: Shape) -> None:
    """The drafts, into the inputs of verification and row state."""
    b, batch, k = ctx.buffers, shape.batch, shape.max_k
    ids, drafts = b.verify_ids[: shape.rows], b.drafts[:batch, :k]
    assemble_drafts(b.drawn[:k, :batch], b.entries(batch), ctx.state.tokens, ids, drafts, ctx.sizes.max_k)


def verify_pass(ctx: Context, batch: int, rows: int, max_q_len: int, *, greedy: bool) -> None:
    """The target's forward pass over `rows` flat rows, with an argmax behind its LM head if `greedy`."""
    b = ctx.buffers
    inputs = PassInputs(
        input_ids=b.verify_ids[:rows],
        positions=b.verify_positions[:rows],
        slots=b.verify_slots[:rows],
        q_start=b.q_start[: batch + 1],
        block_table=b.table[:batch],
        max_q_len=max_q_len,
        max_context=ctx.max_model_len,
    )
    lm_head(ctx, ctx.target.forward(inputs, ctx.kv_cache).final, greedy=greedy)


def lm_head(ctx: Context, hidden: Tensor, *, greedy: bool) -> None:
    """`logits` of the target's hidden rows `[N, hidden]`, or `target_ids` and `target_top` if greedy."""
    b, rows = ctx.buffers, hidden.shape[0]
    if greedy:
        ctx.target.compute_argmax(hidden, b.target_ids[:rows], b.target_top[:rows])
    else:
        ctx.target.compute_logits(hidden, b.logits[:rows])


def accept_and_update(ctx: Context, shape: Shape, first: int = 0, logits: Tensor | None = None) -> None:
    """Verify the drafts by the rule, commit, report to the results of the entries from `first` on.

    `logits` `[rows, V]` take the place of the buffer's where masks or penalties have made others of them.
    """
    accept(ctx, shape, ctx.buffers.logits[: shape.rows] if logits is None else logits)
    b, batch, k = ctx.buffers, shape.batch, shape.max_k
    decided = Decided(
        accepted=b.accepted[:batch],
        emitted=b.emitted[:batch, : k + 1],
        target_top=b.target_top[: shape.rows],
        draft_top=b.draft_top[:k, :batch],
        num_unfed=None if ctx.drafter is None else ctx.drafter.num_unfed_drafts,
    )
    update_rows(ctx.state, b.entries(batch), decided, ctx.record.results_view.narrow(first, batch))


def accept(ctx: Context, shape: Shape, logits: Tensor) -> None:
    """`accepted` and `emitted` by the rule; greedy shapes find the target's own tokens in `target_ids`.

    Filters that a row has not cost it nothing but launches, so one graph serves every mixture of rows.
    """
    b, batch, k, at = ctx.buffers, shape.batch, shape.max_k, slice(0, shape.rows)
    drafted = Drafted(b.q_start[: batch + 1], b.drafts[:batch, :k], b.k[:batch])
    row, n, out = b.row[:batch], b.n[:batch], Accepted(b.accepted[:batch], b.emitted[:batch, : k + 1])
    own = b.target_ids[at]
    if shape.tail is Tail.GREEDY:
        verify_greedy(own, drafted, out)
    else:
        rows, cut = b.verify_rows[at], Cut(b.target_cut[at], b.target_lse[at], b.target_top[at])
        sampling_cut(logits, rows, ctx.params.values, cut, ctx.scratch, coarse=False)
        own = ctx.scratch.ids[at]
        if ctx.rule == "coupled":
            verify_coupled(logits, rows, ctx.params, cut.cut, b.verify_draws[at], drafted, out, ctx.scratch)
        else:
            p = Distribution(logits, cut.cut, cut.lse)
            q = Distribution(b.draft_logits[:k, :batch], b.draft_cut[:k, :batch], b.draft_lse[:k, :batch])
            verify_rejection(p, q, drafted, row, n, ctx.params, out, ctx.scratch)
    if ctx.rates is not None:  # behind the rule, whose time is to be measured
        verify_synthetic(own, drafted, AtRates(ctx.rates, ctx.params.seeds, row, n), out)


def run(ctx: Context, shape: Shape, entries: LaunchEntries) -> None:
    """A whole decode iteration."""
    prepare(ctx, shape, entries)
    if shape.max_k:
        draft(ctx, shape)
    verify(ctx, shape)
    accept_and_update(ctx, shape)
