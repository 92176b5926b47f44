"""Gated activation of the MLP for many rows. For few rows, `skinny_linear` applies it to its product."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_BLOCK = 1024


@triton.jit
def activation(x, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `x sigmoid(x)` in fp32, or with GELU its approximation with tanh. No exponential overflows."""
    z = x
    if GELU:
        # (1 + tanh(u)) / 2 is sigmoid(2 u), and this is 2 sqrt(2 / pi).
        z = 1.5957691216057308 * (x + 0.044715 * (x * x * x))
    e = tl.exp(-tl.abs(z))
    return x * (tl.where(z >= 0, 1.0, e) / (1 + e))


@triton.jit
def clamped_swiglu(gate, up, alpha, limit):  # type: ignore[no-untyped-def]
    """Return `kernels.activation.clamped_swiglu` in fp32. NaN stays NaN, and no exponential overflows."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    z = alpha * gate
    e = tl.exp(-tl.abs(z))
    return gate * (tl.where(z >= 0, 1.0, e) / (1 + e)) * (up + 1)


@triton.jit
def activation_and_mul_kernel(  # type: ignore[no-untyped-def]
    x, out, WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(x + row * 2 * WIDTH + column, mask=inside, other=0)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0).to(tl.float32)
    activated = activation(gate.to(tl.float32), GELU).to(gate.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (activated * up).to(gate.dtype), mask=inside)


@torch.library.custom_op("specrs::activation_and_mul", mutates_args=("out",))
def activation_and_mul(x: Tensor, out: Tensor, gelu: bool, dependent: bool) -> None:
    """Write `f(g) * u` into `out` `[N, I]`, of the halves g and u of `x` `[N, 2 I]` (Shazeer 2020, eq. 6).

    f is SiLU, or with `gelu` GELU by its approximation with tanh (Hendrycks and Gimpel 2016, section 2). Both
    contiguous and of one dtype. Computed in fp32; f(g) is rounded to the dtype, as in transformers.
    """
    _check(x, out)
    rows, width = out.shape
    activation_and_mul_kernel[(rows, triton.cdiv(width, _BLOCK))](
        x, out, WIDTH=width, GELU=gelu, BLOCK=_BLOCK, **options(dependent)
    )


@activation_and_mul.register_fake
def _(x: Tensor, out: Tensor, gelu: bool, dependent: bool) -> None:
    _check(x, out)


def _check(x: Tensor, out: Tensor) -> None:
    assert x.shape == (out.shape[0], 2 * out.shape[1])
    assert x.is_contiguous()
    assert out.is_contiguous()
    assert x.dtype == out.dtype


def activation_and_mul_reference(x: Tensor, out: Tensor, gelu: bool) -> None:
    """Do what `activation_and_mul` does, in plain torch in float64."""
    gate, up = x.double().chunk(2, dim=1)
    if gelu:
        inner = (2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        out.copy_(gate / 2 * (1 + inner.tanh()) * up)
    else:
        out.copy_(gate / (1 + (-gate).exp()) * up)


VARIANTS = tuple(
    Variant(
        f"{'gelu' if gelu else 'silu'}_and_mul_bf16",
        activation_and_mul_kernel,
        {"x": "*bf16", "out": "*bf16"},
        {"WIDTH": 25600, "GELU": gelu, "BLOCK": _BLOCK, "DEPENDENT": False},
    )
    for gelu in (False, True)
)
