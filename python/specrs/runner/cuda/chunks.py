"""Passes over prompt chunks and catch-up chunks as functions that a CUDA graph can hold, see `iteration`.

They run over the inputs that `ctx.chunks` holds, and draw nothing.
"""

from __future__ import annotations

from specrs.drafters.base import model_drafter
from specrs.runner.cuda.context import Context
from specrs.runner.cuda.shapes import ChunkShape


def prompt_pass(ctx: Context, shape: ChunkShape) -> None:
    """The target's; what it leaves is in `ctx.chunks.left`."""
    inputs = ctx.chunks.inputs(shape, windowed=False)
    ctx.chunks.left[shape] = ctx.target.forward(inputs, ctx.kv_cache, ctx.hidden_layers)


def catch_up_pass(ctx: Context, shape: ChunkShape) -> None:
    """The draft model's; ids are its own."""
    drafter = model_drafter(ctx.drafter)
    drafter.model.forward(ctx.chunks.inputs(shape, windowed=ctx.draft_start is not None), drafter.kv_cache)


def feeds_chunks(ctx: Context) -> bool:
    """Whether a draft model catches up by itself; a head reads hidden states beside its chunks."""
    return ctx.drafter is not None and not ctx.drafter.on_host and ctx.head is None
