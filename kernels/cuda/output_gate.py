"""Gates of attention's outputs: takes queries apart from their gates before attention, and applies the gates after it.
Attends nothing."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_BLOCK = 1024


@triton.jit
def split_gates_kernel(  # type: ignore[no-untyped-def]
    x, out, x_stride, out_stride, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Of each query head there is its query, then its gate. Keys and values follow.
    source = column + tl.minimum(column // DIM, HEADS) * DIM
    value = tl.load(x + row * x_stride + source, mask=column < WIDTH, other=0)
    tl.store(out + row * out_stride + column, value, mask=column < WIDTH)


@triton.jit
def apply_gates_kernel(  # type: ignore[no-untyped-def]
    x, out, x_stride, out_stride, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HEADS * DIM
    source = column + (column // DIM + 1) * DIM
    gate = tl.load(x + row * x_stride + source, mask=inside, other=0).to(tl.float32)
    target = out + row * out_stride + column
    y = tl.load(target, mask=inside, other=0)
    # No exponential overflows.
    e = tl.exp(-tl.abs(gate))
    made = y.to(tl.float32) * (tl.where(gate >= 0, 1.0, e) / (1 + e))
    tl.store(target, made.to(y.dtype), mask=inside)


@torch.library.custom_op("specrs::split_gates", mutates_args=("out",))
def split_gates(x: Tensor, out: Tensor, num_heads: int, dim: int, dependent: bool) -> None:
    """Copy queries, keys and values of `x` into `out`, without the gates.

    Args:
        x: `[N, (2 * heads + 2 * kv_heads) * dim]`, rows of any stride: of each query head its query, then its gate;
            then the heads of k and v.
        out: `[N, (heads + 2 * kv_heads) * dim]` of x's dtype, rows of any stride.
        num_heads: heads of q.
        dim: features of a head.
        dependent: launch dependently (see `_dependent_launch`).
    """
    _check_split(x, out, num_heads, dim)
    rows, width = out.shape
    split_gates_kernel[(rows, triton.cdiv(width, _BLOCK))](
        x,
        out,
        x.stride(0),
        out.stride(0),
        HEADS=num_heads,
        DIM=dim,
        WIDTH=width,
        BLOCK=_BLOCK,
        **options(dependent),
    )


@split_gates.register_fake
def _(x: Tensor, out: Tensor, num_heads: int, dim: int, dependent: bool) -> None:
    _check_split(x, out, num_heads, dim)


def _check_split(x: Tensor, out: Tensor, num_heads: int, dim: int) -> None:
    assert x.shape == (out.shape[0], out.shape[1] + num_heads * dim)
    assert x.dtype == out.dtype
    assert x.stride(1) == out.stride(1) == 1


@torch.library.custom_op("specrs::apply_gates", mutates_args=("out",))
def apply_gates(x: Tensor, out: Tensor, num_heads: int, dim: int, dependent: bool) -> None:
    """Multiply attention's output `out` `[N, heads * dim]`, rows of any stride, by the sigmoid of its gates in `x`,
    which is as for `split_gates`. Computed in fp32 and rounded once."""
    _check_apply(x, out, num_heads, dim)
    rows, width = out.shape
    apply_gates_kernel[(rows, triton.cdiv(width, _BLOCK))](
        x,
        out,
        x.stride(0),
        out.stride(0),
        HEADS=num_heads,
        DIM=dim,
        BLOCK=_BLOCK,
        **options(dependent),
    )


@apply_gates.register_fake
def _(x: Tensor, out: Tensor, num_heads: int, dim: int, dependent: bool) -> None:
    _check_apply(x, out, num_heads, dim)


def _check_apply(x: Tensor, out: Tensor, num_heads: int, dim: int) -> None:
    assert out.shape == (x.shape[0], num_heads * dim)
    assert x.shape[1] >= 2 * num_heads * dim
    assert x.dtype == out.dtype
    assert x.stride(1) == out.stride(1) == 1


def split_gates_reference(x: Tensor, out: Tensor, num_heads: int, dim: int) -> None:
    """Reference for `split_gates`, head by head."""
    heads = x.reshape(len(x), -1, dim)
    out.copy_(torch.cat((heads[:, : 2 * num_heads : 2], heads[:, 2 * num_heads :]), 1).flatten(1))


def apply_gates_reference(x: Tensor, out: Tensor, num_heads: int, dim: int) -> None:
    """Do what `apply_gates` does, in plain torch in float64, rounded once."""
    gates = x.reshape(len(x), -1, dim)[:, 1 : 2 * num_heads : 2].flatten(1)
    out.copy_(out.double() * gates.double().sigmoid())


def _variant(name: str, kernel: Any, **sizes: int) -> Variant:
    """Return a variant to compile for 16 query heads of 256 features."""
    return Variant(
        name,
        kernel,
        {**dict.fromkeys(("x", "out"), "*bf16"), **dict.fromkeys(("x_stride", "out_stride"), "i32")},
        {"HEADS": 16, "DIM": 256, "BLOCK": _BLOCK, "DEPENDENT": False} | sizes,
        aligned=("x_stride", "out_stride"),
    )


VARIANTS = (
    _variant("split_gates_bf16_d256", split_gates_kernel, WIDTH=24 * 256),
    _variant("apply_gates_bf16_d256", apply_gates_kernel),
)
