"""Iteration on a GPU as functions that a CUDA graph can capture: prepare, draft, verify, accept_and_update.

They enqueue ops on persistent buffers and return nothing. They allocate nothing, have no shape that depends on data,
read no value back, and copy nothing between devices. Values that differ between steps are read on the device. A
`Shape`, and so its graph, fixes the rest. docs/start.md has the rules of an iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from specrs.backends.cuda.context import Context, StepSequences, all_sequences
from specrs.backends.cuda.drafting import draft
from specrs.backends.cuda.shapes import LogitsMode, MergedShape, Shape
from specrs.kernels.cuda.accept import AtRates
from specrs.kernels.cuda.attention_config import MAX_VERIFY_ROWS
from specrs.kernels.cuda.group_rows import prepare_groups
from specrs.kernels.cuda.hidden_states import Kept, keep_states
from specrs.kernels.cuda.prepare import PlannedSequences, Proposed, assemble_drafts, prepare_iteration
from specrs.kernels.cuda.rules import verify_coupled, verify_greedy, verify_rejection, verify_synthetic
from specrs.kernels.cuda.sampling_cut import sampling_cut
from specrs.kernels.cuda.sampling_structs import Accepted, Cut, Distribution, Drafted
from specrs.kernels.cuda.update import Decided, update_rows
from specrs.models.inputs import ChunkRows, PassInputs


def prepare(ctx: Context, shape: Shape, sequences: StepSequences) -> None:
    """Compute lengths, guards, positions and slots of the iteration from row state and the device's record."""
    views, first = ctx.record.views, sequences.first
    planned = PlannedSequences(
        count=sequences.count,
        row=views["seq_row"][first:],
        k=views["seq_k"][first:],
        capacity=views["seq_capacity"][first:],
        emits=sequences.emits,
        drafter=None if ctx.proposed is None else views["seq_drafter"][first:],
    )
    hidden = None if ctx.hidden is None else ctx.hidden.rows
    inputs, groups = ctx.buffers.inputs(shape), ctx.buffers.groups(shape.batch, shape.rows)
    prepare_iteration(ctx.state, planned, inputs, ctx.sizes, hidden)
    prepare_groups(ctx.state.group_tables, inputs.sequences, inputs.verify, groups, ctx.sizes.block_size)


def verify(ctx: Context, shape: Shape) -> None:
    """Run the target over t_{n-1}, d_1 .. d_K of every sequence. Writes `logits`, or if greedy `target_ids` and
    `target_top`."""
    if shape.max_k:
        assemble(ctx, shape)
    verify_pass(ctx, shape.batch, shape.rows, shape.max_k + 1, greedy=shape.logits_mode is LogitsMode.GREEDY)


def assemble(ctx: Context, shape: Shape) -> None:
    """Write the drafts, drawn or from the record, into the inputs of verification and into row state."""
    b, batch, k = ctx.buffers, shape.batch, shape.max_k
    ids, drafts = b.verify_ids[: shape.rows], b.drafts[:batch, :k]
    proposed = None if ctx.proposed is None else Proposed(b.on_host[:batch], ctx.proposed)
    assemble_drafts(b.drawn[:k, :batch], b.sequences(batch), ctx.state.tokens, ids, drafts, ctx.sizes.max_k, proposed)


def verify_pass(ctx: Context, batch: int, rows: int, max_q_len: int, *, greedy: bool) -> None:
    """Run the target over `rows` flat rows, then its LM head, with an argmax if `greedy`."""
    inputs = _verify_inputs(ctx, batch, rows, max_q_len, rows)
    lm_head(ctx, ctx.target.forward(inputs, ctx.kv_cache, ctx.hidden_layers).final, greedy=greedy)


def _verify_inputs(ctx: Context, batch: int, rows: int, max_q_len: int, all_rows: int) -> PassInputs:
    """Return the inputs of `rows` rows of verification, followed by rows of chunks: `all_rows` in total."""
    b = ctx.buffers
    groups = b.groups(batch, all_rows)
    return PassInputs(
        input_ids=b.verify_ids[:all_rows],
        positions=b.verify_positions[:all_rows],
        slots=b.verify_slots[:all_rows],
        q_start=b.q_start[: batch + 1],
        block_table=b.table[:batch],
        max_q_len=max_q_len,
        max_context=ctx.max_model_len,
        group_slots=groups.slots,
        group_tables=groups.tables,
        device_rows=b.row[:batch],
    )


def lm_head(ctx: Context, hidden: Tensor, *, greedy: bool) -> None:
    """Write `logits` of the target's final states `hidden` `[N, hidden]`, or if greedy `target_ids` and
    `target_top`."""
    b, rows = ctx.buffers, hidden.shape[0]
    if greedy:
        ctx.target.compute_argmax(hidden, b.target_ids[:rows], b.target_top[:rows])
    else:
        ctx.target.compute_logits(hidden, b.logits[:rows])


@dataclass(frozen=True, slots=True)
class Adjusted:
    """Results for sequences whose logits were changed by masks and penalties. They replace the values in buffers and
    row state."""

    rows: Tensor
    """[M] int64, flat rows whose logits were changed."""
    raw_top: Tensor
    """[M] fp32, largest logit of each row in `rows` before masks, biases and penalties."""
    min_len: Tensor | None
    """[R + 1] int64, positions from which stop ids count. None: those of row state."""


def accept_and_update(
    ctx: Context, shape: Shape, first: int = 0, adjusted: Adjusted | None = None, prompts: Tensor | None = None
) -> None:
    """Verify the drafts by the rule, commit tokens, and write results. The first sequence is sequence `first` of the
    step.

    `prompts` `[batch, L, hidden]` are hidden states of the last tokens of prompts that end. None: this is a decode
    iteration, whose hidden states are in the target's buffers.
    """
    b, batch, k = ctx.buffers, shape.batch, shape.max_k
    accept(ctx, shape, b.logits[: shape.rows])
    rows, allowed_top = ctx.state, b.target_top[: shape.rows]
    target_top = allowed_top
    if adjusted is not None:
        # Faults are found in raw logits, because masks add -inf.
        target_top = allowed_top.index_copy(0, adjusted.rows, adjusted.raw_top)
        if adjusted.min_len is not None:
            rows = replace(rows, min_len=adjusted.min_len)
    decided = Decided(
        accepted=b.accepted[:batch],
        emitted=b.emitted[:batch, : k + 1],
        target_top=target_top,
        allowed_top=allowed_top,
        draft_top=b.draft_top[:k, :batch],
        num_unfed=ctx.rules.num_unfed_drafts,
        keeps_drafts=ctx.rules.keeps_draft_kv,
        on_host=None if ctx.proposed is None else b.on_host[:batch],
    )
    results = ctx.record.results_view.narrow(first, batch)
    if ctx.hidden is None:
        update_rows(rows, b.sequences(batch), decided, results)
        return
    kept = Kept(b.keep_first[:batch], b.keep_count[:batch])
    update_rows(rows, b.sequences(batch), decided, results, (ctx.hidden.rows, kept, prompts is not None))
    entries = ctx.hidden.entries if prompts is None else prompts
    keep_states(entries, b.q_start[:batch], b.row[:batch], kept, ctx.hidden.rows, k + 1)


def accept(ctx: Context, shape: Shape, logits: Tensor) -> None:
    """Write `accepted` and `emitted` by the acceptance rule. In greedy shapes the target's own tokens are in
    `target_ids`.

    Rows without filters such as top_k pay only the launches of their kernels, so one graph serves every mixture of
    rows.
    """
    b, batch, k, at = ctx.buffers, shape.batch, shape.max_k, slice(0, shape.rows)
    drafted = Drafted(b.q_start[: batch + 1], b.drafts[:batch, :k], b.k[:batch])
    row, n, out = b.row[:batch], b.n[:batch], Accepted(b.accepted[:batch], b.emitted[:batch, : k + 1])
    own = b.target_ids[at]
    if shape.logits_mode is LogitsMode.GREEDY:
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
            if ctx.proposed is not None and k:
                # The host's drafts are point masses without q, for which `coupled` is the rule.
                some = replace(out, only=b.on_host[:batch])
                verify_coupled(logits, rows, ctx.params, cut.cut, b.verify_draws[at], drafted, some, ctx.scratch)
    if ctx.rates is not None:  # after the rule, so that its time is measured too
        verify_synthetic(own, drafted, AtRates(ctx.rates, ctx.params.seeds, row, n), out)


def run(ctx: Context, shape: Shape, sequences: StepSequences) -> None:
    """Run a whole decode iteration."""
    prepare(ctx, shape, sequences)
    if shape.max_k:
        draft(ctx, shape)
    verify(ctx, shape)
    accept_and_update(ctx, shape)


def run_merged(ctx: Context, shape: MergedShape) -> None:
    """Run a whole iteration whose verification pass also has the prompt chunks of `ctx.chunks`, after its own rows.

    Their final states go to `ctx.chunks.merged`. The last row of a prompt that ends is a row of verification, of a
    sequence with K = 0.
    """
    b, verified, chunks = ctx.buffers, shape.verify, ctx.chunks
    first, seqs = verified.rows, shape.chunk_shape.seqs
    after, own = slice(first, shape.rows), slice(0, shape.chunk_rows)
    # Before all kernels: a graph may not have a kernel that is launched dependently right after a copy.
    b.verify_ids[after].copy_(chunks.ids[own])
    b.verify_positions[after].copy_(chunks.positions[own])
    b.verify_slots[after].copy_(chunks.slots[own])
    if len(b.group_slots):
        b.group_slots[:, after].copy_(chunks.group_slots[:, own])
    prepare(ctx, verified, all_sequences(ctx.record.views))
    if verified.max_k:
        draft(ctx, shape.decode)
        assemble(ctx, verified)
    inputs = _verify_inputs(ctx, verified.batch, first, verified.max_k + 1, shape.rows)
    rows = ChunkRows(
        first=first,
        q_start=chunks.q_start[: seqs + 1],
        block_table=chunks.table[:seqs],
        group_tables=chunks.group_tables[:, :seqs],
        max_q_len=max(shape.chunk_rows, MAX_VERIFY_ROWS + 1),
        batch=shape.decode.batch,
        device_rows=chunks.rows[:seqs],
    )
    hidden = ctx.target.forward(replace(inputs, chunks=rows), ctx.kv_cache).final
    chunks.merged[shape] = hidden[after]
    lm_head(ctx, hidden[:first], greedy=verified.logits_mode is LogitsMode.GREEDY)
    accept_and_update(ctx, verified)
