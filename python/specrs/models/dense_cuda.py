"""The forward pass of a dense decoder on a CUDA device: five kernels a layer for few rows, or six where long contexts'
splits are combined by one, or heads are prepared by one; two more where norms are behind blocks, cuBLAS around it for
many.

A pass allocates nothing, waits for nothing and has no shape that depends on data, so it can be captured in a graph.
`dense.Dense` is the same for a CPU, and the reference. Samples nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from specrs.errors import UnsupportedModelError, invalid
from specrs.kernels.cuda._heads import Heads
from specrs.kernels.cuda.attention_config import MAX_VERIFY_ROWS, AttentionConfig
from specrs.kernels.cuda.configs import LinearShape
from specrs.kernels.cuda.device import DeviceLimits
from specrs.kernels.cuda.embedding import embed
from specrs.kernels.cuda.linear_product import MAX_ROWS
from specrs.kernels.cuda.paged_attention import AttentionRows, Sight, paged_attention
from specrs.kernels.cuda.qk_norm_rope import qk_norm_rope
from specrs.kernels.linear import DenseWeight
from specrs.models.base import HiddenStates, TorchModel
from specrs.models.config import ModelConfig
from specrs.models.cuda.parts import EmbeddingParts, LogitsParts
from specrs.models.cuda.products import stored, write_argmax, write_logits
from specrs.models.cuda.stream import stream_of
from specrs.models.cuda.workspace import Workspace, fused_heads, linear_shapes, logits_rows, rotations
from specrs.models.inputs import ChunkRows, PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.kv_groups import KVGroups
from specrs.models.rope import Rope, rope_magnitude
from specrs.models.shards import check_cuda_ranks
from specrs.models.torch_weights import TorchFacts, TorchLayer, TorchWeights, has_fp8_rows
from specrs.parallel.ranks import Ranks

HEAD_DIMS = (64, 96, 128, 256)
"""Head sizes that the kernels are compiled and tested for."""


@dataclass(frozen=True)
class CudaDense(TorchFacts):
    """A dense decoder with its buffers. Triton's interpreter runs the same on a CPU."""

    weights: TorchWeights
    workspace: Workspace
    kv_groups: KVGroups | None = None
    """See `TorchModel`."""
    ranks: Ranks | None = None
    """See `Dense`."""
    embedding_parts: EmbeddingParts | None = None
    """Of several ranks, as `logits_parts`."""
    logits_parts: LogitsParts | None = None
    rotary: tuple[Tensor, Tensor | None] = field(init=False)
    """Signed frequencies `[rotations, rotary_dim]` fp32 of each rotation, and what its cos and sin are multiplied by,
    `[rotations]` fp32; None: 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rotary", _rotary(self.weights))

    @classmethod
    def allocate(
        cls,
        weights: TorchWeights,
        max_rows: int,
        max_seqs: int,
        num_hidden_layers: int = 0,
        kv_groups: KVGroups | None = None,
        ranks: Ranks | None = None,
    ) -> CudaDense:
        """See `TorchModel.with_buffers`. Raises UnsupportedModelError for a model that the kernels do not serve."""
        c, device = weights.config, weights.device
        check_head_dim(c.head_dim, device)
        embedding_parts = logits_parts = None
        if ranks is not None:
            check_cuda_ranks(c, "tensor_parallel_size", ranks.size)
            ranks.exchanges.reserve(min(max_rows, MAX_ROWS), c.hidden_size, weights.dtype)
            embedding_parts = EmbeddingParts.allocate(ranks, weights.embedding, max_rows)
            logits_parts = LogitsParts.allocate(
                ranks, stored(weights.lm_head), c.vocab_size, logits_rows(max_seqs), max_seqs * MAX_VERIFY_ROWS
            )
        shapes = _shapes_of(weights)
        workspace = Workspace.allocate(
            c,
            max_rows=max_rows,
            max_seqs=max_seqs,
            num_hidden_layers=num_hidden_layers,
            dtype=weights.dtype,
            device=device,
            shapes=shapes,
        )
        if has_fp8_rows(weights):
            workspace = workspace.rounding_rows(shapes)
        return cls(weights, workspace, kv_groups, ranks, embedding_parts, logits_parts)

    def with_buffers(self, max_rows: int, max_seqs: int, num_hidden_layers: int = 0) -> TorchModel:
        """See `TorchModel`."""
        return CudaDense.allocate(self.weights, max_rows, max_seqs, num_hidden_layers, self.kv_groups, self.ranks)

    def forward(self, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int] = ()) -> HiddenStates:
        """See `TorchModel`; what is returned are views into the workspace. Up to 64 rows take the fused products, more
        take cuBLAS."""
        ws, weights, rows = self.workspace, self.weights, inputs.input_ids.shape[0]
        assert rows <= ws.hidden.shape[0], f"rows={rows}: the workspace has room for {ws.hidden.shape[0]}"
        room = ws.entries.shape[1]
        assert len(hidden_layers) <= room, f"hidden_layers={hidden_layers}: the workspace has room for {room}"
        hidden, c = ws.hidden[:rows], self.config
        stream = stream_of(hidden, inputs.positions, ws, c, self.ranks)
        norms = [w.input_norm if c.norms != "behind" else None for w in weights.layers]
        following = stream.following(norms[0])
        tables = [weights.embedding, *self.rotary, None if following is None else following.norm_weight]
        angles = [ws.cos[:, :rows], ws.sin[:, :rows]]
        prepared = [] if following is None else [following.x, following.squares]

        def write(ids: Tensor, out: Tensor) -> None:
            embed(ids, inputs.positions, tables, out, angles, prepared, ws.dependent, c.embedding_multiplier)

        if self.embedding_parts is None:
            write(inputs.input_ids, hidden)
        else:
            self.embedding_parts.embed(inputs.input_ids, hidden, write)
        attend = Attention.of(c, weights.dtype, inputs, ws, groups=self.kv_groups)
        qkv, attended = ws.qkv[:rows], ws.attended[:rows]
        for i, (w, cache) in enumerate(zip(weights.layers, kv_cache.layers, strict=True)):
            heads = attend.heads(w, cache, i)
            stream.normed_product("qkv", norms[i], w.qkv, qkv, heads)
            for at, layer in enumerate(hidden_layers):
                if layer == i:
                    ws.entries[:rows, at].copy_(hidden)
            if heads is None:
                attend.turn(w, qkv, cache, i)
            attend(w, qkv, cache, attended, i)
            stream.add_product("o", attended, w.o, w.post_attention_norm, w.attention_output_norm)
            stream.add_mlp(w, norms[i + 1] if i + 1 < len(norms) else None)
        kept = ws.entries[:rows, : len(hidden_layers)] if hidden_layers else None
        return HiddenStates(stream.normed(weights.final_norm), kept)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `TorchModel`; rows of `hidden` and `out` are contiguous, of any stride. Each logit is rounded once, from
        the product's own fp32 sum."""
        if out is None:
            out = torch.empty((hidden.shape[0], self.vocab_size), dtype=torch.float32, device=hidden.device)
        rows = stored(self.weights.lm_head)
        if self.logits_parts is None:
            write_logits(hidden, rows[: out.shape[1]], out, self.workspace)
        else:
            self.logits_parts.write_logits(hidden, out, lambda x, part: write_logits(x, rows, part, self.workspace))
        return out

    def compute_argmax(
        self, hidden: Tensor, ids: Tensor, top: Tensor, num_ids: int | None = None, logits: Tensor | None = None
    ) -> None:
        """See `TorchModel`. `logits` `[L, ids]` fp32 is written too if given."""
        weight = stored(self.weights.lm_head)
        if self.logits_parts is None:
            write_argmax(hidden, weight[:num_ids], (ids, top), self.workspace, logits)
            return
        self.logits_parts.write_argmax(
            ids, top, num_ids, lambda held, best: write_argmax(hidden, weight[:held], best, self.workspace)
        )
        if logits is not None:
            self.compute_logits(hidden, logits)


def check_head_dim(head_dim: int, device: torch.device) -> None:
    """Raises UnsupportedModelError for heads that the kernels are not compiled for."""
    if device.type == "cuda" and head_dim not in HEAD_DIMS:
        allowed = f"the GPU kernels serve {', '.join(map(str, HEAD_DIMS))}; allowed: device='cpu'"
        raise invalid(UnsupportedModelError, "head_dim", head_dim, allowed)


def _rotary(weights: TorchWeights) -> tuple[Tensor, Tensor | None]:
    c, made = weights.config, rotations(weights.config)
    magnitudes = [rope_magnitude(scaling) for _, scaling in made]
    scales = torch.tensor(magnitudes, dtype=torch.float32).to(weights.device) if set(magnitudes) != {1.0} else None
    signed = {(c.rope_theta, c.rope_scaling): weights.rotary}
    signed |= {rope: own for rope, own in zip(c.ropes, weights.rotaries, strict=True) if rope and own is not None}
    return torch.stack([signed[rope] for rope in made]), scales


def _shapes_of(weights: TorchWeights) -> dict[str, list[LinearShape]]:
    """`linear_shapes` in each coding that a layer has."""
    shapes = {name: [shape] for name, shape in linear_shapes(weights.config, weights.dtype, weights.device).items()}
    for name in ("qkv", "o", "gate_up", "down"):
        kinds = {getattr(getattr(layer, name), "coding", None) for layer in weights.layers}
        (dense,) = shapes[name]
        # Products with codes leave heads to `qk_norm_rope`: with two sides fewer of their programs take turns.
        coded = dataclasses.replace(dense, n=dense.n * dense.sides, head_dim=0) if dense.head_dim else dense
        shapes[name] = [dense if kind is None else dataclasses.replace(coded, coding=kind) for kind in kinds]
    return shapes


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of a pass, for all its layers."""

    c: ModelConfig
    dtype: torch.dtype
    ws: Workspace
    angles: Mapping[Rope, list[Tensor]]
    where: Sequence[tuple[Tensor, AttentionRows]]
    """Slots and rows in each KV group."""
    groups: KVGroups | None
    fused: bool
    """The product with dense weights leaves heads as attention reads them."""
    chunks: ChunkRows | None
    chunk_rows: Sequence[AttentionRows]
    """Of the chunks behind the requests, in each KV group; empty without chunks."""

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
        """Rows attend from `k_start` `[B]` on, None: from that of `inputs`."""
        rows, chunks = inputs.input_ids.shape[0], inputs.chunks
        first = rows if chunks is None else chunks.first
        k_start = inputs.k_start if k_start is None else k_start
        angles = {rope: [ws.cos[i, :rows], ws.sin[i, :rows]] for i, rope in enumerate(rotations(c))}
        in_groups = [inputs.in_group(group) for group in range(1 if groups is None else len(groups.windows))]
        where = [
            (slots, AttentionRows(inputs.positions[:first], inputs.q_start, table, inputs.max_q_len, k_start))
            for slots, table in in_groups
        ]
        behind = []
        if chunks is not None:
            tables = [chunks.in_group(group) for group in range(len(in_groups))]
            at = inputs.positions[first:]
            behind = [AttentionRows(at, chunks.q_start, table, chunks.max_q_len) for table in tables]
        fused = rows <= MAX_ROWS and fused_heads(c, dtype, ws.limits) > 0
        return cls(c, dtype, ws, angles, where, groups, fused, chunks, behind)

    def heads(self, layer: TorchLayer, cache: Tensor, index: int = 0) -> Heads | None:
        """What the product of the layer `index` needs to leave q, k and v as attention reads them; None: `turn` does it
        behind that."""
        if not self.fused or not isinstance(layer.qkv, DenseWeight):
            return None
        slots, angles = self._slots(index), self._angles(index)
        scales = (layer.kv_scales[0], layer.kv_scales[1])
        return Heads(layer.qk_norm, angles, slots, cache, self.c.num_heads, self.c.rms_norm_eps, scales)

    def turn(self, layer: TorchLayer, qkv: Tensor, cache: Tensor, index: int = 0) -> None:
        """From raw q, k and v of the layer `index` to what attention reads, K and V written on the way."""
        norm = layer.qk_norm
        if norm is not None and self.c.qk_norm_whole:
            norm = norm.view(-1)
        floats = [self.c.rms_norm_eps, *layer.kv_scales]
        slots, angles = self._slots(index), self._angles(index)
        qk_norm_rope(qkv, norm, angles, slots, cache, self.c.num_heads, floats, self.ws.dependent)

    def __call__(self, layer: TorchLayer, qkv: Tensor, cache: Tensor, out: Tensor, index: int = 0) -> None:
        """Attention's output of the layer `index`. That of chunks is a launch of its own: one for both would be cut for
        the longest request, and the sums of the others have another order beside chunks than alone."""
        (_, rows), chunks = self.where[self._group(index)], self.chunks
        if chunks is None:
            self._attend(layer, qkv, cache, rows, out, index, rows.q_start.shape[0] - 1, self.ws.dependent)
            return
        first, behind = chunks.first, self.chunk_rows[self._group(index)]
        self._attend(layer, qkv[:first], cache, rows, out[:first], index, chunks.batch, self.ws.dependent)
        # What is ahead of it starts as early as it may itself, so this one waits for all of that.
        self._attend(layer, qkv[first:], cache, behind, out[first:], index, behind.q_start.shape[0] - 1, False)

    def _attend(
        self,
        layer: TorchLayer,
        qkv: Tensor,
        cache: Tensor,
        rows: AttentionRows,
        out: Tensor,
        index: int,
        batch: int,
        dependent: bool,
    ) -> None:
        """`batch`: requests that it is cut up for."""
        c, ws = self.c, self.ws
        window = c.windows[index] if c.windows else None
        # The table's width, not this launch's longest context: sums have one order, and few kernels are compiled.
        held = rows.block_table.shape[1] * cache.shape[3]
        span = held if window is None else min(window, held)
        heads = (c.num_heads, c.num_kv_heads, c.head_dim)
        cut = _attention_config(batch, rows.max_q_len, *heads, (self.dtype, cache.dtype), ws.limits, span)
        sight = Sight(c.attention_scale, window, layer.sinks, layer.kv_scales)
        scratch, width = (ws.partials, ws.stats, ws.counters), c.num_heads * c.head_dim
        paged_attention(qkv[:, :width], cache, rows, out, scratch, sight, cut, dependent)

    def _group(self, index: int) -> int:
        return 0 if self.groups is None else self.groups.of_layer[index]

    def _slots(self, index: int) -> Tensor:
        return self.where[self._group(index)][0]

    def _angles(self, index: int) -> list[Tensor]:
        rope = self.c.rope_of(index)
        return [] if rope is None else self.angles[rope]


@lru_cache(maxsize=256)
def _attention_config(
    batch: int,
    max_q_len: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    limits: DeviceLimits,
    span: int,
) -> list[int]:
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
    return list(dataclasses.astuple(config))
