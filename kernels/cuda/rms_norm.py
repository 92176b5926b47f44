"""RMSNorm of whole rows, with the addition to the residual stream before it, and a norm before that addition. Projects
nothing."""

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
    after,
    scalar,
    eps,
    WIDTH: tl.constexpr,
    MULTIPLIER: tl.constexpr,
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
        added = v.to(tl.float32)
        if after is not None:
            added *= tl.rsqrt(tl.sum(added * added, 0) / WIDTH + eps)
            added *= tl.load(after + column, mask=inside, other=0).to(tl.float32)
        if MULTIPLIER != 1:
            added *= MULTIPLIER
        added += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
        if scalar is not None:
            added *= scalar
        v = added.to(v.dtype)
        tl.store(residual + at, v, mask=inside)
    if weight is not None:
        f = v.to(tl.float32)
        scale = tl.rsqrt(tl.sum(f * f, 0) / WIDTH + eps)
        normed = (f * scale).to(v.dtype).to(tl.float32)
        g = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
        tl.store(out + at, (normed * g).to(v.dtype), mask=inside)


@torch.library.custom_op("specrs::rms_norm", mutates_args=("residual", "out"))
def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor | None,
    eps: float,
    dependent: bool,
    after: Tensor | None = None,
    factors: list[float] | None = None,
) -> None:
    """Write `norm(y) * weight` into `out`, with `norm(y) = y / sqrt(mean(y^2) + eps)`.

    y is x. If `residual` is given, y is `residual + x`, which is also written to `residual`; with `after`, x is first
    replaced by `norm(x) * after`. Without `weight` and `out`, only the residual is written. `factors` are a factor of
    what is added, and, if there is a second, a factor of the sum; None: there are none.

    x, `residual` and `out` are `[N, hidden]` contiguous, `weight` and `after` `[hidden]`, all of one dtype. Computed
    in fp32. The sum is rounded to the dtype before it is normed, and the normed row before it is multiplied with its
    weight, as in transformers.
    """
    _check(x, residual, weight, out, after)
    multiplier, *scalar = factors or [1.0]
    rms_norm_kernel[(x.shape[0],)](
        x,
        residual,
        weight,
        out,
        after,
        scalar[0] if scalar else None,
        eps,
        WIDTH=x.shape[1],
        MULTIPLIER=multiplier,
        BLOCK=triton.next_power_of_2(x.shape[1]),
        num_warps=8,
        **options(dependent),
    )


@rms_norm.register_fake
def _(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor | None,
    eps: float,
    dependent: bool,
    after: Tensor | None = None,
    factors: list[float] | None = None,
) -> None:
    _check(x, residual, weight, out, after)


def _check(x: Tensor, residual: Tensor | None, weight: Tensor | None, out: Tensor | None, after: Tensor | None) -> None:
    assert (weight is None) == (out is None)
    assert residual is not None or after is None
    for of_row in (weight, after):
        assert of_row is None or (of_row.shape == x.shape[1:] and of_row.dtype == x.dtype)
    for tensor in (x, out, residual):
        assert tensor is None or (tensor.shape == x.shape and tensor.is_contiguous() and tensor.dtype == x.dtype)


def rms_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor | None,
    eps: float,
    after: Tensor | None = None,
    multiplier: float = 1.0,
    scalar: float | None = None,
) -> None:
    """Do what `rms_norm` does, in plain torch in float64, except for the rounding of the sum."""

    def norm(rows: Tensor, weight: Tensor) -> Tensor:
        y = rows.double()
        return y * (y.square().mean(1, keepdim=True) + eps).rsqrt() * weight.double()

    if residual is not None:
        added = residual.double() + multiplier * (x.double() if after is None else norm(x, after))
        residual.copy_(added if scalar is None else added * scalar)
        x = residual
    if weight is not None and out is not None:
        out.copy_(norm(x, weight))


def _variant(
    name: str, dtype: str, pointers: tuple[str, ...], multiplier: float = 1.0, *, scaled: bool = False
) -> Variant:
    present = dict.fromkeys(("x", *pointers), f"*{dtype}") | ({"scalar": "fp32"} if scaled else {})
    absent = {arg: None for arg in ("residual", "weight", "out", "after", "scalar") if arg not in present}
    return Variant(
        name,
        rms_norm_kernel,
        present | {"eps": "fp32"},
        {"WIDTH": 5120, "MULTIPLIER": multiplier, "BLOCK": 8192, "DEPENDENT": False} | absent,
        num_warps=8,
    )


VARIANTS = (
    _variant("rms_norm_bf16_residual", "bf16", ("residual", "weight", "out")),
    _variant("rms_norm_bf16", "bf16", ("weight", "out")),
    _variant("rms_norm_fp32_residual", "fp32", ("residual", "weight", "out")),
    _variant("rms_norm_bf16_residual_scaled", "bf16", ("residual", "weight", "out"), 0.22),
    _variant("rms_norm_bf16_around", "bf16", ("residual", "after", "weight", "out")),
    _variant("rms_norm_bf16_after", "bf16", ("residual", "after")),
    _variant("rms_norm_bf16_around_scalar", "bf16", ("residual", "after", "weight", "out"), scaled=True),
)
