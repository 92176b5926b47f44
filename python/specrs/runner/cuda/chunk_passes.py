"""Passes over prompt chunks and the draft's catch-up chunks: one replay where there is a graph for their shape.

Plans no chunks and draws nothing. Op by op a pass costs the host some 20 us for each of its kernels, 18 ms for 64
layers, during which the GPU waits where chunks are short. What is compiled for a pass depends on its shape alone, so
that chunks of any length find it compiled.
"""

from __future__ import annotations

from dataclasses import replace

from specrs.drafters.base import HiddenInputs, device_drafter, model_drafter
from specrs.kernels.cuda.attention_config import ANY_LENGTH
from specrs.models.base import HiddenStates
from specrs.models.inputs import PassInputs
from specrs.runner.cuda.context import Context
from specrs.runner.cuda.graphs import Graphs, Uncaptured
from specrs.runner.cuda.shapes import Buckets, ChunkShape


class ChunkPasses:
    """Runs them: replayed where there is a graph for their shape, else op by op."""

    def __init__(self, ctx: Context, buckets: Buckets, graphs: Graphs | Uncaptured) -> None:
        self._ctx = ctx
        self._buckets = buckets
        self._graphs = graphs

    def target(self, inputs: PassInputs) -> HiddenStates:
        """Over prompt chunks, `[N]` rows: their hidden states, views that the next pass may overwrite."""
        ctx, rows = self._ctx, inputs.input_ids.shape[0]
        shape = self._shape("prompts", inputs)
        made = ctx.chunks.fill(inputs, shape)
        if shape.captured:
            self._graphs.replay(("prompts", shape))
            left = ctx.chunks.left[shape]
        else:
            left = ctx.target.forward(made, ctx.kv_cache, ctx.hidden_layers)
        return HiddenStates(left.final[:rows], None if left.entries is None else left.entries[:rows])

    def draft(self, inputs: PassInputs, hidden: HiddenInputs | None = None) -> None:
        """Over catch-up chunks; a head's, with its `hidden`, has no graph."""
        ctx, drafter = self._ctx, device_drafter(self._ctx.drafter)
        if hidden is not None:
            drafter.feed(replace(inputs, max_q_len=max(inputs.max_q_len, ANY_LENGTH)), hidden)
            return
        shape = self._shape("catch up", inputs)
        if shape.captured:
            ctx.chunks.fill(model_drafter(drafter).known_ids(inputs), shape)
            drafter.num_passes += 1
            self._graphs.replay(("catch up", shape))
        else:
            drafter.feed(ctx.chunks.fill(inputs, shape))

    def _shape(self, kind: str, inputs: PassInputs) -> ChunkShape:
        rows, seqs = inputs.input_ids.shape[0], inputs.block_table.shape[0]
        shape = self._buckets.chunks(rows, seqs)
        if shape is not None and (kind, shape) in self._graphs:
            return shape
        return ChunkShape(rows, seqs, captured=False)
