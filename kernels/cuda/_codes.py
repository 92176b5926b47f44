"""Converts codes of 8 and 4 bits to numbers, in registers between a load and a product.

Numbers are made without their scale, so each is exact in 16 bits: e4m3 has 4 significant bits, INT8 8, and INT4 less
its zero point 5. e2m1 has 2. Two neighbouring words are one register, and a code from each of them becomes a register
of two numbers. A compiler would unpack every code by itself. It takes 2.25 instructions per number from e4m3, 1.75 from
INT8, 1.4 from INT4, 2.4 from e2m1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from specrs.kernels.coding import SUPER_BLOCK, Coding
from torch import Tensor

DENSE, FP8, INT8, INT4, MXFP4 = (tl.constexpr(code) for code in range(5))
CODES = {"fp8": 1, "int8": 2, "int4": 3, "mxfp4": 4}
"""Number of each kind of `Coding`, in the form that kernels take."""
PAIRS, BLOCKS = tl.constexpr(1), tl.constexpr(2)
MINIMA = {"": 0, "pairs": 1, "blocks": 2}
"""Number of each value of `Coding.minima`, in the form that kernels take."""
BLOCK_INPUTS = tl.constexpr(SUPER_BLOCK)

# e4m3 is bf16 with four of its exponent's bits, lowest, and three of its fraction's, highest: moved there it is 2^-120
# of the number, subnormal ones too.
FP8_BF16 = tl.constexpr(
    """
    {
    .reg .b32 r, s, t, big, none;
    mov.b32 big, 0x7b807b80;
    mov.b32 none, 0x80008000;
    shl.b32 s, $2, 4;
    shl.b32 r, $2, 8;
    shr.u32 t, $2, 4;
    and.b32 s, s, 0x07f007f0;
    and.b32 t, t, 0x07f007f0;
    lop3.b32 s, r, 0x80008000, s, 0xea;
    lop3.b32 t, $2, 0x80008000, t, 0xea;
    fma.rn.bf16x2 $0, s, big, none;
    fma.rn.bf16x2 $1, t, big, none;
    }
    """
)
# The bits of n < 128 in the fraction of 128 make 128 + n; a code below 0 has 256 taken from it, another 128.
INT8_BF16 = tl.constexpr(
    """
    {
    .reg .b32 r, s, t, low, high, one;
    mov.b32 one, 0x3f803f80;
    mov.b32 r, 0xc300c300;
    shr.u32 high, $2, 8;
    lop3.b32 s, $2, 0x00800080, r, 0xea;
    lop3.b32 t, high, 0x00800080, r, 0xea;
    mov.b32 r, 0x43004300;
    lop3.b32 low, $2, 0x007f007f, r, 0xea;
    lop3.b32 high, high, 0x007f007f, r, 0xea;
    fma.rn.bf16x2 $0, low, one, s;
    fma.rn.bf16x2 $1, high, one, t;
    }
    """
)
# In the same way; $5 is -(128 + zero point) of the words' outputs.
INT4_BF16 = tl.constexpr(
    """
    {
    .reg .b32 r, s, t, u, v, one;
    mov.b32 one, 0x3f803f80;
    mov.b32 r, 0x43004300;
    shr.u32 s, $4, 4;
    shr.u32 t, $4, 8;
    shr.u32 u, $4, 12;
    lop3.b32 v, $4, 0x000f000f, r, 0xea;
    lop3.b32 s, s, 0x000f000f, r, 0xea;
    lop3.b32 t, t, 0x000f000f, r, 0xea;
    lop3.b32 u, u, 0x000f000f, r, 0xea;
    fma.rn.bf16x2 $0, v, one, $5;
    fma.rn.bf16x2 $1, s, one, $5;
    fma.rn.bf16x2 $2, t, one, $5;
    fma.rn.bf16x2 $3, u, one, $5;
    }
    """
)
# As e4m3: a code's two bits of exponent and one of fraction are 2^-126 of the number in bf16.
E2M1_BF16 = tl.constexpr(
    """
    {
    .reg .b32 r, s, t, u, v, big, none;
    mov.b32 big, 0x7e807e80;
    mov.b32 none, 0x80008000;
    shl.b32 s, $4, 6;
    shl.b32 t, $4, 2;
    shr.u32 u, $4, 2;
    shr.u32 v, $4, 6;
    and.b32 s, s, 0x01c001c0;
    and.b32 t, t, 0x01c001c0;
    and.b32 u, u, 0x01c001c0;
    and.b32 v, v, 0x01c001c0;
    shl.b32 r, $4, 12;
    lop3.b32 s, r, 0x80008000, s, 0xea;
    shl.b32 r, $4, 8;
    lop3.b32 t, r, 0x80008000, t, 0xea;
    shl.b32 r, $4, 4;
    lop3.b32 u, r, 0x80008000, u, 0xea;
    lop3.b32 v, $4, 0x80008000, v, 0xea;
    fma.rn.bf16x2 $0, s, big, none;
    fma.rn.bf16x2 $1, t, big, none;
    fma.rn.bf16x2 $2, u, big, none;
    fma.rn.bf16x2 $3, v, big, none;
    }
    """
)


@triton.jit
def byte_number(bits, CODE: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert int16 words, each with one 8-bit code (e4m3 or INT8), to values of dtype DTYPE."""
    if CODE == INT8:
        return ((bits << 8).to(tl.int16) >> 8).to(DTYPE)
    if tl.float16 == DTYPE:
        return ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    wide = bits.to(tl.int32)
    number = ((wide & 0x80) << 24 | (wide & 0x7F) << 20).to(tl.float32, bitcast=True)
    return (number * 1.329227995784916e36).to(DTYPE)  # 2^120


@triton.jit
def two_numbers(words, CODE: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert a tile of words of two codes, e4m3 or INT8, to two tiles of numbers of DTYPE."""
    if tl.bfloat16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            FP8_BF16 if CODE == FP8 else INT8_BF16,
            "=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        low = byte_number(words & 0xFF, CODE, DTYPE)
        high = byte_number(words >> 8 & 0xFF, CODE, DTYPE)
    return low, high


@triton.jit
def four_numbers(words, zero, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert a tile of words of four INT4 codes to four tiles of numbers of DTYPE. Subtracts the zero points of the
    words' rows."""
    if tl.bfloat16 == DTYPE:
        less = tl.broadcast_to((-128.0 - zero.to(tl.float32)).to(tl.bfloat16)[:, None], words.shape)
        a, b, c, d = tl.inline_asm_elementwise(
            INT4_BF16,
            "=r,=r,=r,=r,r,r",
            [words, less],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        a = ((words & 15).to(tl.int32) - zero[:, None]).to(DTYPE)
        b = ((words >> 4 & 15).to(tl.int32) - zero[:, None]).to(DTYPE)
        c = ((words >> 8 & 15).to(tl.int32) - zero[:, None]).to(DTYPE)
        d = ((words >> 12 & 15).to(tl.int32) - zero[:, None]).to(DTYPE)
    return a, b, c, d


@triton.jit
def half_byte_number(bits, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert int16 words, each with one e2m1 code, to values of dtype DTYPE, which must not be bf16."""
    if tl.float16 == DTYPE:
        return ((bits & 8) << 12 | (bits & 7) << 9).to(tl.int16).to(tl.float16, bitcast=True) * 16384.0
    wide = bits.to(tl.int32)
    number = ((wide & 8) << 28 | (wide & 7) << 22).to(tl.float32, bitcast=True)
    return (number * 8.507059173023462e37).to(DTYPE)  # 2^126


@triton.jit
def four_e2m1(words, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert a tile of words of four e2m1 codes to four tiles of numbers of DTYPE."""
    if tl.bfloat16 == DTYPE:
        a, b, c, d = tl.inline_asm_elementwise(
            E2M1_BF16,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        a = half_byte_number(words & 15, DTYPE)
        b = half_byte_number(words >> 4 & 15, DTYPE)
        c = half_byte_number(words >> 8 & 15, DTYPE)
        d = half_byte_number(words >> 12 & 15, DTYPE)
    return a, b, c, d


@triton.jit
def power_of(byte):  # type: ignore[no-untyped-def]
    """Return 2^(s - 127) for bytes s, as fp32. 0 is the subnormal 2^-127."""
    word = byte.to(tl.int32)
    return tl.where(word == 0, 0x400000, word << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(word, ZEROS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scales in words whose four lowest bits may hold zero points."""
    if ZEROS:
        return (word.to(tl.int32, bitcast=True) & -16).to(tl.float32, bitcast=True)
    return word


@triton.jit
def halves_of(word):  # type: ignore[no-untyped-def]
    """Return the two fp16 numbers in int32 words as fp32, the lower bits' first."""
    low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def factors_of(word, UPPER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return two signed bytes of int32 words as fp32: those of the upper or of the lower 16 bits."""
    if UPPER:
        return (word << 8 >> 24).to(tl.float32), (word >> 24).to(tl.float32)
    return (word << 24 >> 24).to(tl.float32), (word << 16 >> 24).to(tl.float32)


@triton.jit
def _scale_and_minimum(  # type: ignore[no-untyped-def]
    scales, n, first, g: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, MINIMA: tl.constexpr
):
    """Return scale and minimum of group `g` of the unit of inputs from `first` on, fp32, for rows `n` of the weight."""
    if MINIMA == PAIRS:
        return halves_of(tl.load(scales + n * (K // GROUP) + first // GROUP + g))
    WORDS: tl.constexpr = 1 + BLOCK_INPUTS // GROUP // 2
    at = scales + n * (K // BLOCK_INPUTS * WORDS) + first // BLOCK_INPUTS * WORDS
    scale, least = halves_of(tl.load(at))
    # A unit has an even number of groups, so its first one is in lower bits.
    pair = tl.load(at + 1 + first % BLOCK_INPUTS // GROUP // 2 + g // 2)
    of_scale, of_least = factors_of(pair, g % 2 == 1)
    return scale * of_scale, least * of_least


@triton.jit
def _subtract_minima(  # type: ignore[no-untyped-def]
    acc,
    up,
    scales,
    n,
    second,
    first,
    v,
    K: tl.constexpr,
    EACH: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    MINIMA: tl.constexpr,
    GATED: tl.constexpr,
):
    """Subtract from the sums of a tile the minima of one unit of inputs times the sums of their groups' inputs.

    A sum of inputs is a product with ones, so that its order is the same for any number of rows.
    """
    PARTS: tl.constexpr = EACH * GROUP // UNIT
    ones = tl.full([n.shape[0], UNIT // EACH], 1, v[0].dtype)
    for g in tl.static_range(UNIT // GROUP):
        total = tl.zeros_like(acc)
        for j in tl.static_range(PARTS):
            total = tl.dot(ones, v[g * PARTS + j], total, input_precision="ieee")
        acc -= total * _scale_and_minimum(scales, n, first, g, K, GROUP, MINIMA)[1][:, None]
        if GATED:
            up -= total * _scale_and_minimum(scales, n + second, first, g, K, GROUP, MINIMA)[1][:, None]
    return acc, up


@triton.jit
def _add_unit(  # type: ignore[no-untyped-def]
    acc,
    weight,
    scales,
    n,
    word,
    first,
    v,
    K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ZEROS: tl.constexpr,
    MINIMA: tl.constexpr,
):
    """Add the products of one unit of inputs, from `first` on, to `acc`, and return the sum. `v` has, for each code of
    a word, the rows of x that it is multiplied with. Minima are left to `_subtract_minima`."""
    EACH: tl.constexpr = 4 if (CODE == INT4) | (CODE == MXFP4) else 2
    ROW: tl.constexpr = K // EACH
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    words = tl.load(weight + n.to(tl.int64)[:, None] * ROW + word[None, :])
    # Where a scale is that of all inputs it is left to the end.
    at = scales + n // OUTPUTS * GROUPS + (first // GROUP if GROUPS > 1 else 0)
    zero = tl.full(n.shape, 0 if MINIMA else 8, tl.int32)
    SCALES: tl.constexpr = (UNIT + GROUP - 1) // GROUP if GROUPS > 1 else 1
    for g in tl.static_range(SCALES):
        # Of a unit of several groups those parts that are in this one: their codes less its zero points.
        if MINIMA:
            scale = _scale_and_minimum(scales, n, first, g, K, GROUP, MINIMA)[0]
        elif (GROUPS > 1) | ZEROS:
            scale = tl.load(at + g)
        if ZEROS:
            zero = scale.to(tl.int32, bitcast=True) & 15
        if CODE == MXFP4:
            numbers = four_e2m1(words, v[0].dtype)
            scale = power_of(scale)
        elif CODE == INT4:
            numbers = four_numbers(words, zero, v[0].dtype)
        else:
            numbers = two_numbers(words, CODE, v[0].dtype)
        sums = acc
        if GROUPS > 1:
            sums = tl.zeros_like(acc)
        for j in tl.static_range(EACH // SCALES):
            sums = tl.dot(numbers[g * (EACH // SCALES) + j], v[g * (EACH // SCALES) + j], sums, input_precision="ieee")
        if GROUPS > 1:
            acc += sums * scale_of(scale, ZEROS)[:, None]
        else:
            acc = sums
    return acc


@triton.jit
def _rows(x_rows, first, there, K: tl.constexpr, BLOCK_K: tl.constexpr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load PART inputs of x's rows, from input `first` on."""
    at = first + tl.arange(0, PART)
    if K % BLOCK_K == 0:
        return tl.load(x_rows[None, :] + at[:, None], mask=there[None, :], other=0)
    return tl.load(x_rows[None, :] + at[:, None], mask=(at < K)[:, None] & there[None, :], other=0)


@triton.jit
def add_step(  # type: ignore[no-untyped-def]
    acc,
    up,
    weight,
    scales,
    x_rows,
    n,
    second,
    k,
    there,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ZEROS: tl.constexpr,
    MINIMA: tl.constexpr,
    GATED: tl.constexpr,
):
    """Add the products of step k to the sums of a tile. Units past the last input repeat the last unit, times 0.

    `n` are the tile's rows of the weight. With GATED, `up` has the sums of the values, whose rows lie `second` rows
    after those of the gates.
    """
    EACH: tl.constexpr = 4 if (CODE == INT4) | (CODE == MXFP4) else 2
    PART: tl.constexpr = UNIT // EACH
    for i in tl.static_range(BLOCK_K // UNIT):
        first = k * BLOCK_K + i * UNIT
        a = _rows(x_rows, first, there, K, BLOCK_K, PART)
        b = _rows(x_rows, first + PART, there, K, BLOCK_K, PART)
        if EACH == 4:
            c = _rows(x_rows, first + 2 * PART, there, K, BLOCK_K, PART)
            d = _rows(x_rows, first + 3 * PART, there, K, BLOCK_K, PART)
            v = (a, b, c, d)
        else:
            v = (a, b)  # type: ignore[assignment]
        if K % BLOCK_K != 0:
            first = tl.minimum(first, K - UNIT)
        word = first // EACH + tl.arange(0, PART)
        acc = _add_unit(acc, weight, scales, n, word, first, v, K, CODE, GROUP, UNIT, OUTPUTS, ZEROS, MINIMA)
        if GATED:
            up = _add_unit(up, weight, scales, n + second, word, first, v, K, CODE, GROUP, UNIT, OUTPUTS, ZEROS, MINIMA)
        if MINIMA:
            acc, up = _subtract_minima(acc, up, scales, n, second, first, v, K, EACH, GROUP, UNIT, MINIMA, GATED)
    return acc, up


def coding_constants(coding: Coding | None, k: int) -> dict[str, int]:
    """Return the kernel's constants for a weight of `k` inputs; `coding` None: it is dense."""
    if coding is None:
        return {"CODE": DENSE.value, "GROUP": k, "UNIT": 0, "OUTPUTS": 1, "ZEROS": False, "MINIMA": 0}
    unit = coding.unit(k)
    assert unit is not None
    return {
        "CODE": CODES[coding.kind],
        "GROUP": coding.group,
        "UNIT": unit,
        "OUTPUTS": coding.outputs,
        "ZEROS": coding.zeros,
        "MINIMA": MINIMA[coding.minima],
    }


def coding_as_list(coding: Coding) -> list[int]:
    """Return the fields of `coding` in order, as custom ops take them."""
    return [CODES[coding.kind], coding.group, coding.outputs, int(coding.zeros), MINIMA[coding.minima]]


def coding_of(fields: Sequence[int]) -> Coding:
    """Return the `Coding` with these fields, from the list that `coding_as_list` returns."""
    code, group, outputs, zeros, minima = fields
    kind = next(kind for kind, number in CODES.items() if number == code)
    return Coding(kind, group, outputs, bool(zeros), next(form for form, number in MINIMA.items() if number == minima))


def scales_dtype(coding: Coding) -> torch.dtype:
    """Return the dtype of the scales of a `QuantizedWeight`."""
    if coding.minima:
        return torch.int32
    return torch.uint8 if coding.kind == "mxfp4" else torch.float32


def check_codes(codes: Tensor, scales: Tensor | None, coding: Coding, size: int) -> None:
    """Raise AssertionError if codes and scales do not have the shapes that a kernel reads for `size` inputs."""
    assert scales is not None
    assert codes.dtype == torch.int16
    assert scales.dtype == scales_dtype(coding)
    assert scales.is_contiguous()
    assert scales.shape == (-(-codes.shape[0] // coding.outputs), -(-size // coding.block) * coding.words)
    assert codes.shape[1] == size * coding.bits // 16
    assert coding.unit(size) is not None, f"no words of {size} inputs in groups of {coding.group}"
