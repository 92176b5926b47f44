"""Matrix products with weights that are laid out once, at load. Only the bias is fused.

A **kind** is a form in which a projection is stored. It knows its product, its bytes and its reference. So a new kind
is a class and a line where it is made, and no caller changes. Kinds today: dense, and quantized, which GPU kernels read
(in `quantized_weight`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Weight(Protocol):
    """A stored projection: a weight `[out, in]` and an optional bias `[out]`. Immutable."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight: (out, in)."""

    @property
    def bias(self) -> Tensor | None:
        """Bias [out], or None."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of memory, of all layouts of the weight and the bias."""

    def product(self, x: Tensor) -> Tensor:
        """Return `x W^T + b` for `x` `[N, in]`: `[N, out]` of x's dtype, accumulated in fp32 (float64 for float64)."""

    def dequantized(self) -> Tensor:
        """Return the weight that products use, `[out, in]` float64. It is the reference, and slow."""


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A dense weight as checkpoints store it. GPU kernels read it as it is."""

    weight: Tensor
    """[out, in] contiguous"""
    bias: Tensor | None = None
    _transposed: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_transposed", self.weight.t())  # a view, made once: 1 us a call

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight: (out, in)."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def num_bytes(self) -> int:
        """Number of bytes of weight and bias."""
        return self.weight.nbytes + _bias_bytes(self.bias)

    def product(self, x: Tensor) -> Tensor:
        """Return `x W^T + b` for `x` `[N, in]`: `[N, out]` of x's dtype."""
        return torch.mm(x, self._transposed) if self.bias is None else torch.addmm(self.bias, x, self._transposed)

    def dequantized(self) -> Tensor:
        """Return the weight, `[out, in]` float64."""
        return self.weight.double()


def dense_weight(weight: Tensor, bias: Tensor | None = None) -> DenseWeight:
    """Return `weight` `[out, in]`, contiguous, as a dense weight."""
    return DenseWeight(weight.contiguous(), bias)


def linear(x: Tensor, w: Weight) -> Tensor:
    """Return `x W^T + b` for `x` `[N, in]`, computed by `w.product`."""
    return w.product(x)


def linear_reference(x: Tensor, w: Weight) -> Tensor:
    """Return `x W^T + b` in float64, for a weight of any kind."""
    y = x.double() @ w.dequantized().t()
    return y if w.bias is None else y + w.bias.double()


def _bias_bytes(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.nbytes
