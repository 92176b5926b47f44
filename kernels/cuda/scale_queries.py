"""Multiplies rotated queries by factors that grow with the position. Rotates and attends nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import options, start_next, wait_for_previous
from specrs.kernels.cuda.variants import Variant
from specrs.kernels.rotary import query_factors
from torch import Tensor

_BLOCK = 1024


@triton.jit
def scale_queries_kernel(  # type: ignore[no-untyped-def]
    q, positions, q_stride, beta, LENGTH: tl.constexpr, OFFSET: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    # In this order attention, which comes next, may read positions before it waits itself.
    wait_for_previous(DEPENDENT)
    start_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row) + OFFSET
    if position >= LENGTH:  # before that the factor is 1
        factor = 1 + beta * tl.log((1 + position // LENGTH).to(tl.float32))
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        target = q + row * q_stride + column
        x = tl.load(target, mask=column < WIDTH, other=0)
        tl.store(target, (x.to(tl.float32) * factor).to(x.dtype), mask=column < WIDTH)


@torch.library.custom_op("specrs::scale_queries", mutates_args=("q",))
def scale_queries(q: Tensor, positions: Tensor, beta: float, length: int, dependent: bool, offset: int = 0) -> None:
    """Multiply the queries `q` of each row in place by `1 + beta ln(1 + floor((position + offset) / length))`.

    Args:
        q: `[N, heads * D]`, rows of any stride.
        positions: `[N]` int64; sums of a position and `offset` below 0 count as 0.
        beta: factor of the logarithm.
        length: number of positions from one factor to the next.
        dependent: launch dependently (see `_dependent_launch`).
        offset: number that is added to a position.

    Factors are computed in fp32, and products rounded once.
    """
    _check(q, positions)
    rows, width = q.shape
    scale_queries_kernel[(rows, triton.cdiv(width, _BLOCK))](
        q,
        positions,
        q.stride(0),
        beta,
        LENGTH=length,
        OFFSET=offset,
        WIDTH=width,
        BLOCK=_BLOCK,
        **options(dependent),
    )


@scale_queries.register_fake
def _(q: Tensor, positions: Tensor, beta: float, length: int, dependent: bool, offset: int = 0) -> None:
    _check(q, positions)


def _check(q: Tensor, positions: Tensor) -> None:
    assert q.stride(1) == 1
    assert positions.shape == (q.shape[0],)
    assert positions.is_contiguous()


def scale_queries_reference(q: Tensor, positions: Tensor, beta: float, length: int, offset: int = 0) -> None:
    """Do what `scale_queries` does, in plain torch, with products in float64 that are rounded once."""
    q.copy_(q.double() * query_factors(positions + offset, beta, length, torch.float64)[:, :, 0])


VARIANTS = (
    Variant(
        "scale_queries_bf16_h32_d128",
        scale_queries_kernel,
        {"q": "*bf16", "positions": "*i64", "q_stride": "i32", "beta": "fp32"},
        {"LENGTH": 16384, "OFFSET": 0, "WIDTH": 32 * 128, "BLOCK": _BLOCK, "DEPENDENT": False},
        aligned=("q_stride",),
    ),
)
