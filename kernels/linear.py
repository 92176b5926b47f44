"""Matrix products with weights laid out once at load. The bias is the only thing fused.

A **kind** is what a projection is stored as. It knows its product, its bytes and its reference, so a new kind
is a class and a line where it is made, and no caller changes. Kinds today: dense, packed for a CPU (`pack` makes
these two), and in `coded_weight` coded, which the kernels of a GPU read.

On a CPU, fp32 and bf16 weights are packed into oneDNN's blocked layout: with few rows MKL repacks the weight at every
call, and six rows of a [1024, 6144] product take 0.56 ms packed and 3.2 ms through torch.mm (two cores, AVX-512). The
operator behind it is the one that torch.compile emits for frozen weights; where a build lacks it, torch.mm serves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_linear_packed: Callable[..., Tensor] | None = (
    torch.ops.mkldnn._linear_pointwise.default
    if torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    else None
)

_SMALL = 2**19
"""Elements up to which torch.mm is as fast or faster: a oneDNN call costs 10 to 20 us more, and what MKL repacks of so
small a weight stays in the caches. From 2^20 on six rows take up to twice as long through torch.mm."""
_FEW_ROWS = 32
"""Rows up to which it is; from 64 on packed weights are faster on two cores. With one it never turns."""
_TYPICAL_ROWS = 16
"""Rows that the packed layout is chosen for; layouts chosen for one row are twice as slow for all others."""
_EXACT_ROWS = 32
"""Row counts above are padded to multiples of 16: oneDNN compiles 0.6 ms for each new shape and keeps 1,024 of them."""


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


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """In oneDNN's blocked layout for a CPU. A small fp32 weight is held plainly too, at most 2 MiB more."""

    packed: Tensor
    few_rows: Tensor | None
    """[in, out] contiguous, for up to 32 rows"""
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """See `Weight`; like what follows."""
        return self.packed.shape[0], self.packed.shape[1]

    @property
    def num_bytes(self) -> int:
        """See `Weight`. The layout pads nothing that this counts."""
        plain = 0 if self.few_rows is None else self.few_rows.nbytes
        return self.packed.numel() * self.packed.element_size() + plain + _bias_bytes(self.bias)

    def product(self, x: Tensor) -> Tensor:
        """See `Weight`."""
        rows, few = x.shape[0], self.few_rows
        if few is not None and rows <= _FEW_ROWS:
            return torch.mm(x, few) if self.bias is None else torch.addmm(self.bias, x, few)
        assert _linear_packed is not None
        padding = -rows % 16 if rows > _EXACT_ROWS else 0
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        y = _linear_packed(x, self.packed, self.bias, "none", [], "")
        return y[:rows] if padding else y

    def dequantized(self) -> Tensor:
        """See `Weight`."""
        return self._unpacked().double()

    def _unpacked(self) -> Tensor:
        dense: Tensor = self.packed.to_dense()
        return dense


def pack(weight: Tensor, bias: Tensor | None = None) -> Weight:
    """Lay out `weight` `[out, in]` (as checkpoints store it) for its device; a packed weight does not keep the
    original, a dense one does."""
    if weight.device.type != "cpu" or not _can_pack(weight.dtype):
        return DenseWeight(weight.contiguous(), bias)
    return _packed(weight, bias)


def linear(x: Tensor, w: Weight) -> Tensor:
    """Return `x W^T + b` for `x` `[N, in]`: what the kind makes of it, see `Weight.product`."""
    return w.product(x)


def linear_reference(x: Tensor, w: Weight) -> Tensor:
    """`linear` of any kind in float64."""
    y = x.double() @ w.dequantized().t()
    return y if w.bias is None else y + w.bias.double()


def _packed(weight: Tensor, bias: Tensor | None) -> PackedWeight:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
    small = weight.dtype == torch.float32 and weight.numel() <= _SMALL
    return PackedWeight(packed, weight.t().contiguous() if small else None, bias)


def _bias_bytes(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.nbytes


def _can_pack(dtype: torch.dtype) -> bool:
    if _linear_packed is None:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
