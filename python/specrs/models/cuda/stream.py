"""The residual stream of a pass on a CUDA device: what blocks read of it, and what they add. Attends nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specrs.kernels.cuda._heads import Heads
from specrs.kernels.cuda.configs import LinearConfig
from specrs.kernels.cuda.linear_product import MAX_ROWS, Next, Product
from specrs.kernels.cuda.rms_norm import rms_norm
from specrs.kernels.linear import Weight
from specrs.models.config import ModelConfig
from specrs.models.cuda.experts import CHUNK_ROWS, mixture
from specrs.models.cuda.products import (
    few_product,
    gated,
    gated_product,
    multiplied,
    operand,
    product,
    write_router_logits,
)
from specrs.models.cuda.workspace import MLP_ROWS, Workspace
from specrs.models.torch_weights import TorchExperts, TorchLayer
from specrs.parallel.ranks import Ranks


class Stream(Protocol):
    """The residual stream of one pass: how what a block reads is normed, and what it says is added.

    `hidden` is the stream as it enters a layer once `normed_product` of its first projection was enqueued. A norm None
    is none: the stream is read as it is.
    """

    def normed_product(
        self, name: str, norm: Tensor | None, w: Weight, out: Tensor, heads: Heads | None = None
    ) -> None:
        """Write the product `name` of the normed stream into `out`; of `heads`, see `Product`, up to 64 rows."""

    def add_product(self, name: str, x: Tensor, w: Weight, norm: Tensor | None, behind: Tensor | None = None) -> None:
        """Add the product `name` of x, or with the weight `behind` of a norm that normed, to the stream; `norm` is the
        weight of the norm that a product reads it through next."""

    def add_mlp(self, w: TorchLayer, norm: Tensor | None) -> None:
        """Add what the layer's MLP makes of the normed stream; `norm` as in `add_product`."""

    def following(self, norm: Tensor | None) -> Next | None:
        """What is to be written beside the stream for the product behind `norm`."""

    def normed(self, norm: Tensor) -> Tensor:
        """The normed stream `[N, hidden]`, in the workspace."""


def stream_of(hidden: Tensor, positions: Tensor, ws: Workspace, c: ModelConfig, ranks: Ranks | None = None) -> Stream:
    """The stream of a pass, `hidden` `[N, hidden]` of the workspace, `positions` `[N]`; of several `ranks`, which hold
    parts of the weights, all have the same."""
    if hidden.shape[0] <= MAX_ROWS and c.norms == "before" and c.experts is None and ranks is None:
        return FusedStream(hidden, ws, c)
    return PlainStream(hidden, positions, ws, c, ranks)


@dataclass(slots=True)
class FusedStream:
    """Of few rows: the stream is prepared for its next norm as it is added to, and normed by the product that reads it:
    no kernels for norms. What a norm's weight may make of fp16 is beyond its range, and rows are normed before they are
    rounded to FP8, so there norms are kernels of their own. What blocks add is not normed."""

    hidden: Tensor
    ws: Workspace
    c: ModelConfig
    _squares: Tensor | None = field(default=None, init=False)

    def normed_product(
        self, name: str, norm: Tensor | None, w: Weight, out: Tensor, heads: Heads | None = None
    ) -> None:
        assert norm is not None
        self._normed_product(name, norm, w, dataclasses.replace(operand(w), heads=heads), out)

    def add_product(self, name: str, x: Tensor, w: Weight, norm: Tensor | None, behind: Tensor | None = None) -> None:
        assert behind is None
        following, multiplier = self.following(norm), self.c.residual_multiplier
        product = dataclasses.replace(operand(w), accumulate=True, multiplier=multiplier, next=following)
        few_product(self.ws, name, multiplied(self.ws, x, w), product, self.hidden)
        cut = self.ws.config(name, x.shape[0], product.coding)
        tiles = -(-self.hidden.shape[1] // LinearConfig(*cut).block_n)
        self._squares = None if following is None else following.squares[:tiles]

    def add_mlp(self, w: TorchLayer, norm: Tensor | None) -> None:
        activated = self.ws.activated[: self.hidden.shape[0]]
        self._normed_product("gate_up", w.post_attention_norm, w.gate_up, gated(w.gate_up, self.c), activated)
        self.add_product("down", activated, w.down, norm)

    def following(self, norm: Tensor | None) -> Next | None:
        if norm is None or norm.dtype == torch.float16 or self.ws.rounds_rows:
            return None
        # As `embed` leaves it; products say how many tiles they have written.
        self._squares = self.ws.squares[:1]
        return Next(norm, self.ws.weighted[: self.hidden.shape[0]], self.ws.squares)

    def normed(self, norm: Tensor) -> Tensor:
        out = self.ws.normed[: self.hidden.shape[0]]
        rms_norm(self.hidden, None, norm, out, self.c.rms_norm_eps, self.ws.dependent)
        return out

    def _normed_product(self, name: str, norm: Tensor, w: Weight, product: Product, out: Tensor) -> None:
        if self._squares is None:
            few_product(self.ws, name, multiplied(self.ws, self.normed(norm), w), product, out)
            return
        normed = dataclasses.replace(product, squares=self._squares, eps=self.c.rms_norm_eps)
        few_product(self.ws, name, self.ws.weighted[: self.hidden.shape[0]], normed, out)


@dataclass(slots=True)
class PlainStream:
    """Of any number of rows: norms are kernels of their own. What a block adds waits until the stream is read, and is
    added, normed itself where it has a norm, by the kernel that norms the stream. Of several ranks each has a part of
    what a block adds: their sum waits, so that the stream is added once."""

    hidden: Tensor
    positions: Tensor
    ws: Workspace
    c: ModelConfig
    ranks: Ranks | None = None
    _delta: Tensor | None = field(default=None, init=False)
    _behind: Tensor | None = field(default=None, init=False)

    def normed_product(
        self, name: str, norm: Tensor | None, w: Weight, out: Tensor, heads: Heads | None = None
    ) -> None:
        x = self._read(norm)
        if heads is None:
            product(self.ws, name, x, w, out)
        else:
            few_product(self.ws, name, x, dataclasses.replace(operand(w), heads=heads), out)

    def add_product(self, name: str, x: Tensor, w: Weight, norm: Tensor | None, behind: Tensor | None = None) -> None:
        self._delta, self._behind = self.ws.delta[: x.shape[0]], behind
        product(self.ws, name, x, w, self._part(self._delta))
        self._sum(self._delta)

    def add_mlp(self, w: TorchLayer, norm: Tensor | None) -> None:
        ws, rows = self.ws, self.hidden.shape[0]
        x = self._read(w.post_attention_norm if self.c.norms != "behind" else None)
        self._delta, self._behind = ws.delta[:rows], w.mlp_output_norm
        out = self._part(self._delta)
        if w.experts is not None:
            self._mix(x, w.experts, out)
            self._sum(self._delta)
            return
        for first in range(0, rows, MLP_ROWS):
            part = slice(first, min(first + MLP_ROWS, rows))
            activated = ws.activated[: part.stop - first]
            gated_product(ws, x[part], w.gate_up, activated, self.c)
            product(ws, "down", activated, w.down, out[part])
        self._sum(self._delta)

    def _part(self, delta: Tensor) -> Tensor:
        """Where what this rank adds is written."""
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
            mixture(self.c, b, x[part], self.positions[part], w, out[part], ws.dependent)

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
            rms_norm(self._delta, self.hidden, norm, out, eps, dependent, self._behind, multiplier)
            self._delta = None
