"""RMSNorm of whole rows, with the addition to the residual stream before it. Projects nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda.variants import Variant
from torch import Tensor


@triton.jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    out,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = row * WIDTH + column
    v = tl.load(x + at, mask=inside, other=0)
    if residual is not None:
        v = (tl.load(residual + at, mask=inside, other=0).to(tl.float32) + v.to(tl.float32)).to(v.dtype)
        tl.store(residual + at, v, mask=inside)
    f = v.to(tl.float32)
    scale = tl.rsqrt(tl.sum(f * f, 0) / WIDTH + eps)
    normed = (f * scale).to(v.dtype).to(tl.float32)
    g = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + at, (normed * g).to(v.dtype), mask=inside)


@torch.library.custom_op("specrs::rms_norm", mutates_args=("residual", "out"))
def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float, dependent: bool) -> None:
    """Write `y / sqrt(mean(y^2) + eps) * weight` into `out`; y is x, or `residual + x`, which is then the new residual.

    All `[N, hidden]` contiguous, `weight` `[hidden]`, one dtype. Computed in fp32; the sum is rounded to the dtype
    before it is normed, and the normed row before its weight, as in transformers.
    """
    _check(x, residual, weight, out)
    rms_norm_kernel[(x.shape[0],)](
        x,
        residual,
        weight,
        out,
        eps,
        WIDTH=x.shape[1],
        BLOCK=triton.next_power_of_2(x.shape[1]),
        num_warps=8,
        **options(dependent),
    )


@rms_norm.register_fake
def _(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float, dependent: bool) -> None:
    _check(x, residual, weight, out)


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor) -> None:
    assert weight.shape == x.shape[1:]
    for tensor in (x, out) if residual is None else (x, out, residual):
        assert tensor.shape == x.shape
        assert tensor.is_contiguous()
        assert tensor.dtype == x.dtype


def rms_norm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """`rms_norm` in plain torch, in float64 but for the rounding of the sum."""
    if residual is not None:
        residual.add_(x)
        x = residual
    y = x.double()
    out.copy_(y * (y.square().mean(1, keepdim=True) + eps).rsqrt() * weight.double())


VARIANTS = tuple(
    Variant(
        f"rms_norm_{dtype}{'_residual' * added}",
        rms_norm_kernel,
        dict.fromkeys(("x", "weight", "out", *(["residual"] * added)), f"*{dtype}") | {"eps": "fp32"},
        {"WIDTH": 5120, "BLOCK": 8192, "DEPENDENT": False} | ({} if added else {"residual": None}),
        num_warps=8,
    )
    for dtype, added in (("bf16", True), ("bf16", False), ("fp32", True))
)
