"""The gated activation of the MLP for many rows; few rows have it behind their product (`skinny_linear`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_BLOCK = 1024


@triton.jit
def silu(x):  # type: ignore[no-untyped-def]
    """x * sigmoid(x) of fp32; no exponential overflows."""
    e = tl.exp(-tl.abs(x))
    return x * (tl.where(x >= 0, 1.0, e) / (1 + e))


@triton.jit
def silu_and_mul_kernel(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(x + row * 2 * WIDTH + column, mask=inside, other=0)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0).to(tl.float32)
    activated = silu(gate.to(tl.float32)).to(gate.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (activated * up).to(gate.dtype), mask=inside)


@torch.library.custom_op("specrs::silu_and_mul", mutates_args=("out",))
def silu_and_mul(x: Tensor, out: Tensor, dependent: bool) -> None:
    """Write `silu(g) * u` into `out` `[N, I]`, of the halves g and u of `x` `[N, 2 I]` (Shazeer 2020, eq. 6).

    Both contiguous and of one dtype. Computed in fp32; silu(g) is rounded to the dtype, as in transformers.
    """
    _check(x, out)
    rows, width = out.shape
    silu_and_mul_kernel[(rows, triton.cdiv(width, _BLOCK))](x, out, WIDTH=width, BLOCK=_BLOCK, **options(dependent))


@silu_and_mul.register_fake
def _(x: Tensor, out: Tensor, dependent: bool) -> None:
    _check(x, out)


def _check(x: Tensor, out: Tensor) -> None:
    assert x.shape == (out.shape[0], 2 * out.shape[1])
    assert x.is_contiguous()
    assert out.is_contiguous()
    assert x.dtype == out.dtype


def silu_and_mul_reference(x: Tensor, out: Tensor) -> None:
    """`silu_and_mul` in plain torch, in float64."""
    gate, up = x.double().chunk(2, dim=1)
    out.copy_(gate / (1 + (-gate).exp()) * up)


VARIANTS = (
    Variant(
        "silu_and_mul_bf16",
        silu_and_mul_kernel,
        {"x": "*bf16", "out": "*bf16"},
        {"WIDTH": 25600, "BLOCK": _BLOCK, "DEPENDENT": False},
    ),
)
