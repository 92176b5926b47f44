"""Passes over prompt chunks and catch-up chunks as functions that a CUDA graph can capture: see `iteration`.

They run over the inputs in `ctx.chunks`, and draw no tokens.
"""

from __future__ import annotations

from specrs.backends.cuda.context import Context
from specrs.backends.cuda.shapes import ChunkShape


def prompt_pass(ctx: Context, shape: ChunkShape) -> None:
    """Run the target over prompt chunks. Puts its hidden states into `ctx.chunks.left`."""
    inputs = ctx.chunks.inputs(shape, windowed=False)
    ctx.chunks.left[shape] = ctx.target.forward(inputs, ctx.kv_cache, ctx.hidden_layers)


def catch_up_pass(ctx: Context, shape: ChunkShape) -> None:
    """Run the draft model over catch-up chunks, whose ids are the draft's own."""
    assert ctx.drafter is not None
    ctx.drafter.catch_up(ctx.chunks.inputs(shape, windowed=ctx.draft_start is not None))


def feeds_chunks(ctx: Context) -> bool:
    """Return whether a draft model catches up by its own pass. A head needs hidden states with its chunks, so it does
    not."""
    return ctx.drafter is not None and ctx.drafter.hidden is None
