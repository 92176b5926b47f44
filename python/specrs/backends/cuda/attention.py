"""Attention of a pass on a CUDA device, for all its layers: norm and rotation of heads, keys and values written, rows
attended. Multiplies no weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from specrs.backends.cuda.products import few_rows
from specrs.backends.cuda.workspace import Workspace, fused_heads, rotations
from specrs.kernels.cuda._heads import Heads
from specrs.kernels.cuda.attention_config import ANY_LENGTH, AttentionConfig
from specrs.kernels.cuda.device import DeviceLimits
from specrs.kernels.cuda.linear_product import MAX_ROWS
from specrs.kernels.cuda.paged_attention import AttentionRows, MaskParams, paged_attention
from specrs.kernels.cuda.qk_norm_rope import qk_norm_rope
from specrs.kernels.cuda.scale_queries import scale_queries
from specrs.kernels.linear import DenseWeight
from specrs.models.config import ModelConfig
from specrs.models.inputs import ChunkRows, PassInputs
from specrs.models.kv_groups import KVGroups
from specrs.models.rope import Rope
from specrs.models.torch_weights import TorchLayer


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of a pass, for all its layers."""

    c: ModelConfig
    dtype: torch.dtype
    ws: Workspace
    positions: Tensor
    """Positions of the pass, `[rows]` int64."""
    angles: Mapping[tuple[Rope, int], list[Tensor]]
    """cos and sin `[rows, rotary_dim / 2]` fp32 of each RoPE and number of features that it rotates."""
    where: Sequence[tuple[Tensor, AttentionRows]]
    """Slots of the pass, and rows of its requests, for each KV group."""
    groups: KVGroups | None
    fused: bool
    """True if products with dense weights norm, rotate and write heads themselves."""
    chunks: ChunkRows | None
    """Prompt chunks after the rows of the requests. None: there are none."""
    chunk_rows: Sequence[AttentionRows]
    """Rows of the prompt chunks, for each KV group. Empty without chunks."""
    total_rows: int | None
    """Number of all rows of a captured pass over chunks. None: the pass is another."""
    any_length: bool
    """True if chunks of all lengths use one kernel, because no graph fixes their number of rows."""

    @property
    def rows(self) -> int:
        """Number of rows of the pass."""
        return self.positions.shape[0]

    @classmethod
    def of(
        cls,
        c: ModelConfig,
        dtype: torch.dtype,
        inputs: PassInputs,
        ws: Workspace,
        k_start: Tensor | None = None,
        groups: KVGroups | None = None,
    ) -> Attention:
        """Return the attention of a pass. Rows attend to keys from `k_start` `[B]` on; None: from the `k_start` of
        `inputs`."""
        rows, chunks = inputs.input_ids.shape[0], inputs.chunks
        first = rows if chunks is None else chunks.first
        k_start = inputs.k_start if k_start is None else k_start
        angles = {
            turn: [of[i, :rows, : turn[1] // 2] for of in (ws.cos, ws.sin)] for i, turn in enumerate(rotations(c))
        }
        in_groups = [inputs.in_group(group) for group in range(1 if groups is None else len(groups.windows))]
        where = [
            (slots, AttentionRows(inputs.positions[:first], inputs.q_start, table, inputs.max_q_len, k_start))
            for slots, table in in_groups
        ]
        after = []
        if chunks is not None:
            tables = [chunks.in_group(group) for group in range(len(in_groups))]
            at = inputs.positions[first:]
            after = [AttentionRows(at, chunks.q_start, table, chunks.max_q_len) for table in tables]
        # A head of more rows, with its angles, is more than the registers hold.
        fused = rows <= min(few_rows(ws), MAX_ROWS) and fused_heads(c, dtype, ws.limits) > 0
        total_rows, any_length = rows if inputs.captured else None, inputs.prompts and not inputs.captured
        return cls(c, dtype, ws, inputs.positions, angles, where, groups, fused, chunks, after, total_rows, any_length)

    def heads(self, layer: TorchLayer, cache: Tensor, index: int = 0) -> Heads | None:
        """Return what the qkv product of layer `index` needs to norm, rotate and write heads itself. None: call
        `apply_rope` after the product."""
        if not self.fused or not isinstance(layer.qkv, DenseWeight):
            return None
        slots, angles = self._slots(index), self._angles(index)
        scales = (layer.kv_scales[0], layer.kv_scales[1])
        return Heads(layer.qk_norm, angles, slots, cache, self.c.num_heads, self.c.rms_norm_eps, scales)

    def apply_rope(self, layer: TorchLayer, qkv: Tensor, cache: Tensor, index: int = 0) -> None:
        """Norm and rotate the queries in `qkv` of layer `index` in place, and write K, normed and rotated, and V into
        `cache`."""
        norm = layer.qk_norm
        if norm is not None and self.c.qk_norm_whole:
            norm = norm.view(-1)
        floats = [self.c.rms_norm_eps, *layer.kv_scales]
        slots, angles = self._slots(index), self._angles(index)
        shape = [self.c.num_heads, int(self.c.interleaved_rope and bool(angles))]
        qk_norm_rope(qkv, norm, angles, slots, cache, shape, floats, self.ws.dependent)

    def scale_queries(self, qkv: Tensor, index: int = 0) -> None:
        """Multiply the rotated queries in `qkv` of layer `index` in place by the factors of their positions, if the
        layer has some."""
        scaling = self.c.query_scaling
        if scaling is not None and not (scaling.unrotated and self.c.rope_of(index) is not None):
            q, dependent = qkv[:, : self.c.num_heads * self.c.head_dim], self.ws.dependent
            scale_queries(q, self.positions, scaling.beta, scaling.length, dependent, scaling.offset)

    def __call__(self, layer: TorchLayer, qkv: Tensor, cache: Tensor, out: Tensor, index: int = 0) -> None:
        """Write the attention output of layer `index` into `out`. Prompt chunks have their own kernel launch.

        One launch for both would be split for the longest request. Then sums of the other requests would have another
        order with chunks than without.
        """
        (_, rows), chunks = self.where[self._group(index)], self.chunks
        if chunks is None:
            batch = rows.q_start.shape[0] - 1
            self._attend(layer, qkv, cache, rows, out, index, (batch, self.total_rows), self.ws.dependent)
            return
        first, after = chunks.first, self.chunk_rows[self._group(index)]
        self._attend(layer, qkv[:first], cache, rows, out[:first], index, (chunks.batch, None), self.ws.dependent)
        # Not dependent: it must wait for all earlier kernels, not just for the launch before it.
        shape = after.q_start.shape[0] - 1, max(len(qkv) - first, after.max_q_len)
        self._attend(layer, qkv[first:], cache, after, out[first:], index, shape, False)

    def _attend(
        self,
        layer: TorchLayer,
        qkv: Tensor,
        cache: Tensor,
        rows: AttentionRows,
        out: Tensor,
        index: int,
        shape: tuple[int, int | None],
        dependent: bool,
    ) -> None:
        """Launch attention for `rows`. Its work is split for `shape`: a number of requests, and the number of rows of
        chunks if it is known."""
        c, ws = self.c, self.ws
        window = c.windows[index] if c.windows else None
        # The table's width, not the step's longest context, keeps one order of sums and few compiled kernels.
        held = rows.block_table.shape[1] * cache.shape[3]
        span = held if window is None else min(window, held)
        sizes = c.sizes_of(index)
        heads = (c.num_heads, sizes.num_kv_heads, sizes.head_dim)
        max_q_len = max(rows.max_q_len, ANY_LENGTH) if self.any_length else rows.max_q_len
        cut = _attention_config(shape, max_q_len, *heads, (self.dtype, cache.dtype), ws.limits, span)
        chunked = c.chunked and window is not None
        mask_params = MaskParams(c.attention_scale, window, layer.sinks, layer.kv_scales, chunked)
        scratch, width = (ws.partials, ws.stats, ws.counters), c.num_heads * sizes.head_dim
        paged_attention(qkv[:, :width], cache, rows, out, scratch, mask_params, cut, dependent)

    def _group(self, index: int) -> int:
        return 0 if self.groups is None else self.groups.of_layer[index]

    def _slots(self, index: int) -> Tensor:
        return self.where[self._group(index)][0]

    def _angles(self, index: int) -> list[Tensor]:
        rope = self.c.rope_of(index)
        return [] if rope is None else self.angles[rope, self.c.rotary_dim_of(index)]


@lru_cache(maxsize=256)
def _attention_config(
    shape: tuple[int, int | None],
    max_q_len: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    limits: DeviceLimits,
    span: int,
) -> list[int]:
    """Return the fields of the cached AttentionConfig for these sizes. `shape` is a number of requests, and of all rows
    if the pass is over chunks and captured."""
    batch, total_rows = shape
    config = AttentionConfig.choose(
        batch=batch,
        max_q_len=max_q_len,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtypes=dtypes,
        limits=limits,
        span=span,
    )
    if total_rows is not None:
        config = config.of_chunks(
            total_rows, batch=batch, max_q_len=max_q_len, num_kv_heads=kv_heads, limits=limits, span=span
        )
    return list(dataclasses.astuple(config))
