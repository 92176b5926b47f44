"""The residual stream of a pass on a CUDA device: what blocks read of it, and what they add. Attends nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specrs.kernels.cuda.activation import silu_and_mul
from specrs.kernels.cuda.configs import LinearConfig
from specrs.kernels.cuda.rms_norm import rms_norm
from specrs.kernels.cuda.skinny_linear import MAX_ROWS, Next, Product
from specrs.kernels.linear import Weight
from specrs.models.cuda.products import few_product, operand, wide_product
from specrs.models.cuda.workspace import MLP_ROWS, Workspace
from specrs.models.dense_weights import LayerWeights


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
        few_product(self.ws, name, x, product, self.hidden)
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
            few_product(self.ws, name, self.normed(norm), product, out)
            return
        normed = dataclasses.replace(product, squares=self._squares, eps=self.eps)
        few_product(self.ws, name, self.ws.weighted[: self.hidden.shape[0]], normed, out)


@dataclass(slots=True)
class ManyRows:
    """Products by `wide_product`; what a block adds waits until the next norm, which adds it in the same kernel."""

    hidden: Tensor
    ws: Workspace
    eps: float
    _delta: Tensor | None = field(default=None, init=False)

    def normed_product(self, name: str, norm: Tensor, w: Weight, out: Tensor) -> None:
        wide_product(self.ws, name, self.normed(norm), w, out)

    def add_product(self, name: str, x: Tensor, w: Weight, norm: Tensor | None) -> None:
        self._delta = self.ws.delta[: x.shape[0]]
        wide_product(self.ws, name, x, w, self._delta)

    def add_mlp(self, w: LayerWeights, norm: Tensor | None) -> None:
        ws, rows = self.ws, self.hidden.shape[0]
        normed, delta = self.normed(w.post_attention_norm), ws.delta[:rows]
        for first in range(0, rows, MLP_ROWS):
            part = slice(first, min(first + MLP_ROWS, rows))
            count = part.stop - first
            wide_product(ws, "gate_up", normed[part], w.gate_up, ws.gate_up[:count])
            silu_and_mul(ws.gate_up[:count], ws.activated[:count], ws.dependent)
            wide_product(ws, "down", ws.activated[:count], w.down, delta[part])
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
