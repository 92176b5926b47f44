"""Products of few rows with quantized weights, and dequantizing, interpreted; and the PTX that unpacks codes, one
instruction at a time."""

import itertools
import math
import re
import struct

import pytest
import torch
from specrs.kernels.coding import Coding
from specrs.kernels.cuda import _codes
from specrs.kernels.cuda.configs import LinearConfig
from specrs.kernels.cuda.dequantize import dequantize, dequantize_reference
from specrs.kernels.cuda.linear_product import Product, scratch_sizes
from specrs.kernels.cuda.skinny_linear import skinny_linear
from specrs.kernels.quantized_weight import QuantizedWeight, fuse
from specrs.models.quantization.grouped import E2M1, Grouped
from specrs.models.quantized import quantized_weight
from torch import Tensor

from .ptx import bf16_of, execute

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


def random_quantized(coding: Coding, out: int, size: int, seed: int = 0) -> QuantizedWeight:
    """Return a weight of random codes, none of which is NaN, with random scales."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 1 << coding.bits, (out, size), generator=generator, dtype=torch.uint8)
    if coding.kind == "fp8":
        values[values & 127 == 127] = 0  # not numbers
    if coding.minima:
        if coding.kind == "int8":  # six bits, the most that files have
            values = (values.view(torch.int8) >> 2).view(torch.uint8)
        return QuantizedWeight.of(values, random_words(coding, out, size, generator), coding)
    shape = (-(-out // coding.outputs), -(-size // coding.group))
    if coding.kind == "mxfp4":
        scales = torch.randint(115, 132, shape, generator=generator, dtype=torch.uint8)
        return QuantizedWeight.of(values, scales, coding)
    scales = torch.rand(shape, generator=generator).half().float() + 2**-6
    if coding.zeros:
        zeros = torch.randint(0, 16, shape, generator=generator, dtype=torch.int32)
        scales = (scales.view(torch.int32) & -16 | zeros).view(torch.float32)
    return QuantizedWeight.of(values, scales, coding)


def random_words(coding: Coding, out: int, size: int, generator: torch.Generator) -> Tensor:
    """Return int32 words of random scales and minima, with every factor that a byte holds."""
    halves = torch.rand(out, size // coding.block, 2, generator=generator).half() + 2**-6
    halves[::3] *= -1
    words = halves.view(torch.int32)
    if coding.minima == "blocks":
        factors = torch.randint(-128, 128, (out, size // 256, 256 // coding.group, 2), generator=generator)
        factors = factors.to(torch.int8).view(out, size // 256, -1).contiguous()
        words = torch.cat((words, factors.view(torch.int32)), 2)
    return words.reshape(out, -1)


def scale_and_minimum(weight: QuantizedWeight, n: int, k: int) -> tuple[float, float]:
    """Read the scale and the minimum of one weight from its bytes, by the definition of `Coding.minima`."""
    coding = weight.coding
    data = weight.scales[n].numpy().tobytes()
    if coding.minima == "pairs":
        scale, least = struct.unpack_from("<2e", data, k // coding.group * 4)
        return scale, least
    start = k // 256 * (4 + 2 * 256 // coding.group)
    scale, least = struct.unpack_from("<2e", data, start)
    factors = struct.unpack_from("<2b", data, start + 4 + k % 256 // coding.group * 2)
    return scale * factors[0], least * factors[1]


def e2m1(code: int) -> float:
    """The number of a code of MXFP4 (OCP 2023, Microscaling formats, section 5.3.3)."""
    exponent, fraction = code >> 1 & 3, code & 1
    size = fraction / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + fraction / 2)
    return -size if code & 8 else size


def numbers(weight: QuantizedWeight) -> Tensor:
    """Dequantize by the definition, element by element, in float64."""
    (out, size), coding = weight.shape, weight.coding
    made = torch.empty(out, size, dtype=torch.float64)
    unit, each = coding.unit(size), 16 // coding.bits
    assert unit is not None
    for n, k in itertools.product(range(out), range(size)):
        word = int(weight.codes[n, k // unit * (unit // each) + k % (unit // each)]) & 0xFFFF
        code = word >> coding.bits * (k % unit // (unit // each)) & (1 << coding.bits) - 1
        if coding.kind == "mxfp4":
            made[n, k] = e2m1(code) * 2.0 ** (int(weight.scales[n, k // coding.group]) - 127)
            continue
        if coding.minima:
            scale, least = scale_and_minimum(weight, n, k)
            code -= 256 * (coding.kind == "int8" and code > 127)
            made[n, k] = scale * code - least
            continue
        bits = int(weight.scales[n // coding.outputs, k // coding.group].view(torch.int32))
        if coding.kind == "fp8":
            value = float(E4M3[code])
        elif coding.kind == "int8":
            value = code - 256 * (code > 127)
        else:
            value = code - (bits & 15 if coding.zeros else 8)
        scale = torch.tensor(bits & -16 if coding.zeros else bits, dtype=torch.int32).view(torch.float32)
        made[n, k] = value * float(scale)
    return made


def sizes_of(weight: QuantizedWeight) -> Tensor:
    """Return, for each weight, the sum of the sizes of what products add up: of code times scale, and of the
    minimum."""
    exact = numbers(weight)
    if not weight.coding.minima:
        return exact.abs()
    out, size = weight.shape
    minima = [[scale_and_minimum(weight, n, k)[1] for k in range(size)] for n in range(out)]
    least = torch.tensor(minima, dtype=torch.float64)
    return (exact + least).abs() + least.abs()


def bound(x: Tensor, exact: Tensor, sizes: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Bound the error of products of x with `exact` `[out, in]`, whose terms have these `sizes`. Each has at most as
    many fp32 roundings as inputs, and three for its scale and minimum (Higham 2002, section 3.1). The sum is rounded
    once."""
    u, steps = 2**-24, x.shape[1] + 3
    sums = x.double().abs() @ sizes.t()
    return sums * steps * u / (1 - steps * u) + (x.double() @ exact.t()).abs() * torch.finfo(out_dtype).eps / 2 + 1e-30


CODINGS = {
    "fp8-block": (Coding("fp8", 64, outputs=8), 40, 192),
    "fp8-small-block": (Coding("fp8", 32, outputs=1), 18, 96),
    "fp8-channel": (Coding("fp8", 96), 20, 96),
    "int8-row": (Coding("int8", 64), 20, 64),
    "int8-small-group": (Coding("int8", 16), 20, 64),
    "int8-group": (Coding("int8", 32), 20, 64),
    "int4-group": (Coding("int4", 32), 20, 64),
    "int4-groups-of-a-unit": (Coding("int4", 32, zeros=True), 20, 128),
    "mxfp4": (Coding("mxfp4", 32), 20, 192),
    "mxfp4-one-unit": (Coding("mxfp4", 32), 18, 128),
    "int4-zeros": (Coding("int4", 64, zeros=True), 20, 192),
    "int4-channel-zeros": (Coding("int4", 64, zeros=True), 20, 64),
    "q4_1": (Coding("int4", 32, minima="pairs"), 20, 192),
    "q5_1": (Coding("int8", 32, minima="pairs"), 18, 64),
    "q4_k": (Coding("int4", 32, minima="blocks"), 20, 512),
    "q5_k": (Coding("int8", 32, minima="blocks"), 18, 256),
    "q2_k": (Coding("int4", 16, minima="blocks"), 18, 256),
    "q4_k-and-q6_k": (Coding("int8", 16, minima="blocks"), 18, 256),
}


@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize("gated", [False, True])
def test_products_with_quantized_weights(name: str, gated: bool) -> None:
    """Check products with quantized weights: programs share tiles of 16; the last tile and step are incomplete."""
    coding, out, size = CODINGS[name]
    if gated and coding.outputs > 1:
        out = 2 * coding.outputs  # of each half
    weight = random_quantized(coding, out * (1 + gated), size)
    exact, sizes = numbers(weight), sizes_of(weight)
    assert torch.equal(weight.dequantized(), exact)
    generator = torch.Generator().manual_seed(1)
    unit = coding.unit(size)
    assert unit is not None
    # A step of one unit, and one of several, the last of which may not be there.
    for dtype, block_k, programs in ((torch.float32, 128, 3), (torch.float16, unit, 2)):
        x = torch.randn(3, size, generator=generator).to(dtype)
        y = torch.full((3, out), math.nan)
        config = LinearConfig(16, block_k, programs, 4, 1)
        partials, counters = scratch_sizes(config, 3, n=out, sides=1 + gated)
        scratch = torch.full((partials,), math.nan), torch.zeros(counters, dtype=torch.int32)
        product = Product(weight.codes, gated=gated, coding=coding, scales=weight.scales)
        skinny_linear(x, product, y, scratch, config.as_list(), False)
        if not gated:
            assert ((y.double() - x.double() @ exact.t()).abs() <= bound(x, exact, sizes, y.dtype)).all()
            continue
        gate, up = (x.double() @ half.t() for half in exact.chunk(2))
        off, off_up = (bound(x, *halves, torch.float32) for halves in zip(exact.chunk(2), sizes.chunk(2), strict=True))
        # silu has a slope of at most 1.1, and an error of its own.
        allowed = 1.1 * off * up.abs() + gate.abs() * off_up + 1.1 * off * off_up + (gate * up).abs() * 2**-20
        assert ((y.double() - torch.nn.functional.silu(gate) * up).abs() <= allowed).all()


@pytest.mark.parametrize("name", CODINGS)
def test_dequantize(name: str) -> None:
    """Check dequantizing of some outputs, rounded once."""
    coding, out, size = CODINGS[name]
    weight = random_quantized(coding, out, size)
    for dtype in (torch.float32, torch.float16):
        made, expected = (torch.full((out - 6, size), math.nan, dtype=dtype) for _ in range(2))
        dequantize(weight, 5, made, False)
        dequantize_reference(weight, 5, expected)
        # A code times a scale has 28 bits at most, so fp32 rounds it, and fp16 then perhaps the other way.
        off = (made.double() - expected.double()).abs()
        assert (off <= 0 if dtype == torch.float32 else off <= expected.double().abs() * 2**-10 + 2**-24).all()


def packed(values: Tensor, scales: Tensor) -> QuantizedWeight | None:
    return quantized_weight(Grouped(values.numpy(), scales.numpy()))


def test_grouped_codes_are_packed_with_and_without_zero_points() -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(6, 2, generator=generator).half().float() + 0.25
    for low, high, kind, zeros in (
        (-8, 7, "int4", False),
        (-15, 0, "int4", True),
        (-3, 12, "int4", True),
        (-9, 7, "int8", False),
        (-128, 127, "int8", False),
    ):
        values = torch.randint(low, high + 1, (6, 64), generator=generator, dtype=torch.int16)
        values[:, ::32], values[:, 1::32] = low, high
        made = packed(values, scales)
        assert made is not None
        assert (made.coding.kind, made.coding.zeros) == (kind, zeros)
        assert torch.equal(made.dequantized(), values.double() * scales.double().repeat_interleave(32, 1))
    assert packed(torch.full((6, 64), 128, dtype=torch.int16), scales) is None
    assert packed(values, scales[:, :1].repeat(1, 8)) is None, "groups of 8"
    assert packed(values[:, :40], scales[:, :1]) is None, "40 inputs"
    # Scales that need all their bits have no room for zero points.
    odd = torch.full((6, 2), 0.1)
    made = packed(torch.tensor([-3, 12] * 32, dtype=torch.int16).repeat(6, 1), odd)
    assert made is not None
    assert made.coding == Coding("int8", 32)


def test_fused_and_cut() -> None:
    """Check fusing and sharding: weights whose codings fit become one quantized weight with the same numbers, others
    stay apart; shards have the numbers of their part."""
    block = Coding("fp8", 32, outputs=8)
    parts = [random_quantized(block, out, 64, seed) for seed, out in enumerate((16, 12, 20))]
    symmetric, zeroed = (
        random_quantized(Coding("int4", 32), 8, 128),
        random_quantized(Coding("int4", 32, zeros=True), 4, 128, 1),
    )
    for group in (parts[:2], parts, [symmetric, zeroed]):
        fused = fuse(group)
        assert fused is not None
        whole = torch.cat([part.dequantized() for part in group])
        assert torch.equal(fused.dequantized(), whole)
        assert torch.equal(fused.shard(0, 1, 2).dequantized(), whole.chunk(2)[1])
        assert torch.equal(fused.shard(1, 0, 2).dequantized(), whole.chunk(2, 1)[0])
    fused = fuse(parts[:2])
    assert fused is not None
    assert fused.coding.outputs == 8, "16 outputs are whole blocks, so the scales of blocks stay"
    assert fuse([symmetric, random_quantized(Coding("int4", 64), 8, 128)]) is None
    assert fuse([parts[0], symmetric]) is None
    for coding in (Coding("int4", 32, minima="blocks"), Coding("int8", 32, minima="pairs")):
        minima = random_quantized(coding, 4, 512)
        whole = minima.dequantized()
        assert torch.equal(minima.shard(1, 1, 2).dequantized(), whole.chunk(2, 1)[1])
        assert torch.equal(minima.shard(0, 1, 2).dequantized(), whole.chunk(2)[1])
        assert fuse([minima, symmetric]) is None
        assert fuse([minima, zeroed]) is None
    with pytest.raises(ValueError, match="256 features are not world=2 shards of whole 256"):
        random_quantized(Coding("int4", 32, minima="blocks"), 4, 256).shard(1, 0, 2)
    with pytest.raises(ValueError, match="64 features are not world=4 shards of whole 32"):
        parts[0].shard(1, 0, 4)
    row = random_quantized(Coding("int8", 192), 4, 192)
    assert torch.equal(row.shard(1, 1, 2).dequantized(), row.dequantized().chunk(2, 1)[1]), "laid out in units anew"


def test_what_no_kernel_reads() -> None:
    for coding, size, unit in (
        (Coding("fp8", 128), 5120, 128),
        (Coding("fp8", 32), 5120, 64),
        (Coding("fp8", 96), 192, 32),
        (Coding("fp8", 72), 72, None),
        (Coding("int4", 128), 5120, 128),
        (Coding("int4", 32), 5120, 128),
        (Coding("int4", 32), 160, None),
        (Coding("int4", 96), 384, None),
        (Coding("int8", 160), 160, 32),
        (Coding("int4", 32, minima="blocks"), 5120, 128),
        (Coding("int4", 32, minima="blocks"), 128, None),
        (Coding("int8", 16, minima="blocks"), 256, 32),
        (Coding("int4", 16, minima="blocks"), 256, 64),
        (Coding("int4", 32, minima="pairs"), 64, 64),
        (Coding("int8", 32, minima="pairs"), 32, None),
    ):
        assert coding.unit(size) == unit


def words(codes: list[int], bits: int) -> int:
    """Pack the codes of two words into one register, the first word's in the low half."""
    return sum(code << bits * i for i, code in enumerate(codes))


def test_the_instructions_for_bytes() -> None:
    """Check the instructions that unpack bytes, for every code (but e4m3's two NaN) in every place."""
    int8 = torch.arange(256, dtype=torch.uint8).view(torch.int8)
    for text, table in ((_codes.FP8_BF16.value, E4M3.double()), (_codes.INT8_BF16.value, int8.double())):
        for code in (code for code in range(256) if code & 127 != 127 or text != _codes.FP8_BF16.value):
            others = [(code * 7 + 31 * i) % 127 for i in range(3)]
            for place in range(4):
                codes = [*others[:place], code, *others[place:]]
                made = execute(text, {"$2": words(codes, 8)})
                assert torch.equal(bf16_of([made["$0"]]), table[codes[::2]])
                assert torch.equal(bf16_of([made["$1"]]), table[codes[1::2]])


def test_the_instructions_for_int4() -> None:
    """Check the instructions that unpack INT4, for every code in every place with every zero point."""
    for code, zero in itertools.product(range(16), range(16)):
        codes = [(code + 3 * i + (i > 3)) % 16 for i in range(8)]
        zeros = [zero, 15 - zero]
        less = (-128 - torch.tensor(zeros)).bfloat16().view(torch.uint16).tolist()
        made = execute(_codes.INT4_BF16.value, {"$4": words(codes, 4), "$5": less[0] | less[1] << 16})
        for j in range(4):
            expected = torch.tensor([codes[j] - zeros[0], codes[4 + j] - zeros[1]]).double()
            assert torch.equal(bf16_of([made[f"${j}"]]), expected)


def test_the_instructions_for_e2m1() -> None:
    """Check the instructions that convert e2m1 codes, for every code at every place of a word."""
    for code in range(16):
        codes = [(code + 3 * i + (i > 3)) % 16 for i in range(8)]
        made = execute(_codes.E2M1_BF16.value, {"$4": words(codes, 4)})
        for j in range(4):
            expected = torch.tensor([e2m1(codes[j]), e2m1(codes[4 + j])]).double()
            assert torch.equal(bf16_of([made[f"${j}"]]), expected)


def test_every_operand_is_used() -> None:
    for text, count in (
        (_codes.FP8_BF16.value, 3),
        (_codes.INT8_BF16.value, 3),
        (_codes.INT4_BF16.value, 6),
        (_codes.E2M1_BF16.value, 5),
    ):
        assert {int(n) for n in re.findall(r"\$(\d)", text)} == set(range(count))


def test_mxfp4_is_packed_as_it_is() -> None:
    """Check that MXFP4 stays MXFP4 when it is packed and keeps its values, for every code with every scale."""
    exponents = torch.arange(253, dtype=torch.uint8)[:, None].repeat(1, 2)
    codes = torch.arange(16, dtype=torch.uint8).repeat(4).repeat(253, 1)
    raw = E2M1(codes.numpy(), exponents.numpy())
    made = quantized_weight(raw)
    assert made is not None
    assert made.coding == Coding("mxfp4", 32)
    expected = torch.tensor([e2m1(code) for code in range(16)]).double()[codes.long()]
    expected *= torch.ldexp(torch.ones(253, 1, dtype=torch.float64), exponents[:, :1].int() - 127)
    assert torch.equal(made.dequantized(), expected)
    assert torch.equal(torch.from_numpy(raw.grouped().numbers()).double(), expected)
    small = torch.full((2, 64), math.nan)
    dequantize(made, 0, small, False)
    assert torch.equal(small.double(), made.dequantized()[:2])
    whole = fuse([made, made])
    assert whole is not None
    assert torch.equal(whole.split(2)[1].dequantized(), made.dequantized())
    values, scales = torch.ones(253, 64, dtype=torch.int8), torch.ones(253, 2)
    int4 = quantized_weight(Grouped(values.numpy(), scales.numpy()))
    assert int4 is not None
    assert fuse([made, int4]) is None
