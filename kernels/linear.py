"""Matrix products with weights laid out once at load. The bias is the only thing fused.

A **kind** is what a projection is stored as. It knows its product, its bytes and its reference, so a new kind
is a class and a line where it is made, and no caller changes. Kinds today: dense, and in `coded_weight` coded, which
the kernels of a GPU read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Weight(Protocol):
    """What a projection is stored as: a weight `[out, in]` and an optional bias `[out]`. Immutable."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""

    @property
    def bias(self) -> Tensor | None:
        """[out], or None"""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it holds, every layout of it and the bias."""

    def product(self, x: Tensor) -> Tensor:
        """`x W^T + b` for `x` `[N, in]`: `[N, out]` of x's dtype, accumulated in fp32 (float64 for float64)."""

    def dequantized(self) -> Tensor:
        """The weight that products are of, `[out, in]` float64: the reference, which is slow."""


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """As checkpoints store it. GPU kernels read it as it is."""

    weight: Tensor
    """[out, in] contiguous"""
    bias: Tensor | None = None
    _transposed: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_transposed", self.weight.t())  # a view, made once: 1 us a call

    @property
    def shape(self) -> tuple[int, int]:
        """See `Weight`; like what follows."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def num_bytes(self) -> int:
        """See `Weight`."""
        return self.weight.nbytes + _bias_bytes(self.bias)

    def product(self, x: Tensor) -> Tensor:
        """See `Weight`."""
        return torch.mm(x, self._transposed) if self.bias is None else torch.addmm(self.bias, x, self._transposed)

    def dequantized(self) -> Tensor:
        """See `Weight`."""
        return self.weight.double()


def dense_weight(weight: Tensor, bias: Tensor | None = None) -> DenseWeight:
    """Return `weight` `[out, in]`, contiguous, as a dense weight."""
    return DenseWeight(weight.contiguous(), bias)


def linear(x: Tensor, w: Weight) -> Tensor:
    """Return `x W^T + b` for `x` `[N, in]`: what the kind makes of it, see `Weight.product`."""
    return w.product(x)


def linear_reference(x: Tensor, w: Weight) -> Tensor:
    """`linear` of any kind in float64."""
    y = x.double() @ w.dequantized().t()
    return y if w.bias is None else y + w.bias.double()


def _bias_bytes(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.nbytes
