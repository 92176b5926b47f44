"""Passes over prompt chunks and over the draft's catch-up chunks. Replays a graph if there is one for the shape.

Plans no chunks and draws no tokens. Op by op, a pass costs the host about 20 us per kernel, 18 ms for 64 layers. With
short chunks the GPU waits for that. Compiled kernels depend on the shape only, so chunks of any length find theirs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specrs.backends.cuda.context import Context
from specrs.backends.cuda.graphs import Graphs, Uncaptured
from specrs.backends.cuda.hidden_rows import HiddenInputs
from specrs.backends.cuda.shapes import Buckets, ChunkShape
from specrs.models.base import HiddenStates
from specrs.models.inputs import PassInputs


class ChunkPasses:
    """Runs passes over chunks: by graph if there is one for their shape, else op by op."""

    def __init__(self, ctx: Context, buckets: Buckets, graphs: Graphs | Uncaptured) -> None:
        self._ctx = ctx
        self._buckets = buckets
        self._graphs = graphs

    def target(self, inputs: PassInputs) -> HiddenStates:
        """Run the target over prompt chunks of N rows, and return their hidden states. The next pass may overwrite this
        memory."""
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
        """Run the drafter over catch-up chunks. A head reads `hidden`, and always runs op by op."""
        ctx, drafter = self._ctx, self._ctx.drafter
        assert drafter is not None
        drafter.num_passes += 1
        if hidden is not None:
            drafter.catch_up(inputs, hidden)
            return
        shape, ids = self._shape("catch up", inputs), inputs.input_ids
        made = ctx.chunks.fill(replace(inputs, input_ids=drafter.known(ids, torch.empty_like(ids))), shape)
        if shape.captured:
            self._graphs.replay(("catch up", shape))
        else:
            drafter.catch_up(made)

    def _shape(self, kind: str, inputs: PassInputs) -> ChunkShape:
        rows, seqs = inputs.input_ids.shape[0], inputs.block_table.shape[0]
        shape = self._buckets.chunks(rows, seqs)
        if shape is not None and (kind, shape) in self._graphs:
            return shape
        return ChunkShape(rows, seqs, captured=False)
