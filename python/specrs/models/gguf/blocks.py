"""GGML types whose weights are a code times a scale: splits their blocks into codes and scales.

The package `gguf` dequantizes the other types. Tests compare its numbers with those of this module.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specrs.arrays import FLOAT16, FLOAT32, Array
from specrs.models.quantization.grouped import E2M1, LARGEST_EXPONENT, Grouped

IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""Value of each 4-bit code of IQ4_NL and IQ4_XS."""


def _halves(scales: Array) -> Array:
    """Return fp16 numbers from their bytes `[.., 2]`: float32 `[..]`."""
    found: Array = np.ascontiguousarray(scales).view(FLOAT16)[..., 0].astype(FLOAT32)
    return found


def _signed(codes: Array) -> Array:
    """Return bytes viewed as int8."""
    return np.ascontiguousarray(codes).view(np.int8)


def _nibbles(packed: Array) -> Array:
    """Return the lower halves of bytes `[.., n]`, followed by their upper halves: int8 `[.., 2 n]`."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1).astype(np.int8)


def q8_0(blocks: Array) -> Grouped:
    """Split Q8_0 blocks: 32 numbers in 34 bytes, which are an fp16 scale and int8 codes."""
    of = blocks.reshape(len(blocks), -1, 34)
    return Grouped(_signed(of[..., 2:]).reshape(len(blocks), -1), _halves(of[..., :2]))


def q4_0(blocks: Array) -> Grouped:
    """Split Q4_0 blocks: 32 numbers in 18 bytes, which are an fp16 scale and 4-bit codes plus 8. Code byte i has the
    codes of numbers i and 16 + i."""
    of = blocks.reshape(len(blocks), -1, 18)
    return Grouped((_nibbles(of[..., 2:]) - np.int8(8)).reshape(len(blocks), -1), _halves(of[..., :2]))


def q6_k(blocks: Array) -> Grouped:
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
    with np.errstate(all="ignore"):  # scales that are not finite are the caller's to name
        scales = _signed(of[..., 192:208]).astype(FLOAT32) * _halves(of[..., 208:])[..., None]
    return Grouped(values.reshape(len(blocks), -1), scales.reshape(len(blocks), -1))


def q5_0(blocks: Array) -> Grouped:
    """Split Q5_0 blocks: 32 numbers in 22 bytes. These are an fp16 scale, 4 bytes with the fifth bits of all codes, and
    the lower halves of the codes as in Q4_0. Codes are stored plus 16."""
    of = blocks.reshape(len(blocks), -1, 22)
    high = np.unpackbits(of[..., 2:6], axis=-1, bitorder="little").astype(np.int8)
    values = (_nibbles(of[..., 6:]) | high << 4) - np.int8(16)
    return Grouped(values.reshape(len(blocks), -1), _halves(of[..., :2]))


def q3_k(blocks: Array) -> Grouped:
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
    with np.errstate(all="ignore"):  # scales that are not finite are the caller's to name
        scales = own.astype(FLOAT32) * _halves(of[..., 108:])[..., None]
    return Grouped(values.reshape(len(blocks), -1), scales.reshape(len(blocks), -1))


def iq4_nl(blocks: Array) -> Grouped:
    """Split IQ4_NL blocks: 32 numbers in 18 bytes, which are an fp16 scale and 4-bit indices into `IQ4`, in the order
    of Q4_0."""
    of = blocks.reshape(len(blocks), -1, 18)
    return Grouped(IQ4[_nibbles(of[..., 2:])].reshape(len(blocks), -1), _halves(of[..., :2]))


def iq4_xs(blocks: Array) -> Grouped:
    """Split IQ4_XS blocks: 256 numbers in 136 bytes. These are an fp16 scale of the scales, 2 bytes with the two upper
    bits and 4 with the lower halves of 8 scales, and 4-bit indices into `IQ4`, 32 numbers at a time as in Q4_0. Scales
    are stored plus 32."""
    of = blocks.reshape(len(blocks), -1, 136)
    shape = of.shape[:2]
    upper = np.concatenate([of[..., 2:4, None] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1).reshape(*shape, 8)
    lower = np.stack((of[..., 4:8] & 15, of[..., 4:8] >> 4), axis=-1).reshape(*shape, 8)
    own = (lower | upper << 4).astype(np.int8) - np.int8(32)
    with np.errstate(all="ignore"):  # scales that are not finite are the caller's to name
        scales = own.astype(FLOAT32) * _halves(of[..., :2])[..., None]
    values = IQ4[_nibbles(of[..., 8:].reshape(*shape, 8, 16))]
    return Grouped(values.reshape(len(blocks), -1), scales.reshape(len(blocks), -1))


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


GROUPED: dict[str, Callable[[Array], Grouped]] = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q5_0": q5_0,
    "Q3_K": q3_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}
"""For each GGML type that this module reads, the function that splits its blocks."""
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
"""For each GGML type that this module reads, the kinds of `Coding` that can hold its weights, and the number of inputs
in a group."""
