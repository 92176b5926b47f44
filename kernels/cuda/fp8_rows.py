"""Rounds rows to FP8 (e4m3) by group, for products with FP8 weights. Multiplies nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda._kv_codes import encoded, numbers
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_TILE = 2048
"""Number of numbers that a program rounds at once, unless a group is larger."""


@triton.jit
def fp8_rows_kernel(  # type: ignore[no-untyped-def]
    x,
    rounded,
    codes,
    scales,
    padded,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = tl.arange(0, BLOCK)
    at = group[:, None] * GROUP + column[None, :]
    inside = (column < GROUP)[None, :] & (at < K)
    v = tl.load(x + row * K + at, mask=inside, other=0).to(tl.float32)
    v = tl.where(tl.abs(v) == float("inf"), float("nan"), v)
    largest = tl.max(tl.where(v == v, tl.abs(v), 0.0), 1)
    # The least power of two that takes the largest to at most 448, which is 1.75 * 2^8; at least 2^-100.
    bits = largest.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 27)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    code = encoded(v, scale[:, None], 3)
    if rounded is not None:
        number = numbers(code, 3, tl.float32) * scale[:, None]
        tl.store(rounded + row * K + at, number.to(rounded.dtype.element_ty), mask=inside)
    if codes is not None:
        HALF: tl.constexpr = UNIT // 2
        place = at // UNIT * UNIT + at % HALF * 2 + at % UNIT // HALF
        tl.store(codes + row * K + place, code, mask=inside)
        tl.store(scales + group.to(tl.int64) * padded + row, scale, mask=group * GROUP < K)


def round_rows(x: Tensor, group: int, rounded: Tensor, dependent: bool) -> None:
    """Round the rows of x to FP8 as `quantized_weight.fp8_rows` does, and write the rounded values into `rounded`
    `[N, K]`, in the dtype of x (bf16 or fp32, which hold them exactly). `rounded` may be x itself.

    `dependent`: launch dependently (see `_dependent_launch`).
    """
    torch.ops.specrs.fp8_rows(x, [group, 0], rounded, None, None, dependent)


def quantize_rows(x: Tensor, group: int, unit: int, codes: Tensor, scales: Tensor, dependent: bool) -> None:
    """Round the rows of x as `quantized_weight.fp8_rows` does. Write their codes into `codes` `[N, K]` uint8, with each
    `unit` of inputs in the byte order of a `QuantizedWeight`, and their scales into `scales` `[groups, M]` fp32, M at
    least N."""
    torch.ops.specrs.fp8_rows(x, [group, unit], None, codes, scales, dependent)


@torch.library.custom_op("specrs::fp8_rows", mutates_args=("rounded", "codes", "scales"))
def _fp8_rows(
    x: Tensor,
    layout: list[int],
    rounded: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    dependent: bool,
) -> None:
    _check(x, layout, rounded, codes, scales)
    (rows, size), (group, unit) = x.shape, layout
    block = triton.next_power_of_2(min(group, size))
    several = max(1, _TILE // block)
    fp8_rows_kernel[(rows, triton.cdiv(triton.cdiv(size, group), several))](
        x,
        rounded,
        codes,
        scales,
        0 if scales is None else scales.shape[1],
        K=size,
        GROUP=min(group, size),
        UNIT=unit,
        GROUPS=several,
        BLOCK=block,
        num_warps=8 if block > _TILE else 4,
        **options(dependent),
    )


@_fp8_rows.register_fake
def _(
    x: Tensor,
    layout: list[int],
    rounded: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    dependent: bool,
) -> None:
    _check(x, layout, rounded, codes, scales)


def _check(x: Tensor, layout: list[int], rounded: Tensor | None, codes: Tensor | None, scales: Tensor | None) -> None:
    group, unit = layout
    assert x.is_contiguous()
    assert x.dtype in (torch.bfloat16, torch.float32)
    assert (codes is None) == (scales is None)
    assert (codes is None) != (rounded is None)
    if rounded is not None:
        assert rounded.shape == x.shape
        assert rounded.is_contiguous()
        assert rounded.dtype == x.dtype
    if codes is not None and scales is not None:
        assert codes.shape == x.shape
        assert codes.is_contiguous()
        assert codes.dtype == torch.uint8
        assert scales.is_contiguous()
        assert scales.dtype == torch.float32
        assert scales.shape[0] == -(-x.shape[1] // group)
        assert scales.shape[1] >= x.shape[0]
        assert min(group, x.shape[1]) % unit == 0


def _variant(name: str, group: int, codes: bool) -> Variant:
    pointers = {"codes": "*u8", "scales": "*fp32"} if codes else {"rounded": "*bf16"}
    absent = {arg: None for arg in ("rounded", "codes", "scales") if arg not in pointers}
    block = triton.next_power_of_2(group)
    sizes = {"K": 5120, "GROUP": group, "UNIT": 128 if codes else 0, "GROUPS": max(1, _TILE // block), "BLOCK": block}
    return Variant(
        name,
        fp8_rows_kernel,
        {"x": "*bf16", "padded": "i32"} | pointers,
        sizes | {"DEPENDENT": False} | absent,
        num_warps=8 if block > _TILE else 4,
    )


VARIANTS = (
    _variant("fp8_rows_rounded", 128, codes=False),
    _variant("fp8_rows_codes", 128, codes=True),
    _variant("fp8_rows_codes_whole", 5120, codes=True),
)
