"""Residual stream of a pass on a CUDA device. Attention and MLP blocks read it through a norm and add their outputs to
it. Computes no attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specrs.backends.cuda.adapters import LayerAdapters
from specrs.backends.cuda.experts import CHUNK_ROWS, mixture
from specrs.backends.cuda.products import (
    few_product,
    few_rows,
    gated,
    gated_product,
    multiplied,
    operand,
    product,
    shared_expert,
    write_router_logits,
)
from specrs.backends.cuda.workspace import MLP_ROWS, Workspace
from specrs.kernels.cuda._heads import Heads
from specrs.kernels.cuda.configs import LinearConfig
from specrs.kernels.cuda.layer_embedding import gate_embedding
from specrs.kernels.cuda.linear_product import Next, Product
from specrs.kernels.cuda.rms_norm import rms_norm
from specrs.kernels.linear import Weight
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import ParallelNorms
from specrs.models.torch_weights import TorchExperts, TorchLayer
from specrs.parallel.ranks import Ranks


class Stream(Protocol):
    """The residual stream of one pass: norms what a block reads, and adds what a block returns.

    After `normed_product` of a layer's first projection was enqueued, `hidden` is the stream at the layer's input. A
    norm of None means no norm: the stream is read as it is. `adapters` are the layer's LoRA adapters; None: there are
    none.
    """

    def normed_product(
        self,
        name: str,
        norm: Tensor | None,
        w: Weight,
        out: Tensor,
        heads: Heads | None = None,
        adapters: LayerAdapters | None = None,
    ) -> None:
        """Write the product `name` of the normed stream with `w` into `out`. With `heads`, for up to 64 rows, the
        kernel also norms and rotates the attention heads in `out` and writes K and V into the cache."""

    def add_product(
        self,
        name: str,
        x: Tensor,
        w: Weight,
        norm: Tensor | None,
        after: Tensor | None = None,
        adapters: LayerAdapters | None = None,
    ) -> None:
        """Add the product of x and `w` to the residual stream. `after`: weight of a norm that is applied to the product
        first. `norm`: weight of the norm that the next product applies to the stream. `name`: the projection, for its
        adapters."""

    def add_mlp(
        self,
        w: TorchLayer,
        norm: Tensor | None,
        adapters: LayerAdapters | None = None,
        embedding: Tensor | None = None,
    ) -> None:
        """Add the output of the layer's MLP to the residual stream, and end the layer: add what it makes of `embedding`
        `[N, size]`, its own embedding of the rows' tokens, if there is one, and multiply the stream by the layer's
        scalar. `norm`: weight of the norm that the next product applies to the stream."""

    def following(self, norm: Tensor | None) -> Next | None:
        """Return the buffers that a kernel must write when it adds to the residual stream, so that the next product can
        apply `norm` to the stream. None: the kernel writes only the stream."""

    def normed(self, norm: Tensor) -> Tensor:
        """Return the residual stream after `norm`, `[N, hidden]`, in the workspace."""


def stream_of(hidden: Tensor, positions: Tensor, ws: Workspace, c: ModelConfig, ranks: Ranks | None = None) -> Stream:
    """Return the residual stream of a pass, starting with `hidden` `[N, hidden]`, a view of the workspace, at
    `positions` `[N]`.

    A `FusedStream` serves passes of up to `few_rows` rows on one rank. Models with experts, or with
    norms that do not stand before their blocks, use a `PlainStream`, as all other passes do. With several `ranks`, each
    holds a part of the weights and the whole stream.
    """
    if hidden.shape[0] <= few_rows(ws) and c.norms == "before" and c.experts is None and ranks is None:
        return FusedStream(hidden, ws, c)
    return PlainStream(hidden, positions, ws, c, ranks)


@dataclass(slots=True)
class FusedStream:
    """Stream of few rows, without kernels for norms. A product that adds to the stream also prepares its next norm, and
    the product that reads it applies the norm.

    fp16 and FP8 rows need separate norms: the weighted stream may exceed fp16's range, and rows are normed before they
    are rounded to FP8. Outputs of blocks have no norms here.
    """

    hidden: Tensor
    ws: Workspace
    c: ModelConfig
    _squares: Tensor | None = field(default=None, init=False)

    def normed_product(
        self,
        name: str,
        norm: Tensor | None,
        w: Weight,
        out: Tensor,
        heads: Heads | None = None,
        adapters: LayerAdapters | None = None,
    ) -> None:
        assert norm is not None
        self._normed_product(name, norm, w, dataclasses.replace(operand(w), heads=heads), out, adapters)

    def add_product(
        self,
        name: str,
        x: Tensor,
        w: Weight,
        norm: Tensor | None,
        after: Tensor | None = None,
        adapters: LayerAdapters | None = None,
    ) -> None:
        assert after is None
        following, multiplier = self.following(norm), self.c.residual_multiplier
        product = dataclasses.replace(operand(w), accumulate=True, multiplier=multiplier, next=following)
        if adapters is not None:
            # First, because the product also prepares the stream's next norm.
            adapters.add_(name, x, self.hidden, multiplier)
        few_product(self.ws, name, multiplied(self.ws, x, w), product, self.hidden)
        cut = self.ws.config(name, x.shape[0], product.coding)
        tiles = -(-self.hidden.shape[1] // LinearConfig(*cut).block_n)
        self._squares = None if following is None else following.squares[:tiles]

    def add_mlp(
        self,
        w: TorchLayer,
        norm: Tensor | None,
        adapters: LayerAdapters | None = None,
        embedding: Tensor | None = None,
    ) -> None:
        assert embedding is None
        assert w.scalar == 1
        activated = self.ws.activated[: self.hidden.shape[0]]
        self._normed_product("gate_up", w.post_attention_norm, w.gate_up, gated(w.gate_up, self.c), activated, adapters)
        self.add_product("down", activated, w.down, norm, adapters=adapters)

    def following(self, norm: Tensor | None) -> Next | None:
        if norm is None or norm.dtype == torch.float16 or self.ws.rounds_rows:
            return None
        # The embedding kernel writes one tile. Products set the number of tiles that they write.
        self._squares = self.ws.squares[:1]
        return Next(norm, self.ws.weighted[: self.hidden.shape[0]], self.ws.squares)

    def normed(self, norm: Tensor) -> Tensor:
        out = self.ws.normed[: self.hidden.shape[0]]
        rms_norm(self.hidden, None, norm, out, self.c.rms_norm_eps, self.ws.dependent)
        return out

    def _normed_product(
        self, name: str, norm: Tensor, w: Weight, product: Product, out: Tensor, adapters: LayerAdapters | None
    ) -> None:
        squares, eps = self._squares, self.c.rms_norm_eps
        x = self.normed(norm) if squares is None else self.ws.weighted[: self.hidden.shape[0]]
        if squares is not None:
            product = dataclasses.replace(product, squares=squares, eps=eps)
        if adapters is not None:
            of_norm = None if squares is None else (squares, eps)
            product = dataclasses.replace(product, added=adapters.added(name, x, of_norm))
        few_product(self.ws, name, x if squares is not None else multiplied(self.ws, x, w), product, out)


@dataclass(slots=True)
class PlainStream:
    """Stream of any number of rows, with separate kernels for norms.

    A block's output waits in the workspace until the stream is read. The kernel that norms the stream first adds that
    output, normed if the block's output has a norm. With several ranks, the sum of all ranks' outputs waits, so it is
    added once.
    """

    hidden: Tensor
    positions: Tensor
    ws: Workspace
    c: ModelConfig
    ranks: Ranks | None = None
    _delta: Tensor | None = field(default=None, init=False)
    _after: Tensor | None = field(default=None, init=False)
    _scalar: float | None = field(default=None, init=False)
    """Factor on the stream with the waiting output, at the end of a layer. None: there is none."""

    def normed_product(
        self,
        name: str,
        norm: Tensor | None,
        w: Weight,
        out: Tensor,
        heads: Heads | None = None,
        adapters: LayerAdapters | None = None,
    ) -> None:
        x = self._read(norm)
        if heads is None:
            product(self.ws, name, x, w, out)
            if adapters is not None:
                adapters.add_(name, x, out)
            return
        added = None if adapters is None else adapters.added(name, x)
        few_product(self.ws, name, x, dataclasses.replace(operand(w), heads=heads, added=added), out)

    def add_product(
        self,
        name: str,
        x: Tensor,
        w: Weight,
        norm: Tensor | None,
        after: Tensor | None = None,
        adapters: LayerAdapters | None = None,
    ) -> None:
        self._delta, self._after = self.ws.delta[: x.shape[0]], after
        out = self._part(self._delta)
        product(self.ws, name, x, w, out)
        if adapters is not None:
            adapters.add_(name, x, out)
        self._sum(self._delta)

    def add_mlp(
        self,
        w: TorchLayer,
        norm: Tensor | None,
        adapters: LayerAdapters | None = None,
        embedding: Tensor | None = None,
    ) -> None:
        self._add_mlp(w, adapters)
        if embedding is not None:
            self._add_embedding(w, embedding)
        if self.c.layer_scalars:
            self._scalar = w.scalar

    def _add_mlp(self, w: TorchLayer, adapters: LayerAdapters | None) -> None:
        ws, rows = self.ws, self.hidden.shape[0]
        x = self._read(w.post_attention_norm if self.c.norms != "after" else None)
        self._delta, self._after = ws.delta[:rows], w.mlp_output_norm
        out = self._part(self._delta)
        if w.experts is not None and w.experts.norms is not None:
            self._mlp(x, w, ws.mixed[:rows], adapters)
            rms_norm(ws.mixed[:rows], None, w.experts.norms.mlp_output, self._delta, self.c.rms_norm_eps, ws.dependent)
            self._mix_next_to_mlp(w.experts, w.experts.norms)
            return
        if w.experts is not None:
            self._mix(x, w.experts, out)
        else:
            self._mlp(x, w, out, adapters)
        self._sum(self._delta)

    def _mlp(self, x: Tensor, w: TorchLayer, out: Tensor, adapters: LayerAdapters | None) -> None:
        """Write the output of the layer's MLP for `x` `[N, hidden]` into `out` `[N, hidden]`."""
        ws, rows = self.ws, x.shape[0]
        for first in range(0, rows, MLP_ROWS):
            part = slice(first, min(first + MLP_ROWS, rows))
            activated = ws.part(ws.activated, part.stop - first, w.down.shape[1])
            own = None if adapters is None else adapters.narrow(first, part.stop)
            gated_product(ws, x[part], w.gate_up, activated, self.c, own)
            product(ws, "down", activated, w.down, out[part])
            if own is not None:
                own.add_("down", activated, out[part])

    def _add_embedding(self, w: TorchLayer, embedding: Tensor) -> None:
        """Add what `AdditionWeights` describes, of the layer's embedding `[N, size]` of the rows' tokens."""
        ws, rows, own = self.ws, self.hidden.shape[0], w.addition
        assert own is not None
        gate = ws.layer_gate[:rows]
        product(ws, "layer_gate", self._read(None), own.gate, gate)
        gate_embedding(gate, embedding, self.c.activation != "silu", ws.dependent)
        self._delta, self._after = ws.delta[:rows], own.norm
        product(ws, "layer_projection", gate, own.projection, self._delta)

    def _part(self, delta: Tensor) -> Tensor:
        """Return the memory for this rank's part of a sum that is added to the residual stream."""
        return delta if self.ranks is None else self.ranks.exchanges.part(delta)

    def _sum(self, delta: Tensor) -> None:
        if self.ranks is not None:
            self.ranks.exchanges.sum(delta)

    def _mix(self, x: Tensor, w: TorchExperts, out: Tensor) -> None:
        ws, rows, b = self.ws, x.shape[0], self.ws.experts
        assert b is not None
        for first in range(0, rows, CHUNK_ROWS):
            part = slice(first, min(first + CHUNK_ROWS, rows))
            write_router_logits(x[part], w.router, b.logits[: part.stop - first], ws)
            shared = [] if w.shared is None else shared_expert(ws, x[part], w.shared, self.c)
            mixture(self.c, b, x[part], self.positions[part], w, shared, out[part], ws.dependent)

    def _mix_next_to_mlp(self, w: TorchExperts, norms: ParallelNorms[Tensor]) -> None:
        """Add the normed output of the experts to that of the MLP, which waits, as `ParallelNorms` describes. The
        stream has no output to add."""
        ws, rows, b, scales = self.ws, self.hidden.shape[0], self.ws.experts, w.scales
        eps, dependent, out = self.c.rms_norm_eps, self.ws.dependent, self.ws.mixed[:rows]
        assert b is not None
        assert scales is not None
        for first in range(0, rows, CHUNK_ROWS):
            part = slice(first, min(first + CHUNK_ROWS, rows))
            h, x = self.hidden[part], ws.normed[part]
            rms_norm(h, None, scales.hidden, x, eps, dependent)
            write_router_logits(x, w.router, b.logits[: len(x)], ws, self.c.hidden_size**-0.5)
            rms_norm(h, None, norms.expert_input, x, eps, dependent)
            mixture(self.c, b, x, self.positions[part], w, [], out[part], dependent)
        rms_norm(out, self._delta, None, None, eps, dependent, norms.expert_output)

    def following(self, norm: Tensor | None) -> Next | None:
        return None

    def normed(self, norm: Tensor) -> Tensor:
        out = self.ws.normed[: self.hidden.shape[0]]
        self._norm(norm, out)
        return out

    def _read(self, norm: Tensor | None) -> Tensor:
        if norm is not None:
            return self.normed(norm)
        if self._delta is not None:
            self._norm(None, None)
        return self.hidden

    def _norm(self, norm: Tensor | None, out: Tensor | None) -> None:
        eps, dependent, multiplier = self.c.rms_norm_eps, self.ws.dependent, self.c.residual_multiplier
        if self._delta is None:
            rms_norm(self.hidden, None, norm, out, eps, dependent)
        else:
            factors = [multiplier] if self._scalar is None else [multiplier, self._scalar]
            rms_norm(self._delta, self.hidden, norm, out, eps, dependent, self._after, factors)
            self._delta = self._scalar = None
