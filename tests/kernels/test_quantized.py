"""INT8 and INT4 weights: maximum quantization error, numbers of packed integers, bytes, wrong input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st
from specrs.arrays import BFLOAT16, FLOAT64, Array, bits
from specrs.core import InvalidBufferError, PackedMatrix, quantize_q4_k, quantize_weight
from specrs.models.quantization.grouped import Grouped
from specrs.models.stored import PackedWeight


def quantized(weight: Array, group: int | None = None) -> Grouped:
    """Quantize: INT4 by groups of `group` inputs, or INT8 if `group` is None."""
    out, size = weight.shape
    integers = np.full((out, size), 99, np.int8)
    scales = np.full((out, 1 if group is None else size // group), np.nan, BFLOAT16)
    quantize_weight("w", bits(weight), 127 if group is None else 7, integers, bits(scales))
    return Grouped(integers, scales.astype(np.float32))


def numbers(w: Grouped) -> np.ndarray:
    """Multiply each integer by the scale of its group, element by element: float64 `[out, in]`."""
    out, size = w.values.shape
    made = np.empty((out, size))
    for row in range(out):
        for i in range(size):
            made[row, i] = int(w.values[row, i]) * float(w.scales[row, i * w.scales.shape[1] // size])
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


INTEGERS = st.sampled_from([(-8, 7), (-128, 127), (-15, 0), (40, 55), (0, 0)])


@given(st.data())
def test_packed_numbers_are_those_given(data: st.DataObject) -> None:
    """Check that packed numbers are exactly those given, for every scale type, range of integers and group."""
    group, groups = 32 * data.draw(st.integers(1, 5), label="group"), data.draw(st.integers(1, 4), label="groups")
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    ranges = data.draw(st.lists(INTEGERS, min_size=1, max_size=3), label="ranges")
    out = data.draw(st.integers(1, 35), label="out")
    values = np.empty((out, groups, group), np.int16)
    for cell in np.ndindex(out, groups):
        low, high = ranges[int(generator.integers(len(ranges)))]
        values[cell] = generator.integers(low, high, group, endpoint=True)
    dtype = data.draw(st.sampled_from([np.float16, BFLOAT16, np.float32]), label="dtype")
    scales = generator.standard_normal((out, groups)).astype(dtype).astype(np.float32)
    grouped = Grouped(values.reshape(out, -1), scales)
    packed = grouped.packed()
    assert packed is not None
    assert np.array_equal(packed.numbers(), numbers(grouped).astype(np.float32))
    narrow = values.min() >= -8 and values.max() <= 7
    width = (values.max(2) - values.min(2)).max()
    assert packed.kind == ("INT4" if narrow or (width < 16 and dtype != np.float32) else "INT8")


@given(st.data())
def test_inputs_of_a_group_are_brought_together(data: st.DataObject) -> None:
    """Check that inputs of a group are brought together, with the numbers in the original order. Groups that are only
    permuted as a whole need no order of inputs."""
    groups, group = data.draw(st.integers(1, 4), label="groups"), 32 * data.draw(st.integers(1, 3), label="group")
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    out, size = data.draw(st.integers(1, 20), label="out"), groups * group
    values = generator.integers(-8, 8, (out, size), np.int16)
    scales = generator.standard_normal((out, groups)).astype(BFLOAT16).astype(np.float32)
    way = data.draw(st.sampled_from(["inputs", "groups"]), label="order of")
    group_of = generator.permutation(groups).repeat(group)
    if way == "inputs":
        group_of = generator.permutation(group_of)
    grouped = Grouped(values, scales, group_of)
    packed = grouped.packed()
    assert packed is not None
    assert packed.kind == "INT4"
    assert np.array_equal(packed.numbers(), values * scales[:, group_of])
    if (group_of.reshape(groups, group) == group_of[::group, None]).all():
        assert packed.order is None
    else:
        assert packed.order is not None
        assert np.array_equal(packed.order, group_of.argsort(kind="stable"))
    if groups > 1:
        group_of = group_of.copy()
        group_of[group_of.tolist().index(0)] = 1
        assert Grouped(values, scales, group_of).packed() is None, "groups of different sizes"


@pytest.mark.parametrize("order", [[0] * 32, [*range(1, 33)], [*range(31)], [-1, *range(31)]])
def test_orders_without_each_input_once(order: list[int]) -> None:
    given = np.array(order, np.int64)
    with pytest.raises(InvalidBufferError, match=r"order"):
        PackedMatrix.grouped(np.zeros((2, 32), np.int16), np.ones((2, 1), F32), given)


ROWS = {
    "normal": lambda generator, shape: generator.standard_normal(shape),
    "heavy tails": lambda generator, shape: generator.standard_t(3, shape),
    "one sided": lambda generator, shape: generator.exponential(size=shape),
    "far from 0": lambda generator, shape: generator.standard_normal(shape) - 5.0,
    "sparse": lambda generator, shape: generator.standard_normal(shape) * (generator.random(shape) < 0.1),
}
"""Kinds of random weights to quantize, by name."""


@given(
    rows=st.sampled_from(list(ROWS)),
    shape=st.tuples(st.integers(4, 24), st.integers(1, 3)),
    exponent=st.integers(-3, 3),
    as_bf16=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_q4_k_blocks(rows: str, shape: tuple[int, int], exponent: int, as_bf16: bool, seed: int) -> None:
    """Check Q4_K blocks: the package gguf reads the same numbers, and on ordinary weights the error is below that of
    its Q4_0."""
    generator = np.random.default_rng(seed)
    weight = (ROWS[rows](generator, (shape[0], 256 * shape[1])) * 10.0**exponent).astype(np.float32)
    if as_bf16:
        weight = weight.astype(BFLOAT16).astype(np.float32)
    blocks = quantize_q4_k("w", weight)
    if as_bf16:
        assert np.array_equal(blocks, quantize_q4_k("w", bits(weight.astype(BFLOAT16))))
    numbers = quants.dequantize(blocks, GGMLQuantizationType.Q4_K)
    assert np.array_equal(PackedMatrix("Q4_K", blocks).numbers(), numbers)
    error = np.square(numbers.astype(FLOAT64) - weight).sum()
    if rows != "sparse":  # few blocks of few weights
        other = quants.dequantize(quants.quantize(weight, GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0)
        assert error < np.square(other.astype(FLOAT64) - weight).sum()
    # Codes over the whole range of each block, with a scale and a minimum that are not rounded.
    of = weight.astype(FLOAT64).reshape(-1, 32)
    low, high = of.min(1, keepdims=True, initial=0.0), of.max(1, keepdims=True)
    scale = np.maximum((high - low) / 15, 1e-300)
    whole = np.square(np.rint((of - low) / scale) * scale + low - of).sum()
    assert error < 1.1 * whole + 1e-12 * np.square(weight, dtype=FLOAT64).sum()


def test_q4_k_of_special_rows() -> None:
    """Check Q4_K of special rows: zeros and too small numbers become zeros, also next to other blocks. A block of equal
    numbers is off by at most the rounding of 6 bits."""
    weight = np.zeros((4, 256), np.float32)
    weight[1] = np.repeat(np.array([1, -1, 2, -2, 3, -3, 4, 0], np.float32), 32)
    weight[2] = 1e-38
    weight[3, :32] = np.linspace(-63 * 65504.0, 63 * 65504.0, 32)
    numbers = PackedMatrix("Q4_K", quantize_q4_k("w", weight)).numbers()
    assert not numbers[[0, 2]].any()
    assert np.abs(numbers[1] - weight[1]).max() <= 4 / 63
    assert not numbers[1, 224:].any()
    assert np.isfinite(numbers).all()
    assert np.abs(numbers[3, :32] - weight[3, :32]).max() < 63 * 65504.0 / 12
    assert not numbers[3, 32:].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 4126753.0])
def test_weights_that_q4_k_does_not_hold(bad: float) -> None:
    weight = np.ones((3, 512), np.float32)
    weight[1, 300] = bad
    with pytest.raises(InvalidBufferError, match=r"^up_proj\[1, 300\]=.* must be a number of at most 4126752$"):
        quantize_q4_k("up_proj", weight)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (np.ones((2, 128), np.float32), r"^w's inputs=128: must be a multiple of 256$"),
        (np.ones((2, 0), np.float32), r"^w's inputs=0: must be"),
        (np.ones((2, 256)), r"^w: dtype is float64"),
        (np.ones(256, np.float32), r"^w: "),
    ],
)
def test_arrays_that_are_no_super_blocks(weight: Array, message: str) -> None:
    with pytest.raises(InvalidBufferError, match=message):
        quantize_q4_k("w", weight)


@pytest.mark.parametrize(
    "given",
    [
        Grouped(np.zeros((2, 48), np.int16), np.ones((2, 3), np.float32)),
        Grouped(np.zeros((2, 64), np.int16), np.ones((2, 2), np.float32), np.zeros(64, np.int64)),
        Grouped(np.full((2, 64), 128, np.int16), np.ones((2, 2), np.float32)),
        Grouped(np.full((2, 64), -129, np.int16), np.ones((2, 2), np.float32)),
        Grouped(np.full((2, 64), 127, np.int16), np.full((2, 2), 1e37, np.float32)),
    ],
)
def test_what_no_layout_holds(given: Grouped) -> None:
    """Check that `packed` returns None for what no layout holds: groups of 16, interleaved groups, integers of 9 bits,
    numbers beyond fp32."""
    assert given.packed() is None


@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_shape_and_bytes(group: int | None, with_bias: bool) -> None:
    """Check shape and bytes: outputs are packed by sixteen; a scale has two bytes and serves the blocks of its
    group."""
    weight = np.linspace(-1, 1, 37 * 64, dtype=np.float32).reshape(64, 37).T.copy()
    made = [quantized(part, group).packed() for part in (weight[:5], weight[5:])]
    parts = tuple(part for part in made if part is not None)
    w = PackedWeight(parts, (np.ones(5, np.float32), np.ones(32, np.float32)) if with_bias else None)
    assert w.shape == (37, 64)
    scale_bytes, bias_bytes = 2 * 48 * (1 if group is None else 2), 4 * 37 if with_bias else 0
    assert w.num_bytes == 48 * 64 // (1 if group is None else 2) + scale_bytes + bias_bytes


INT8, U16, F32 = np.int8, np.uint16, np.float32


@pytest.mark.parametrize(
    ("largest", "codes", "scales", "message"),
    [
        (7, ((2, 32), np.uint8), ((2, 1), U16), r"^codes: dtype is uint8; must be int8$"),
        (127, ((2, 31), INT8), ((2, 1), U16), r"^codes: shape is \[2, 31\]; must be \[2, 32\]$"),
        (8, ((2, 32), INT8), ((2, 1), U16), r"^largest=8: must be 7 \(INT4\) or 127 \(INT8\)$"),
        (7, ((2, 32), INT8), ((2, 1), F32), r"^scales: dtype is float32; must be uint16 with the bits of bfloat16$"),
        (7, ((2, 32), INT8), ((3, 1), U16), r"^scales: shape is \[3, 1\]; must be \[2, groups\]$"),
        (7, ((2, 32), INT8), ((2, 3), U16), r"^scales=6 elements: must be 2 for each group of"),
    ],
)
def test_arrays_that_do_not_fit(largest: int, codes: tuple[Any, ...], scales: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidBufferError, match=message):
        quantize_weight("w", np.ones((2, 32), np.float32), largest, np.zeros(*codes), np.zeros(*scales))


@pytest.mark.parametrize(
    ("values", "scales", "message"),
    [
        (np.zeros((2, 32), np.int8), np.ones((2, 1), F32), r"^values: dtype is int8; must be int16$"),
        (np.zeros((2, 32), np.int16), np.ones((2, 1)), r"^scales: dtype is float64; must be float32$"),
        (np.zeros((2, 32), np.int16), np.ones((1, 1), F32), r"^scales: shape is \[1, 1\]; must be \[2, groups\]$"),
        (
            np.zeros((2, 48), np.int16),
            np.ones((2, 3), F32),
            r"^matrix's scales=6 elements: .* multiple of 32 and",
        ),
        (np.zeros((2, 32), np.int16), np.full((2, 1), np.inf, F32), r"^matrix's scales=inf: must be"),
        (np.full((2, 32), 200, np.int16), np.ones((2, 1), F32), r"^matrix's values=integers from 200 to 200: must be"),
        (np.zeros((2, 64), np.int16)[:, ::2], np.ones((2, 1), F32), r"^values: .*contiguous"),
    ],
)
def test_integers_that_cannot_be_packed(values: Array, scales: Array, message: str) -> None:
    with pytest.raises(InvalidBufferError, match=message):
        PackedMatrix.grouped(values, scales)


def test_weights_that_have_no_codes() -> None:
    for bad in (np.nan, np.inf, -(2.0**127)):
        weight = np.ones((2, 32), np.float32)
        weight[1, 7] = bad
        with pytest.raises(InvalidBufferError, match=r"^up_proj\[1, 7\]=.* must be a number of less than 2\^127$"):
            quantize_weight("up_proj", weight, 127, np.zeros((2, 32), np.int8), np.zeros((2, 1), np.uint16))
