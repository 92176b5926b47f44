"""INT8 and INT4 weights: what quantizing costs at most, the numbers of codes, bytes, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.arrays import BFLOAT16, FLOAT64, Array, bits
from specrs.core import InvalidBufferError, quantize_weight
from specrs.models.stored import Codes, QuantizedWeight


def quantized(weight: Array, group: int | None = None) -> Codes:
    """INT4 by groups, INT8 where `group` is None."""
    out, size = weight.shape
    if group is None:
        codes: Array = np.full((out, size), 99, np.int8)
    else:
        codes = np.full((out, size // 2), 99, np.uint8)
    scales = np.full((out, 1 if group is None else size // group), np.nan, BFLOAT16)
    quantize_weight("w", bits(weight), codes, bits(scales))
    return Codes(codes, scales)


def numbers(w: Codes) -> np.ndarray:
    """What codes and scales stand for, element by element as the layout is described, float64."""
    codes, scales = w.codes, w.scales.astype(FLOAT64)
    out, size = w.shape
    made = np.empty((out, size))
    for row in range(out):
        for i in range(size):
            if codes.dtype == np.int8:
                code = int(codes[row, i])
            else:
                byte = int(codes[row, i // 32 * 16 + i % 16])
                code = (byte % 16 if i % 32 < 16 else byte // 16) - 8
            made[row, i] = code * scales[row, i * scales.shape[1] // size]
    return made


@given(st.data())
def test_numbers_are_within_half_a_scale(data: st.DataObject) -> None:
    group = data.draw(st.sampled_from([None, 32, 64, 128]), label="group")
    size = data.draw(st.integers(1, 70) if group is None else st.integers(1, 3).map(lambda n: n * (group or 0)))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    weight = generator.standard_normal((3, size), np.float32)
    weight *= np.float32(10.0 ** data.draw(st.integers(-20, 20), label="size"))
    weight[1] *= generator.random(size, np.float32) ** 4
    weight[2] = 0
    if data.draw(st.booleans(), label="bf16"):
        weight = weight.astype(BFLOAT16)
    w = quantized(weight, group)
    exact = numbers(w)
    assert np.array_equal(w.numbers(), exact), "exact in float32"
    scales = w.scales.astype(FLOAT64).repeat(size // w.scales.shape[1], axis=1)
    assert (np.abs(weight.astype(FLOAT64) - exact) <= scales / 2).all()
    assert not exact[2].any()


@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_shape_and_bytes(group: int | None, with_bias: bool) -> None:
    parts = tuple(quantized(np.ones((out, 64), np.float32), group) for out in (5, 3))
    w = QuantizedWeight(parts, (np.ones(5, np.float32), np.ones(3, np.float32)) if with_bias else None)
    assert w.shape == (8, 64)
    scale_bytes, bias_bytes = 2 * 8 * (1 if group is None else 2), 4 * 8 if with_bias else 0
    assert w.num_bytes == 8 * 64 // (1 if group is None else 2) + scale_bytes + bias_bytes


INT8, INT4, U16, F32 = np.int8, np.uint8, np.uint16, np.float32


@pytest.mark.parametrize(
    ("codes", "scales", "message"),
    [
        (
            ((2, 32), np.int16),
            ((2, 1), U16),
            r"^codes: dtype is int16, expected int8 \(INT8\), or uint8 with two",
        ),
        (((2, 31), INT8), ((2, 1), U16), r"^codes: shape is \[2, 31\], expected \[2, 32\]$"),
        (((2, 32), INT4), ((2, 1), U16), r"^codes: shape is \[2, 32\], expected \[2, 16\]$"),
        (((2, 32), INT8), ((2, 1), F32), r"^scales: dtype is float32, expected uint16 with the bits of bfloat16$"),
        (((2, 32), INT8), ((3, 1), U16), r"^scales: shape is \[3, 1\], expected \[2, groups\]$"),
        (((2, 32), INT8), ((2, 2), U16), r"^w = 64 elements is not allowed: expected 128 elements$"),
        (
            ((2, 16), INT4),
            ((2, 2), U16),
            r"^scales = 4 elements is not allowed: expected 2 x groups of a multiple",
        ),
    ],
)
def test_arrays_that_do_not_fit(codes: tuple[Any, ...], scales: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidBufferError, match=message):
        quantize_weight("w", np.ones((2, 32), np.float32), np.zeros(*codes), np.zeros(*scales))


def test_weights_that_have_no_codes() -> None:
    for bad in (np.nan, np.inf, -(2.0**127)):
        weight = np.ones((2, 32), np.float32)
        weight[1, 7] = bad
        with pytest.raises(InvalidBufferError, match=r"^up_proj\[1, 7\] = .* expected a number of less than 2\^127$"):
            quantize_weight("up_proj", weight, np.zeros((2, 32), np.int8), np.zeros((2, 1), np.uint16))
