"""Matrix products with weights laid out once at load. No quantisation; the bias is the only thing fused.

On a CPU, fp32 and bf16 weights are packed into oneDNN's blocked layout: with few rows MKL repacks the weight at every
call, and six rows of a [1024, 6144] product take 0.56 ms packed and 3.2 ms through torch.mm (two cores, AVX-512). The
operator behind it is the one that torch.compile emits for frozen weights; where a build lacks it, torch.mm serves.
"""

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight `[in, out]` with an optional bias `[out]`, in the layouts that `linear` needs; made by `pack`."""

    plain: Tensor | None
    packed: Tensor | None
    bias: Tensor | None


def pack(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Lay out `weight` `[out, in]` (as checkpoints store it) for `linear`; a packed weight does not keep the original.

    A small fp32 weight on a CPU is held in both layouts, at most 2 MiB more.
    """
    if weight.device.type != "cpu":
        return Linear(weight.t(), None, bias)
    if not _can_pack(weight.dtype):
        return Linear(weight.t().contiguous(), None, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
    small = weight.dtype == torch.float32 and weight.numel() <= _SMALL
    return Linear(weight.t().contiguous() if small else None, packed, bias)


def linear(x: Tensor, w: Linear) -> Tensor:
    """Return `x W^T + b` for `x` `[N, in]`: `[N, out]` of x's dtype, accumulated in fp32 (float64 for float64)."""
    rows = x.shape[0]
    if w.plain is not None and (w.packed is None or rows <= _FEW_ROWS):
        return torch.mm(x, w.plain) if w.bias is None else torch.addmm(w.bias, x, w.plain)
    assert _linear_packed is not None
    padding = -rows % 16 if rows > _EXACT_ROWS else 0
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    y = _linear_packed(x, w.packed, w.bias, "none", [], "")
    return y[:rows] if padding else y


def _can_pack(dtype: torch.dtype) -> bool:
    if _linear_packed is None:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
