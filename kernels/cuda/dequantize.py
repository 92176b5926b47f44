"""Dequantizes some outputs of a quantized weight, for products of too many rows to read codes. Multiplies nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.coding import Coding
from specrs.kernels.cuda._codes import (
    BLOCK_INPUTS,
    BLOCKS,
    INT4,
    MXFP4,
    PAIRS,
    byte_number,
    check_codes,
    coding_as_list,
    coding_constants,
    coding_of,
    factors_of,
    half_byte_number,
    halves_of,
    power_of,
    scale_of,
)
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda.variants import Variant
from specrs.kernels.quantized_weight import QuantizedWeight
from torch import Tensor

_BLOCK_N = 16
_BLOCK_K = 256


@triton.jit(do_not_specialize=["first", "last"])
def dequantize_kernel(  # type: ignore[no-untyped-def]
    codes,
    scales,
    out,
    first,
    last,
    K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ZEROS: tl.constexpr,
    MINIMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    EACH: tl.constexpr = 4 if (CODE == INT4) | (CODE == MXFP4) else 2
    PART: tl.constexpr = UNIT // EACH
    ROW: tl.constexpr = K // EACH
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    WORDS: tl.constexpr = 1 + BLOCK_INPUTS // GROUP // 2
    n = first + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (n < last)[:, None] & (word < ROW)[None, :]
    words = tl.load(codes + n.to(tl.int64)[:, None] * ROW + word[None, :], mask=inside, other=0)
    for j in tl.static_range(EACH):
        at = word // PART * UNIT + j * PART + word % PART
        if MINIMA == BLOCKS:
            block = scales + n[:, None] * (K // BLOCK_INPUTS * WORDS) + (at // BLOCK_INPUTS * WORDS)[None, :]
            group = at % BLOCK_INPUTS // GROUP
            pairs = tl.load(block + 1 + (group // 2)[None, :], mask=inside, other=0)
            scale, least = factors_of(pairs >> (group % 2 * 16)[None, :], False)
            of_block, least_of_block = halves_of(tl.load(block, mask=inside, other=0))
            scale *= of_block
            least *= least_of_block
        else:
            scale = tl.load(scales + (n // OUTPUTS)[:, None] * GROUPS + (at // GROUP)[None, :], mask=inside, other=0)
            if MINIMA == PAIRS:
                scale, least = halves_of(scale)
        if CODE == MXFP4:
            number, scale = half_byte_number(words >> (4 * j) & 15, tl.float32), power_of(scale)
        elif CODE == INT4:
            zero = tl.full(words.shape, 0 if MINIMA else 8, tl.int32)
            if ZEROS:
                zero = scale.to(tl.int32, bitcast=True) & 15
            number = ((words >> (4 * j) & 15).to(tl.int32) - zero).to(tl.float32)
        else:
            number = byte_number(words >> (8 * j) & 0xFF, CODE, tl.float32)
        place = out + (n - first).to(tl.int64)[:, None] * K + at[None, :]
        number *= scale_of(scale, ZEROS)
        if MINIMA:
            number -= least
        tl.store(place, number.to(out.dtype.element_ty), mask=inside)


def dequantize(weight: QuantizedWeight, first: int, out: Tensor, dependent: bool) -> None:
    """Write outputs `first` to `first + P` of `weight` into `out` `[P, in]` contiguous, rounded once to its dtype.

    `dependent`: launch dependently (see `_dependent_launch`).
    """
    operands = [weight.codes, weight.scales]
    torch.ops.specrs.dequantize(operands, coding_as_list(weight.coding), first, out, dependent)


@torch.library.custom_op("specrs::dequantize", mutates_args=("out",))
def _dequantize(operands: list[Tensor], coding: list[int], first: int, out: Tensor, dependent: bool) -> None:
    _check(operands, coding_of(coding), first, out)
    (codes, scales), own = operands, coding_of(coding)
    dequantize_kernel[(triton.cdiv(out.shape[0], _BLOCK_N), triton.cdiv(codes.shape[1], _BLOCK_K))](
        codes,
        scales,
        out,
        first,
        first + out.shape[0],
        K=out.shape[1],
        **coding_constants(own, out.shape[1]),
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        **options(dependent),
    )


@_dequantize.register_fake
def _(operands: list[Tensor], coding: list[int], first: int, out: Tensor, dependent: bool) -> None:
    _check(operands, coding_of(coding), first, out)


def _check(operands: list[Tensor], coding: Coding, first: int, out: Tensor) -> None:
    codes, scales = operands
    check_codes(codes, scales, coding, out.shape[1])
    assert codes.is_contiguous()
    assert out.is_contiguous()
    assert first >= 0
    assert first + out.shape[0] <= codes.shape[0]


def dequantize_reference(weight: QuantizedWeight, first: int, out: Tensor) -> None:
    """Do what `dequantize` does, in plain torch in float64, rounded once."""
    out.copy_(weight.dequantized()[first : first + len(out)])


VARIANTS = tuple(
    Variant(
        f"dequantize_{name}",
        dequantize_kernel,
        {
            "codes": "*i16",
            "scales": "*i32" if coding.minima else "*fp32",
            "out": "*bf16",
            "first": "i32",
            "last": "i32",
        },
        {
            "K": 5120,
            **coding_constants(coding, 5120),
            "BLOCK_N": _BLOCK_N,
            "BLOCK_K": _BLOCK_K,
            "DEPENDENT": False,
        },
    )
    for name, coding in (
        ("fp8_block", Coding("fp8", 128, outputs=128)),
        ("int8", Coding("int8", 5120)),
        ("int4_zeros", Coding("int4", 128, zeros=True)),
        ("q4_k", Coding("int4", 32, minima="blocks")),
    )
)
