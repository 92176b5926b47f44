"""Warm-up: runs once, with no sequences, what steps run outside of graphs, so that nothing compiles while requests
wait.

Triton compiles a kernel when it is first launched with new constants. That takes about a second each, and is cached on
disk. Graphs run before they are captured. Here is the rest: ends of prompts, ops between the passes of chained steps,
and passes over more chunks than graphs have. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specrs.backends.cuda.chunks import catch_up_pass, feeds_chunks
from specrs.backends.cuda.context import Context, sequences_of
from specrs.backends.cuda.hidden_rows import HiddenInputs
from specrs.backends.cuda.iteration import accept_and_update, assemble, lm_head, prepare
from specrs.backends.cuda.shapes import Buckets, ChunkShape, LogitsMode, Shape
from specrs.kernels.cuda.adjust_logits import ALLOWED, COLUMNS, Asked, AskedRows, History, adjust
from specrs.models.base import HiddenStates


def warm_up(ctx: Context, buckets: Buckets) -> None:
    """Enqueue each function of an iteration once, for every shape, so that its kernels are compiled. The record must
    hold no sequences, so that nothing is written."""
    left = _long_chunks(ctx)
    for logits_mode in (LogitsMode.GREEDY, LogitsMode.SAMPLED):
        for count in _counts(ctx.state.limit.shape[0] - 1):
            _end_prompts(ctx, Shape(count, 0, count, logits_mode), left)
        for k in range(1, buckets.max_k + 1):
            _around_passes(ctx, Shape(1, k, k + 1, logits_mode))
    for logits in (ctx.buffers.logits, *ctx.buffers.draft_logits):
        _adjust(ctx, logits)


def _long_chunks(ctx: Context) -> HiddenStates:
    """Run target and drafter over as many rows as a pass may have, for which there is no graph. Return the target's
    states."""
    shape = ChunkShape(ctx.chunks.ids.shape[0], 1, captured=False)
    inputs = ctx.chunks.inputs(shape, windowed=False)
    left = ctx.target.forward(inputs, ctx.kv_cache, ctx.hidden_layers)
    if feeds_chunks(ctx):
        catch_up_pass(ctx, shape)
    elif left.entries is not None:
        assert ctx.drafter is not None
        ctx.drafter.catch_up(inputs, HiddenInputs(left.entries.clone(), inputs.q_start[:1]))
    return left


def _counts(most: int) -> Iterator[int]:
    """Yield numbers of sequences: kernels are compiled for powers of two."""
    yield from (1 << i for i in range(most.bit_length()) if 1 << i < most)
    yield most


def _end_prompts(ctx: Context, shape: Shape, left: HiddenStates) -> None:
    """Run the end of prompts for a shape. `left` are states of a pass over chunks."""
    prepare(ctx, shape, sequences_of(ctx.record.views, "num_prefill", emits=ctx.record.views["chunk_is_last"]))
    lm_head(ctx, left.final.new_zeros((shape.rows, left.final.shape[1])), greedy=shape.logits_mode is LogitsMode.GREEDY)
    entries = left.entries
    accept_and_update(
        ctx, shape, prompts=None if entries is None else entries.new_zeros((shape.rows, *entries.shape[1:]))
    )


def _around_passes(ctx: Context, shape: Shape) -> None:
    """Run what chained steps run before and after their passes."""
    prepare(ctx, shape, sequences_of(ctx.record.views, "num_decode"))
    assemble(ctx, shape)
    accept_and_update(ctx, shape)


def _adjust(ctx: Context, logits: Tensor) -> None:
    """Run the kernels of masks and penalties on a row that asks for nothing."""
    state, b = ctx.state, ctx.buffers

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=logits.device)

    words = -(-logits.shape[1] // 32)
    asked = Asked(
        table=zeros(1, COLUMNS.value),
        lists=zeros(1),
        biases=zeros(1, dtype=torch.float32),
        allowed=zeros(1, words, dtype=torch.int32),
    )
    asked.table[:, ALLOWED.value] = -1
    history = History(b.row, b.n, state.tokens, state.limit, state.stop_ids, state.min_len, ctx.params.values, 1)
    rows, top = AskedRows(zeros(1), zeros(1), zeros(1) - 1, [1]), zeros(1, dtype=torch.float32)
    adjust(logits, zeros(len(logits)), asked, rows, None, history, top, ctx.scratch)
