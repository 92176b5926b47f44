"""GGML types whose weights are a code times a scale, perhaps less a minimum: splits their blocks into codes, scales and
minima.

The package `gguf` dequantizes the other types. Tests compare its numbers with those of this module.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specrs.arrays import FLOAT16, FLOAT32, Array
from specrs.kernels.coding import Coding
from specrs.models.quantization.grouped import E2M1, LARGEST_EXPONENT, Grouped, WithMinima

IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""Value of each 4-bit code of IQ4_NL and IQ4_XS."""


def _fp16(halves: Array) -> Array:
    """Return fp16 numbers from their bytes `[.., 2]`: float16 `[..]`."""
    found: Array = np.ascontiguousarray(halves).view(FLOAT16)[..., 0]
    return found


def _halves(halves: Array) -> Array:
    """Return fp16 numbers from their bytes `[.., 2]`: float32 `[..]`."""
    return _fp16(halves).astype(FLOAT32)


def _signed(codes: Array) -> Array:
    """Return bytes viewed as int8."""
    return np.ascontiguousarray(codes).view(np.int8)


def _nibbles(packed: Array) -> Array:
    """Return the lower halves of bytes `[.., n]`, followed by their upper halves: int8 `[.., 2 n]`."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1).astype(np.int8)


def _with_factors(values: Array, halves: Array, bits: int, factors: Array) -> WithMinima:
    """Return codes `[out, blocks, ..]` of super-blocks, with the bytes `[out, blocks, 4]` of their fp16 scales and
    minima, and factors `[out, blocks, groups, 2]`."""
    out, scales, minima = len(values), _fp16(halves[..., :2]), _fp16(halves[..., 2:])
    return WithMinima(values.reshape(out, -1), scales, minima, bits, factors.reshape(out, -1, 2))


def _without_minima(values: Array, halves: Array, factors: Array) -> WithMinima:
    """Return codes `[out, blocks, ..]` of super-blocks, with the bytes `[out, blocks, 2]` of their fp16 scales and int8
    factors `[out, blocks, groups]`. Minima are 0."""
    pairs = np.stack((factors, np.zeros_like(factors)), axis=-1)
    return _with_factors(values, np.concatenate((halves, np.zeros_like(halves)), axis=-1), 8, pairs)


def q8_0(blocks: Array) -> Grouped:
    """Split Q8_0 blocks: 32 numbers in 34 bytes, which are an fp16 scale and int8 codes."""
    of = blocks.reshape(len(blocks), -1, 34)
    return Grouped(_signed(of[..., 2:]).reshape(len(blocks), -1), _halves(of[..., :2]))


def q4_0(blocks: Array) -> Grouped:
    """Split Q4_0 blocks: 32 numbers in 18 bytes, which are an fp16 scale and 4-bit codes plus 8. Code byte i has the
    codes of numbers i and 16 + i."""
    of = blocks.reshape(len(blocks), -1, 18)
    return Grouped((_nibbles(of[..., 2:]) - np.int8(8)).reshape(len(blocks), -1), _halves(of[..., :2]))


def q6_k(blocks: Array) -> WithMinima:
    """Split Q6_K blocks: 256 numbers in 210 bytes. These are 128 bytes with lower halves of codes, 64 bytes with their
    two upper bits, 16 int8 scales, and an fp16 scale of the scales.

    Each 128 numbers are four runs of 32. Bytes 0 to 31 have the lower halves of run 0 in their low bits and of run 2 in
    their high bits; bytes 32 to 63 those of runs 1 and 3. Byte i of 32 has the upper bits of number i of each run.
    """
    of = blocks.reshape(len(blocks), -1, 210)
    low = of[..., :128].reshape(*of.shape[:2], 2, 2, 32)
    low = np.concatenate((low & 15, low >> 4), axis=-2)
    high = of[..., 128:192].reshape(*of.shape[:2], 2, 1, 32)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2)
    values = (low | high << 4).astype(np.int8) - np.int8(32)
    return _without_minima(values, of[..., 208:], _signed(of[..., 192:208]))


def q5_0(blocks: Array) -> Grouped:
    """Split Q5_0 blocks: 32 numbers in 22 bytes. These are an fp16 scale, 4 bytes with the fifth bits of all codes, and
    the lower halves of the codes as in Q4_0. Codes are stored plus 16."""
    of = blocks.reshape(len(blocks), -1, 22)
    high = np.unpackbits(of[..., 2:6], axis=-1, bitorder="little").astype(np.int8)
    values = (_nibbles(of[..., 6:]) | high << 4) - np.int8(16)
    return Grouped(values.reshape(len(blocks), -1), _halves(of[..., :2]))


def q3_k(blocks: Array) -> WithMinima:
    """Split Q3_K blocks: 256 numbers in 110 bytes. These are 32 bytes with the third bits of codes, 64 bytes with their
    two lower bits, 12 bytes with 16 scales of 6 bits, and an fp16 scale of the scales.

    Number 32 i + j has its third bit in bit i of byte j of 32, and its lower bits in bits 2 (i mod 4) of byte j of the
    first or second 32. Codes are stored plus 4, and scales plus 32. The lower halves of the scales are in 8 bytes as
    in Q4_0. Bits 2 (i div 4) of byte i mod 4 after them are the upper bits of scale i.
    """
    of = blocks.reshape(len(blocks), -1, 110)
    shape = of.shape[:2]
    high = np.unpackbits(of[..., :32].reshape(*shape, 32, 1), axis=-1, bitorder="little").swapaxes(-1, -2)
    low = of[..., 32:96].reshape(*shape, 2, 1, 32)
    low = np.concatenate([low >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2).reshape(*shape, 8, 32)
    values = (low | high << 2).astype(np.int8) - np.int8(4)
    upper = np.concatenate([of[..., 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1).astype(np.int8)
    own = (_nibbles(of[..., 96:104]) | upper << 4) - np.int8(32)
    return _without_minima(values, of[..., 108:], own)


def iq4_nl(blocks: Array) -> Grouped:
    """Split IQ4_NL blocks: 32 numbers in 18 bytes, which are an fp16 scale and 4-bit indices into `IQ4`, in the order
    of Q4_0."""
    of = blocks.reshape(len(blocks), -1, 18)
    return Grouped(IQ4[_nibbles(of[..., 2:])].reshape(len(blocks), -1), _halves(of[..., :2]))


def iq4_xs(blocks: Array) -> WithMinima:
    """Split IQ4_XS blocks: 256 numbers in 136 bytes. These are an fp16 scale of the scales, 2 bytes with the two upper
    bits and 4 with the lower halves of 8 scales, and 4-bit indices into `IQ4`, 32 numbers at a time as in Q4_0. Scales
    are stored plus 32."""
    of = blocks.reshape(len(blocks), -1, 136)
    shape = of.shape[:2]
    upper = np.concatenate([of[..., 2:4, None] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1).reshape(*shape, 8)
    lower = np.stack((of[..., 4:8] & 15, of[..., 4:8] >> 4), axis=-1).reshape(*shape, 8)
    own = (lower | upper << 4).astype(np.int8) - np.int8(32)
    return _without_minima(IQ4[_nibbles(of[..., 8:].reshape(*shape, 8, 16))], of[..., :2], own)


def e2m1(blocks: Array) -> E2M1:
    """Split MXFP4 blocks: 32 numbers in 17 bytes, which are the exponent of a power of two and e2m1 codes. Code byte i
    has the codes of numbers i and 16 + i."""
    of = blocks.reshape(len(blocks), -1, 17)
    codes = _nibbles(of[..., 1:]).view(np.uint8)
    return E2M1(codes.reshape(len(blocks), -1), np.ascontiguousarray(of[..., 0]))


def mxfp4(blocks: Array) -> Grouped:
    """Split MXFP4 blocks into integers and scales. Exponents with which a number may be infinite become scales that are
    not finite."""
    made = e2m1(blocks)
    grouped = made.grouped()
    scales = np.where(made.exponents > LARGEST_EXPONENT, np.float32(np.nan), grouped.scales)
    return Grouped(grouped.values, scales)


def q4_1(blocks: Array) -> WithMinima:
    """Split Q4_1 blocks: 32 numbers in 20 bytes, which are an fp16 scale, an fp16 number that is added, and 4-bit codes
    as in Q4_0."""
    of = blocks.reshape(len(blocks), -1, 20)
    return WithMinima(_nibbles(of[..., 4:]).reshape(len(blocks), -1), _fp16(of[..., :2]), -_fp16(of[..., 2:4]), 4)


def q5_1(blocks: Array) -> WithMinima:
    """Split Q5_1 blocks: 32 numbers in 24 bytes. These are an fp16 scale, an fp16 number that is added, and codes as in
    Q5_0, but stored as they are."""
    of = blocks.reshape(len(blocks), -1, 24)
    high = np.unpackbits(of[..., 4:8], axis=-1, bitorder="little").astype(np.int8)
    values = _nibbles(of[..., 8:]) | high << 4
    return WithMinima(values.reshape(len(blocks), -1), _fp16(of[..., :2]), -_fp16(of[..., 2:4]), 8)


def _factors(packed: Array) -> Array:
    """Return the 8 pairs of 6-bit factors in the 12 bytes `[.., 12]` of Q4_K and Q5_K: int8 `[.., 8, 2]`.

    Bytes 0 to 3 have the scales' factors of groups 0 to 3 in their lower six bits, bytes 4 to 7 those of the minima.
    Byte 8 + i has the lower halves for group 4 + i: the scale's, then the minimum's. Their upper two bits are the
    highest of bytes i and 4 + i.
    """
    scale, least, lower = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((scale & 63, lower & 15 | scale >> 6 << 4), axis=-1)
    minima = np.concatenate((least & 63, lower >> 4 | least >> 6 << 4), axis=-1)
    return np.stack((scales, minima), axis=-1).astype(np.int8)


def q4_k(blocks: Array) -> WithMinima:
    """Split Q4_K blocks: 256 numbers in 144 bytes. These are an fp16 scale and an fp16 minimum, 12 bytes of factors for
    8 groups, and 4-bit codes, 64 numbers at a time: the lower halves of 32 bytes, then their upper halves."""
    of = blocks.reshape(len(blocks), -1, 144)
    values = _nibbles(of[..., 16:].reshape(*of.shape[:2], 4, 32))
    return _with_factors(values, of[..., :4], 4, _factors(of[..., 4:16]))


def q5_k(blocks: Array) -> WithMinima:
    """Split Q5_K blocks: 256 numbers in 176 bytes. These are scales, minima and factors as in Q4_K, 32 bytes with the
    fifth bits of codes, and their lower halves as in Q4_K. Bit i of byte j has that of number 32 i + j."""
    of = blocks.reshape(len(blocks), -1, 176)
    high = np.unpackbits(of[..., 16:48, None], axis=-1, bitorder="little").swapaxes(-1, -2).astype(np.int8)
    low = _nibbles(of[..., 48:].reshape(*of.shape[:2], 4, 32)).reshape(*of.shape[:2], 8, 32)
    return _with_factors(low | high << 4, of[..., :4], 8, _factors(of[..., 4:16]))


def q2_k(blocks: Array) -> WithMinima:
    """Split Q2_K blocks: 256 numbers in 84 bytes. These are 16 bytes with factors for groups of 16 numbers, the scale's
    in lower halves, 64 bytes of 2-bit codes, an fp16 scale and an fp16 minimum. Number 32 i + j of the first or second
    128 is in bits 2 i of byte j of the first or second 32."""
    of = blocks.reshape(len(blocks), -1, 84)
    codes = of[..., 16:80].reshape(*of.shape[:2], 2, 1, 32)
    values = np.concatenate([codes >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2).astype(np.int8)
    factors = np.stack((of[..., :16] & 15, of[..., :16] >> 4), axis=-1).astype(np.int8)
    return _with_factors(values, of[..., 80:], 4, factors)


GROUPED: dict[str, Callable[[Array], Grouped]] = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q5_0": q5_0,
    "Q3_K": lambda blocks: q3_k(blocks).grouped(),
    "Q6_K": lambda blocks: q6_k(blocks).grouped(),
    "IQ4_NL": iq4_nl,
    "IQ4_XS": lambda blocks: iq4_xs(blocks).grouped(),
    "MXFP4": mxfp4,
}
"""For each GGML type without minima that this module reads, the function that splits its blocks."""
CODINGS: dict[str, tuple[tuple[str, ...], int]] = {
    "Q8_0": (("int8",), 32),
    "Q4_0": (("int4", "int8"), 32),
    "Q5_0": (("int8",), 32),
    "Q3_K": (("int4", "int8"), 16),
    "Q6_K": (("int8",), 16),
    "IQ4_NL": (("int8",), 32),
    "IQ4_XS": (("int8",), 32),
    "MXFP4": (("mxfp4", "int8"), 32),
}
"""For each GGML type without minima that this module reads, the kinds of `Coding` that can hold its weights, and the
number of inputs in a group."""
WITH_MINIMA: dict[str, tuple[Callable[[Array], WithMinima], Coding]] = {
    "Q4_1": (q4_1, Coding("int4", 32, minima="pairs")),
    "Q5_1": (q5_1, Coding("int8", 32, minima="pairs")),
    "Q2_K": (q2_k, Coding("int4", 16, minima="blocks")),
    "Q4_K": (q4_k, Coding("int4", 32, minima="blocks")),
    "Q5_K": (q5_k, Coding("int8", 32, minima="blocks")),
}
"""For each GGML type with minima, the function that splits its blocks, and the `Coding` that holds its weights."""
SUPER_BLOCKS: dict[str, Callable[[Array], WithMinima]] = {
    **{kind: split for kind, (split, coding) in WITH_MINIMA.items() if coding.minima == "blocks"},
    "Q3_K": q3_k,
    "Q6_K": q6_k,
    "IQ4_XS": iq4_xs,
}
"""For each GGML type of super-blocks, the function that splits them. Matrices of several of these types can be brought
into one `Coding` with minima."""
