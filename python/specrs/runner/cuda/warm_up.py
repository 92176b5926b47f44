"""Runs, on no entries, what launches run outside of graphs, so that nothing is compiled while requests wait.

Triton compiles a kernel when it is first launched with new constants, about a second each, and keeps it on disk. Graphs
are run before they are captured; here is the rest: ends of prompts, what lies between the passes of chained launches,
and passes over more chunks than graphs have. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from specrs.drafters.base import HiddenInputs, device_drafter
from specrs.models.base import HiddenStates
from specrs.runner.cuda.chunks import feeds_chunks
from specrs.runner.cuda.context import Context, entries_of
from specrs.runner.cuda.iteration import accept_and_update, assemble, lm_head, prepare
from specrs.runner.cuda.shapes import Buckets, ChunkShape, Shape, Tail


def warm_up(ctx: Context, buckets: Buckets) -> None:
    """Enqueue each once; the record must hold no entries, so that nothing is written."""
    left = _long_chunks(ctx)
    for tail in (Tail.GREEDY, Tail.SAMPLED):
        for count in _counts(ctx.state.limit.shape[0] - 1):
            _end_prompts(ctx, Shape(count, 0, count, tail), left)
        for k in range(1, buckets.max_k + 1):
            _around_passes(ctx, Shape(1, k, k + 1, tail))


def _long_chunks(ctx: Context) -> HiddenStates:
    """Passes over as many rows as there may be, which no graph has, of the target and of what drafts."""
    shape = ChunkShape(ctx.chunks.ids.shape[0], 1, captured=False)
    inputs = ctx.chunks.inputs(shape, windowed=False)
    left = ctx.target.forward(inputs, ctx.kv_cache, ctx.hidden_layers)
    if feeds_chunks(ctx):
        device_drafter(ctx.drafter).feed(ctx.chunks.inputs(shape, windowed=ctx.draft_start is not None))
    elif left.entries is not None:
        device_drafter(ctx.drafter).feed(inputs, HiddenInputs(left.entries.clone(), inputs.q_start[:1]))
    return left


def _counts(most: int) -> Iterator[int]:
    """Numbers of entries: kernels are compiled for powers of two."""
    yield from (1 << i for i in range(most.bit_length()) if 1 << i < most)
    yield most


def _end_prompts(ctx: Context, shape: Shape, left: HiddenStates) -> None:
    """`left`: of a pass over chunks."""
    prepare(ctx, shape, entries_of(ctx.record.views, "num_prefill", emits=ctx.record.views["chunk_is_last"]))
    lm_head(ctx, left.final.new_zeros((shape.rows, left.final.shape[1])), greedy=shape.tail is Tail.GREEDY)
    entries = left.entries
    accept_and_update(
        ctx, shape, prompts=None if entries is None else entries.new_zeros((shape.rows, *entries.shape[1:]))
    )


def _around_passes(ctx: Context, shape: Shape) -> None:
    prepare(ctx, shape, entries_of(ctx.record.views, "num_decode"))
    assemble(ctx, shape)
    accept_and_update(ctx, shape)
