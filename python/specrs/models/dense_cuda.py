"""The forward pass of a dense decoder on a CUDA device: six kernels a layer for few rows, cuBLAS around it for many.

A pass allocates nothing, waits for nothing and has no shape that depends on data, so it can be captured in a graph.
`dense.Dense` is the same for a CPU, and the reference. Samples nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from specrs.errors import UnsupportedModelError, invalid
from specrs.kernels.coded_weight import CodedWeight, Coding
from specrs.kernels.cuda.activation import silu_and_mul
from specrs.kernels.cuda.argmax import argmax
from specrs.kernels.cuda.attention_config import MAX_VERIFY_ROWS, AttentionConfig, block_d
from specrs.kernels.cuda.configs import LinearConfig, LinearShape, linear_config
from specrs.kernels.cuda.dequantize import dequantize
from specrs.kernels.cuda.device import DeviceLimits, limits_of
from specrs.kernels.cuda.embedding import embed
from specrs.kernels.cuda.lm_head import ArgmaxScratch, linear_argmax
from specrs.kernels.cuda.paged_attention import AttentionRows, Sight, paged_attention
from specrs.kernels.cuda.qk_norm_rope import qk_norm_rope
from specrs.kernels.cuda.rms_norm import rms_norm
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.kernels.cuda.skinny_linear import MAX_ROWS, Next, Product, block_m, scratch_sizes, skinny_linear
from specrs.kernels.linear import DenseWeight, Weight
from specrs.models.base import HiddenStates, Model
from specrs.models.config import ModelConfig
from specrs.models.dense_weights import DenseFacts, DenseWeights, LayerWeights
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache

HEAD_DIMS = (64, 96, 128, 256)
"""Head sizes that the kernels are compiled and tested for."""
_MLP_ROWS = 2048
"""Rows that go through a wide MLP at once: its activations are ten times as wide as the residual stream."""
_CODED_ROWS = 256
"""Rows up to which codes are read once for every 64: expanded to numbers they move ten times their bytes or more."""
_NUMBERS_BYTES = 64 * 2**20
"""Memory for a piece of a coded weight as numbers, for products of more rows."""
_LOGITS_ROWS = 256
"""Rows whose logits are kept at once where an argmax follows the LM head of more than `MAX_ROWS` rows."""


def linear_shapes(config: ModelConfig, dtype: torch.dtype) -> dict[str, LinearShape]:
    """The products of a pass, by name."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "qkv": LinearShape(q + 2 * kv, config.hidden_size, dtype),
        "o": LinearShape(config.hidden_size, q, dtype),
        "gate_up": LinearShape(config.intermediate_size, config.hidden_size, dtype, gated=True),
        "down": LinearShape(config.hidden_size, config.intermediate_size, dtype),
        "lm_head": LinearShape(config.vocab_size, config.hidden_size, dtype),
    }


@dataclass(frozen=True, slots=True)
class Workspace:
    """Persistent buffers of one model's passes, and how its products are cut up. One pass at a time may use it.

    Between passes the buffers hold nothing that the next one needs, but `counters` stay zero.
    """

    hidden: Tensor
    """[max_rows, hidden], the residual stream."""
    weighted: Tensor
    """[min(max_rows, 64), hidden], the stream times the weight of the next norm."""
    squares: Tensor
    """[tiles, 64] fp32, sums of squares of the stream by tile of the product that added to it last."""
    normed: Tensor
    """[max_rows, hidden], what a pass returns a view of."""
    delta: Tensor
    """[max_rows, hidden], what a block adds to the residual stream; few rows add it in their product."""
    qkv: Tensor
    """[max_rows, (heads + 2 * kv_heads) * head_dim]"""
    attended: Tensor
    """[max_rows, heads * head_dim]"""
    gate_up: Tensor
    """[min(max_rows, 2048), 2 * intermediate], of many rows."""
    activated: Tensor
    """[min(max_rows, 2048), intermediate]"""
    entries: Tensor
    """[max_rows, L, hidden], the residual stream where it enters the hidden layers asked for."""
    cos: Tensor
    """[max_rows, head_dim / 2] fp32"""
    sin: Tensor
    """Like `cos`."""
    partials: Tensor
    """fp32 scratch of products and of attention."""
    stats: Tensor
    """fp32 scratch of attention."""
    counters: Tensor
    """int32; zero between kernels."""
    tile_top: Tensor
    """fp32 scratch of the LM head with an argmax behind it."""
    tile_id: Tensor
    """int32, like `tile_top`."""
    logits: Tensor
    """[0 or 256, vocab] fp32, for an argmax over more than 64 rows."""
    scratch: SamplingScratch
    """Of that argmax."""
    numbers: Tensor
    """[0 or 64 MiB], a piece of a coded weight, for more than 256 rows."""
    configs: Mapping[tuple[str, Coding | None, int], list[int]]
    """Fields of the LinearConfig of (product, coding of its weight, columns of its tiles)."""
    limits: DeviceLimits
    dependent: bool
    """Kernels are launched dependently: each starts while the one before it ends."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        max_rows: int,
        max_seqs: int,
        dtype: torch.dtype,
        device: torch.device | str,
        dependent: bool | None = None,
        num_hidden_layers: int = 0,
        shapes: Mapping[str, Sequence[LinearShape]] | None = None,
    ) -> Workspace:
        """Buffers for passes of at most `max_rows` rows and `num_hidden_layers` hidden layers, and for argmaxes of at
        most 17 rows of each of `max_seqs`.

        `dependent=None` launches kernels dependently where the device can: compute capability 9.0 or more. `shapes`:
        of products, each in the codings of its weights, where they are not those of `linear_shapes`.
        """
        device = torch.device(device)
        limits = limits_of(device)
        shapes = {n: [s] for n, s in linear_shapes(config, dtype).items()} if shapes is None else shapes
        widths = sorted({block_m(rows) for rows in (1, 17, MAX_ROWS)})
        of = {name: every[0] for name, every in shapes.items()}
        configs = {
            (n, s.coding, m): linear_config(s, m, limits) for n, every in shapes.items() for s in every for m in widths
        }
        # Splits times tiles are at most the multiprocessors, and tiles are half of them where there are splits.
        group = config.num_heads // config.num_kv_heads
        lines = limits.num_sms * max(64, 1 << (group - 1).bit_length())
        partials, counters = lines * block_d(config.head_dim), limits.num_sms
        for (name, _, m), c in configs.items():
            sizes = scratch_sizes(c, m, n=of[name].n, gated=of[name].gated)
            partials, counters = max(partials, sizes[0]), max(counters, sizes[1])
        tiles = max(-(-config.vocab_size // configs["lm_head", None, m].block_n) for m in widths)
        stream_tiles = max(-(-config.hidden_size // c.block_n) for key, c in configs.items() if key[0] in ("o", "down"))
        coded = [s for every in shapes.values() for s in every if s.coding is not None]
        pieces = [s.n * (1 + s.gated) * s.k for s in coded]
        numbers = min(max(pieces, default=0), _NUMBERS_BYTES // dtype.itemsize) if max_rows > _CODED_ROWS else 0
        many = min(_LOGITS_ROWS, max_seqs * MAX_VERIFY_ROWS)
        many = many if many > MAX_ROWS else 0

        def buffer(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        f32, i32 = torch.float32, torch.int32
        mlp_rows = min(max_rows, _MLP_ROWS)
        return cls(
            hidden=buffer(max_rows, config.hidden_size),
            weighted=buffer(min(max_rows, MAX_ROWS), config.hidden_size),
            squares=buffer(stream_tiles, MAX_ROWS, dtype=f32),
            normed=buffer(max_rows, config.hidden_size),
            delta=buffer(max_rows, config.hidden_size),
            qkv=buffer(max_rows, of["qkv"].n),
            attended=buffer(max_rows, of["o"].k),
            gate_up=buffer(mlp_rows, 2 * config.intermediate_size),
            activated=buffer(mlp_rows, config.intermediate_size),
            entries=buffer(max_rows, num_hidden_layers, config.hidden_size),
            cos=buffer(max_rows, config.head_dim // 2, dtype=f32),
            sin=buffer(max_rows, config.head_dim // 2, dtype=f32),
            partials=buffer(partials, dtype=f32),
            stats=buffer(2 * lines, dtype=f32),
            counters=buffer(counters, dtype=i32),
            tile_top=buffer(MAX_ROWS * tiles, dtype=f32),
            tile_id=buffer(MAX_ROWS * tiles, dtype=i32),
            logits=buffer(many, config.vocab_size, dtype=f32),
            scratch=SamplingScratch.allocate(many, 0, config.vocab_size, device),
            numbers=buffer(numbers),
            configs={key: c.as_list() for key, c in configs.items()},
            limits=limits,
            dependent=limits.capability >= 90 if dependent is None else dependent,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        buffers = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return self.scratch.num_bytes + sum(buffer.nbytes for buffer in buffers if isinstance(buffer, Tensor))

    def config(self, name: str, rows: int, coding: Coding | None = None) -> list[int]:
        """How the product `name` of `rows` rows with a weight of `coding` is cut up."""
        return self.configs[name, coding, block_m(rows)]


@dataclass(frozen=True)
class CudaDense(DenseFacts):
    """A dense decoder with its buffers. Triton's interpreter runs the same on a CPU."""

    weights: DenseWeights
    workspace: Workspace

    @classmethod
    def allocate(cls, weights: DenseWeights, max_rows: int, max_seqs: int, num_hidden_layers: int = 0) -> CudaDense:
        """See `Model.with_buffers`. Raises UnsupportedModelError for a model that the kernels do not serve."""
        c, device = weights.config, weights.device
        check_head_dim(c.head_dim, device)
        return cls(
            weights,
            Workspace.allocate(
                c,
                max_rows=max_rows,
                max_seqs=max_seqs,
                num_hidden_layers=num_hidden_layers,
                dtype=weights.dtype,
                device=device,
                shapes=_shapes_of(weights),
            ),
        )

    def with_buffers(self, max_rows: int, max_seqs: int, num_hidden_layers: int = 0) -> Model:
        """See `Model`."""
        return CudaDense.allocate(self.weights, max_rows, max_seqs, num_hidden_layers)

    def forward(self, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int] = ()) -> HiddenStates:
        """See `Model`; what is returned are views into the workspace. Up to 64 rows take the fused products, more take
        cuBLAS."""
        ws, weights, rows = self.workspace, self.weights, inputs.input_ids.shape[0]
        assert rows <= ws.hidden.shape[0], f"rows={rows}: the workspace has room for {ws.hidden.shape[0]}"
        room = ws.entries.shape[1]
        assert len(hidden_layers) <= room, f"hidden_layers={hidden_layers}: the workspace has room for {room}"
        hidden, cos, sin = ws.hidden[:rows], ws.cos[:rows], ws.sin[:rows]
        stream = stream_of(hidden, ws, self.config.rms_norm_eps)
        norms = [w.input_norm for w in weights.layers]
        following = stream.following(norms[0])
        embed(
            inputs.input_ids,
            inputs.positions,
            [weights.embedding, weights.rotary, None if following is None else following.norm_weight],
            hidden,
            [cos, sin],
            [] if following is None else [following.x, following.squares],
            ws.dependent,
        )
        attend = attention(weights.config, weights.dtype, inputs, ws)
        qkv, attended = ws.qkv[:rows], ws.attended[:rows]
        windows = self.config.windows or (None,) * self.num_layers
        for i, (w, cache, window) in enumerate(zip(weights.layers, kv_cache.layers, windows, strict=True)):
            stream.normed_product("qkv", w.input_norm, w.qkv, qkv)
            for at, layer in enumerate(hidden_layers):
                if layer == i:
                    ws.entries[:rows, at].copy_(hidden)
            attend(w, qkv, cache, attended, window)
            stream.add_product("o", attended, w.o, w.post_attention_norm)
            stream.add_mlp(w, norms[i + 1] if i + 1 < len(norms) else None)
        kept = ws.entries[:rows, : len(hidden_layers)] if hidden_layers else None
        return HiddenStates(stream.normed(weights.final_norm), kept)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Model`; rows of `hidden` and `out` are contiguous, of any stride. Each logit is rounded once, from the
        product's own fp32 sum."""
        if out is None:
            out = torch.empty((hidden.shape[0], self.vocab_size), dtype=torch.float32, device=hidden.device)
        write_logits(hidden, stored(self.weights.lm_head)[: out.shape[1]], out, self.workspace)
        return out

    def compute_argmax(
        self, hidden: Tensor, ids: Tensor, top: Tensor, num_ids: int | None = None, logits: Tensor | None = None
    ) -> None:
        """See `Model`. `logits` `[L, ids]` fp32 is written too if given."""
        write_argmax(hidden, stored(self.weights.lm_head)[:num_ids], (ids, top), self.workspace, logits)


def check_head_dim(head_dim: int, device: torch.device) -> None:
    """Raises UnsupportedModelError for heads that the kernels are not compiled for."""
    if device.type == "cuda" and head_dim not in HEAD_DIMS:
        allowed = f"the GPU kernels serve {', '.join(map(str, HEAD_DIMS))}; allowed: device='cpu'"
        raise invalid(UnsupportedModelError, "head_dim", head_dim, allowed)


def write_logits(hidden: Tensor, weight: Tensor, out: Tensor, ws: Workspace) -> None:
    """The product `lm_head` of a workspace's model, `out` `[L, ids]` fp32."""
    if hidden.shape[0] > MAX_ROWS:
        _wide_logits(hidden, weight, out)
        return
    cut = ws.config("lm_head", hidden.shape[0])
    skinny_linear(hidden, Product(weight), out, (ws.partials, ws.counters), cut, ws.dependent)


def write_argmax(
    hidden: Tensor, weight: Tensor, best: tuple[Tensor, Tensor], ws: Workspace, logits: Tensor | None = None
) -> None:
    """The same with an argmax behind it: ids `[L]` int64 and their logits `[L]` fp32; all logits where `logits` is
    given."""
    rows, (ids, top) = hidden.shape[0], best
    if rows <= MAX_ROWS:
        out = (ids, top) if logits is None else (ids, top, logits)
        scratch = ArgmaxScratch(ws.tile_top, ws.tile_id, ws.partials, ws.counters)
        linear_argmax(hidden, weight, out, scratch, ws.config("lm_head", rows), ws.dependent)
        return
    step = ws.logits.shape[0]
    assert step, f"rows={rows}: the workspace was allocated for argmaxes of at most {MAX_ROWS}"
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        kept = ws.logits[: part.stop - first, : weight.shape[0]] if logits is None else logits[part]
        _wide_logits(hidden[part], weight, kept)
        argmax(kept, ids[part], top[part], ws.scratch)


def product(ws: Workspace, name: str, x: Tensor, w: Weight, out: Tensor) -> None:
    """The product `name` of a workspace's model, of any number of rows."""
    if x.shape[0] > MAX_ROWS:
        _wide_product(ws, name, x, w, out)
        return
    _few_product(ws, name, x, operand(w), out)


def _few_product(ws: Workspace, name: str, x: Tensor, product: Product, out: Tensor) -> None:
    cut = ws.config(name, x.shape[0], product.coding)
    skinny_linear(x, product, out, (ws.partials, ws.counters), cut, ws.dependent)


class Attend(Protocol):
    """From raw q, k, v to attention's output, K and V written on the way."""

    def __call__(
        self, layer: LayerWeights, qkv: Tensor, cache: Tensor, out: Tensor, window: int | None = None, /
    ) -> None: ...


def attention(
    c: ModelConfig, dtype: torch.dtype, inputs: PassInputs, ws: Workspace, k_start: Tensor | None = None
) -> Attend:
    """The attention of a pass, for all its layers; rows attend from `k_start` `[B]` on, None: from that of `inputs`."""
    rows = inputs.input_ids.shape[0]
    width, scale = c.num_heads * c.head_dim, c.head_dim**-0.5
    batch, heads = inputs.q_start.shape[0] - 1, (c.num_heads, c.num_kv_heads, c.head_dim)
    k_start = inputs.k_start if k_start is None else k_start
    angles = [ws.cos[:rows], ws.sin[:rows]]
    where = AttentionRows(inputs.positions, inputs.q_start, inputs.block_table, inputs.max_q_len, k_start)
    scratch = (ws.partials, ws.stats, ws.counters)

    def attend(layer: LayerWeights, qkv: Tensor, cache: Tensor, out: Tensor, window: int | None = None, /) -> None:
        cut = _attention_config(batch, inputs.max_q_len, *heads, dtype, ws.limits, window)
        qk_norm_rope(qkv, layer.qk_norm, angles, inputs.slots, cache, c.num_heads, c.rms_norm_eps, ws.dependent)
        paged_attention(qkv[:, :width], cache, where, out, scratch, Sight(scale, window), cut, ws.dependent)

    return attend


@lru_cache(maxsize=256)
def _attention_config(
    batch: int,
    max_q_len: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    limits: DeviceLimits,
    window: int | None,
) -> list[int]:
    config = AttentionConfig.choose(
        batch=batch,
        max_q_len=max_q_len,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        limits=limits,
        window=window,
    )
    return list(dataclasses.astuple(config))


class Stream(Protocol):
    """The residual stream of one pass: how what a block reads is normed, and what it says is added.

    `hidden` is the stream as it enters a layer once `normed_product` of its first projection was enqueued.
    """

    def normed_product(self, name: str, norm: Tensor, w: Weight, out: Tensor) -> None:
        """Write the product `name` of the normed stream into `out`."""

    def add_product(self, name: str, x: Tensor, w: Weight, norm: Tensor | None) -> None:
        """Add the product `name` of x to the stream; `norm` is the weight of the norm that a product reads it through
        next."""

    def add_mlp(self, w: LayerWeights, norm: Tensor | None) -> None:
        """Add what the layer's MLP makes of the normed stream; `norm` as in `add_product`."""

    def following(self, norm: Tensor | None) -> Next | None:
        """What is to be written beside the stream for the product behind `norm`."""

    def normed(self, norm: Tensor) -> Tensor:
        """The normed stream `[N, hidden]`, in the workspace."""


def stream_of(hidden: Tensor, ws: Workspace, eps: float) -> Stream:
    """The stream of a pass, `hidden` `[N, hidden]` of the workspace."""
    return (FewRows if hidden.shape[0] <= MAX_ROWS else ManyRows)(hidden, ws, eps)


@dataclass(slots=True)
class FewRows:
    """The stream is prepared for its next norm as it is added to, and normed by the product that reads it: no kernels
    for norms. What a norm's weight may make of fp16 is beyond its range, so there norms are kernels of their own."""

    hidden: Tensor
    ws: Workspace
    eps: float
    _squares: Tensor | None = field(default=None, init=False)

    def normed_product(self, name: str, norm: Tensor, w: Weight, out: Tensor) -> None:
        self._normed_product(name, norm, operand(w), out)

    def add_product(self, name: str, x: Tensor, w: Weight, norm: Tensor | None) -> None:
        following = self.following(norm)
        product = dataclasses.replace(operand(w), accumulate=True, next=following)
        _few_product(self.ws, name, x, product, self.hidden)
        cut = self.ws.config(name, x.shape[0], product.coding)
        tiles = -(-self.hidden.shape[1] // LinearConfig(*cut).block_n)
        self._squares = None if following is None else following.squares[:tiles]

    def add_mlp(self, w: LayerWeights, norm: Tensor | None) -> None:
        activated = self.ws.activated[: self.hidden.shape[0]]
        gate_up = dataclasses.replace(operand(w.gate_up), gated=True)
        self._normed_product("gate_up", w.post_attention_norm, gate_up, activated)
        self.add_product("down", activated, w.down, norm)

    def following(self, norm: Tensor | None) -> Next | None:
        if norm is None or norm.dtype == torch.float16:
            return None
        # As `embed` leaves it; products say how many tiles they have written.
        self._squares = self.ws.squares[:1]
        return Next(norm, self.ws.weighted[: self.hidden.shape[0]], self.ws.squares)

    def normed(self, norm: Tensor) -> Tensor:
        out = self.ws.normed[: self.hidden.shape[0]]
        rms_norm(self.hidden, None, norm, out, self.eps, self.ws.dependent)
        return out

    def _normed_product(self, name: str, norm: Tensor, product: Product, out: Tensor) -> None:
        if self._squares is None:
            _few_product(self.ws, name, self.normed(norm), product, out)
            return
        normed = dataclasses.replace(product, squares=self._squares, eps=self.eps)
        _few_product(self.ws, name, self.ws.weighted[: self.hidden.shape[0]], normed, out)


@dataclass(slots=True)
class ManyRows:
    """Products by `_wide_product`; what a block adds waits until the next norm, which adds it in the same kernel."""

    hidden: Tensor
    ws: Workspace
    eps: float
    _delta: Tensor | None = field(default=None, init=False)

    def normed_product(self, name: str, norm: Tensor, w: Weight, out: Tensor) -> None:
        _wide_product(self.ws, name, self.normed(norm), w, out)

    def add_product(self, name: str, x: Tensor, w: Weight, norm: Tensor | None) -> None:
        self._delta = self.ws.delta[: x.shape[0]]
        _wide_product(self.ws, name, x, w, self._delta)

    def add_mlp(self, w: LayerWeights, norm: Tensor | None) -> None:
        ws, rows = self.ws, self.hidden.shape[0]
        normed, delta = self.normed(w.post_attention_norm), ws.delta[:rows]
        for first in range(0, rows, _MLP_ROWS):
            part = slice(first, min(first + _MLP_ROWS, rows))
            count = part.stop - first
            _wide_product(ws, "gate_up", normed[part], w.gate_up, ws.gate_up[:count])
            silu_and_mul(ws.gate_up[:count], ws.activated[:count], ws.dependent)
            _wide_product(ws, "down", ws.activated[:count], w.down, delta[part])
        self._delta = delta

    def following(self, norm: Tensor | None) -> Next | None:
        return None

    def normed(self, norm: Tensor) -> Tensor:
        out = self.ws.normed[: self.hidden.shape[0]]
        if self._delta is None:
            rms_norm(self.hidden, None, norm, out, self.eps, self.ws.dependent)
        else:
            rms_norm(self._delta, self.hidden, norm, out, self.eps, self.ws.dependent)
            self._delta = None
        return out


def _wide_product(ws: Workspace, name: str, x: Tensor, w: Weight, out: Tensor) -> None:
    """By cuBLAS. Codes of up to 256 rows are read where they are, 64 rows at a time; for more, pieces of them become
    numbers, one after the other in the same memory."""
    if isinstance(w, CodedWeight):
        if x.shape[0] <= _CODED_ROWS:
            for first in range(0, x.shape[0], MAX_ROWS):
                _few_product(ws, name, x[first : first + MAX_ROWS], operand(w), out[first : first + MAX_ROWS])
            return
        features, size = w.shape
        step = ws.numbers.numel() // size
        for first in range(0, features, step):
            part = slice(first, min(first + step, features))
            numbers = ws.numbers[: (part.stop - first) * size].view(-1, size)
            dequantize(w, first, numbers, ws.dependent)
            _mm(x, numbers, None if w.bias is None else w.bias[part], out[:, part])
        return
    _mm(x, stored(w), w.bias, out)


def _mm(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _wide_logits(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)


def operand(w: Weight) -> Product:
    """A product with a weight that the kernels read: dense or coded."""
    if isinstance(w, CodedWeight):
        return Product(w.codes, w.bias, coding=w.coding, scales=w.scales)
    return Product(stored(w), w.bias)


def _shapes_of(weights: DenseWeights) -> dict[str, list[LinearShape]]:
    """`linear_shapes` in each coding that a layer has."""
    shapes = {name: [shape] for name, shape in linear_shapes(weights.config, weights.dtype).items()}
    for name in ("qkv", "o", "gate_up", "down"):
        kinds = {getattr(getattr(layer, name), "coding", None) for layer in weights.layers}
        shapes[name] = [dataclasses.replace(shapes[name][0], coding=coding) for coding in kinds]
    return shapes


def stored(w: Weight) -> Tensor:
    """A dense weight as checkpoints have it, `[out, in]` contiguous; LM heads are always dense."""
    assert isinstance(w, DenseWeight), "a weight packed for a CPU"
    return w.weight
