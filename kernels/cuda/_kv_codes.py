"""Converts K and V between numbers and 8-bit floating-point codes: to codes when they are written, to numbers in
registers before a product.

It uses integer arithmetic on every GPU. GPUs before sm_89 have no instruction for it, and later ones have none to bf16,
which they reach by way of fp16 and fp32. That takes 2 instructions per number, this 3.5, NaN included. Numbers are made
without their scale, so each is exact in 16 bits. Unlike codes of weights, codes of K and V may be NaN, which has to
stay NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _to_bf16(shift: int, kept: int, scale: int, most: int) -> str:
    """Return PTX that converts four codes to bf16.

    A code in the upper half of 16 bits is moved down by `shift`, into the lowest bits of bf16's exponent and the
    highest of its fraction. It is then multiplied by 2^120 or 2^112 (`scale`), which is exact, also for subnormal
    codes. Codes that stand for no number are now above all others. Multiplying by the bf16 in `most` takes them, and
    only them, to infinity, and 0 times infinity is NaN.
    """
    return f"""
    {{
    .reg .b32 a, b, s, t, up, none, most, zero;
    mov.b32 up, {scale:#010x};
    mov.b32 none, 0x80008000;
    mov.b32 most, {most:#010x};
    mov.b32 zero, 0x00000000;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.u32 s, a, {shift};
    shr.u32 t, b, {shift};
    and.b32 s, s, {kept:#010x};
    and.b32 t, t, {kept:#010x};
    lop3.b32 s, a, 0x80008000, s, 0xea;
    lop3.b32 t, b, 0x80008000, t, 0xea;
    fma.rn.bf16x2 s, s, up, none;
    fma.rn.bf16x2 t, t, up, none;
    fma.rn.bf16x2 a, s, most, none;
    fma.rn.bf16x2 b, t, most, none;
    fma.rn.bf16x2 $0, a, zero, s;
    fma.rn.bf16x2 $1, b, zero, t;
    }}
    """


# 448 times 1.125 * 2^119 is finite in bf16, 480, which the code of NaN would be, is not; 57344 times 2^112 is, 65536
# and above, as infinity and NaN of e5m2 would be, are not.
E4M3_BF16 = tl.constexpr(_to_bf16(4, 0x07F007F0, 0x7B807B80, 0x7B107B10))
E5M2_BF16 = tl.constexpr(_to_bf16(3, 0x0FE00FE0, 0x77807780, 0x77807780))


@triton.jit
def numbers(codes, FRACTION: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert a tile of uint8 codes to numbers of DTYPE. FRACTION is the number of fraction bits: 3 for e4m3, 2 for
    e5m2.

    The codes of infinity, which nothing writes, become NaN in bf16.
    """
    if tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            E4M3_BF16 if FRACTION == 3 else E5M2_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    bits = codes.to(tl.int16)
    if FRACTION == 2:
        return (bits << 8).to(tl.float16, bitcast=True).to(DTYPE)
    half = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half).to(DTYPE)


@triton.jit
def encoded(x, scale, FRACTION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return fp32 `x / scale` as codes, rounded as in `kv_codes.encode`."""
    BIAS: tl.constexpr = 7 if FRACTION == 3 else 15
    MOST: tl.constexpr = 448.0 if FRACTION == 3 else 57344.0
    LEAST: tl.constexpr = 2.0**-6 if FRACTION == 3 else 2.0**-14  # smallest number that is not subnormal
    # Adding this number rounds to a multiple of the smallest subnormal code, which is the last bit of fp32 from this
    # number to its double.
    ROUNDER: tl.constexpr = 16384.0 if FRACTION == 3 else 128.0
    CUT: tl.constexpr = 23 - FRACTION
    x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    size = tl.minimum(tl.abs(x), MOST)
    bits = size.to(tl.int32, bitcast=True)
    even = (bits >> CUT) & 1
    normal = ((bits + ((1 << (CUT - 1)) - 1) + even) >> CUT) - ((127 - BIAS) << FRACTION)
    small = (size + ROUNDER).to(tl.int32, bitcast=True) - tl.full((), ROUNDER, tl.float32).to(tl.int32, bitcast=True)
    code = tl.where(size < LEAST, small, normal)
    code = tl.where(x != x, 0x7F, code)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)
