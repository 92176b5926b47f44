"""Spreads logits over some of the target's ids to all of them. Draws nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.core import UNKNOWN_BELOW
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_BELOW = tl.constexpr(UNKNOWN_BELOW)
_TILE = 8192
_BLOCK = 2048


@triton.jit(do_not_specialize=["num_own", "num_ids", "own_stride", "out_stride"])
def spread_logits_kernel(  # type: ignore[no-untyped-def]
    own, source, out, num_own, num_ids, own_stride, out_stride, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    i = tl.arange(0, BLOCK)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for at in range(0, num_own, BLOCK):
        x = tl.load(own + row * own_stride + at + i, mask=at + i < num_own, other=float("inf"))
        least = tl.minimum(least, x)
    below = tl.min(least, 0) - _BELOW
    for at in range(first, tl.minimum(first + TILE, num_ids), BLOCK):
        token = at + i
        column = tl.load(source + token, mask=token < num_ids, other=-1)
        x = tl.load(own + row * own_stride + column, mask=column >= 0, other=0.0)
        tl.store(out + row * out_stride + token, tl.where(column >= 0, x, below), mask=token < num_ids)


def spread_logits(own: Tensor, source: Tensor, out: Tensor) -> None:
    """Write `out[:, v] = own[:, source[v]]`. Ids that have no source get a value far below all others.

    Args:
        own: `[N, S]` fp32, rows of any stride.
        source: `[V]` int64, the column of each id; -1 for none.
        out: `[N, V]` fp32, rows of any stride.
    """
    torch.ops.specrs.spread_logits(own, source, out)


@torch.library.custom_op("specrs::spread_logits", mutates_args=["out"])
def _spread_logits(own: Tensor, source: Tensor, out: Tensor) -> None:
    _check(own, source, out)
    spread_logits_kernel[(own.shape[0], triton.cdiv(out.shape[1], _TILE))](
        own, source, out, own.shape[1], out.shape[1], own.stride(0), out.stride(0), TILE=_TILE, BLOCK=_BLOCK
    )


@_spread_logits.register_fake
def _(own: Tensor, source: Tensor, out: Tensor) -> None:
    _check(own, source, out)


def _check(own: Tensor, source: Tensor, out: Tensor) -> None:
    assert own.dtype == out.dtype == torch.float32
    assert own.stride(1) == out.stride(1) == 1
    assert source.shape == out.shape[1:]
    assert own.shape[0] == out.shape[0]


def spread_logits_reference(own: Tensor, source: Tensor, out: Tensor) -> None:
    """Reference for `spread_logits`, in torch."""
    out.copy_((own.amin(dim=1, keepdim=True) - UNKNOWN_BELOW).expand_as(out))
    known = source >= 0
    out[:, known] = own[:, source[known]]


VARIANTS = (
    Variant(
        "spread_logits",
        spread_logits_kernel,
        dict.fromkeys(("own", "out"), "*fp32")
        | {"source": "*i64"}
        | dict.fromkeys(("num_own", "num_ids", "own_stride", "out_stride"), "i32"),
        {"TILE": _TILE, "BLOCK": _BLOCK},
    ),
)
