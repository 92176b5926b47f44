"""Rows rounded to FP8: by the definition, by the reference and by the interpreted kernel."""

import math
from bisect import bisect_left
from itertools import pairwise

import pytest
import torch
from specrs.kernels.coding import Coding
from specrs.kernels.cuda.fp8_rows import quantize_rows, round_rows
from specrs.kernels.quantized_weight import QuantizedWeight, fp8_rows
from torch import Tensor

NUMBERS: list[float] = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
"""Values of the e4m3 codes 0 to 126, ascending."""


def rows_of(groups: int, group: int) -> Tensor:
    """Return 12 rows, each of `groups` groups of `group` elements. First groups of rows are special: halfway between
    two FP8 codes, zeros, a largest element at, above or below the limit of FP8, infinity and NaN. Others are random."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, groups, group, generator=generator)
    x *= 2.0 ** torch.randint(-20, 20, (12, groups, 1), generator=generator)
    middles = torch.tensor([(one + other) / 2 for one, other in pairwise(NUMBERS)], dtype=torch.float64)
    x[0, 0] = middles[torch.randint(0, 126, (group,), generator=generator)].float()
    x[0, 0, 0] = 448
    x[1, 0] = 0
    for row, largest in enumerate((448.0, 449.0, 447.0, 224.0, 0.875 * 2**30, 2.0**-126, 3e38), 2):
        x[row, 0] = torch.linspace(-1, 1, group) * largest
    x[9, 0, 1], x[9, 0, 2], x[9, 0, 3] = math.inf, -math.inf, math.nan
    return x.view(12, groups * group)


def defined(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return codes' numbers and scales of bf16 or fp32 rows by the definition, element by element, in float64."""
    groups = -(-x.shape[1] // group)
    made, scales = torch.empty(x.shape, dtype=torch.float64), torch.empty(len(x), groups, dtype=torch.float64)
    for row, values in enumerate(x.double().tolist()):
        for g in range(groups):
            own = values[g * group : (g + 1) * group]
            largest, power = max((abs(v) for v in own if math.isfinite(v)), default=0.0), -100
            while largest / 2.0**power > 448:
                power += 1
            scales[row, g] = 2.0**power
            rounded = [0.0] * len(own)
            for i, v in enumerate(own):
                size, sign = abs(v) / 2.0**power, math.copysign(1, v)
                rounded[i] = sign * nearest(size) * 2.0**power if math.isfinite(v) else math.nan
            made[row, g * group : (g + 1) * group] = torch.tensor(rounded, dtype=torch.float64)
    return made, scales


def nearest(size: float) -> float:
    """Return the element of `NUMBERS` nearest to `size`; of two, the one with the even code."""
    above = min(bisect_left(NUMBERS, size), len(NUMBERS) - 1)
    near = [(abs(NUMBERS[code] - size), code % 2, code) for code in (above - 1, above) if code >= 0]
    return NUMBERS[min(near)[2]]


@pytest.mark.parametrize(("groups", "group", "unit"), [(1, 96, 32), (3, 128, 128), (5, 64, 64), (2, 32, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows(groups: int, group: int, unit: int, dtype: torch.dtype) -> None:
    x = rows_of(groups, group).to(dtype)
    numbers, scales = defined(x, group)
    codes, own = fp8_rows(x, group)
    assert torch.equal(own.double(), scales)
    spread = scales.repeat_interleave(group, 1)
    assert torch.equal((codes.double() * spread).nan_to_num(-1.5), numbers.nan_to_num(-1.5))

    rounded = torch.full_like(x, -1.5)
    round_rows(x, group, rounded, False)
    assert torch.equal(rounded.double().nan_to_num(-1.5), numbers.nan_to_num(-1.5))
    assert torch.equal(rounded.signbit()[numbers == 0], x.signbit()[numbers == 0])
    if group % unit:
        return
    made, places = torch.empty(x.shape, dtype=torch.uint8), torch.full((groups, len(x) + 3), -1.5)
    quantize_rows(x, group, unit, made, places, False)
    assert torch.equal(places[:, : len(x)].t().double(), scales)
    assert (places[:, len(x) :] == -1.5).all()
    coding = Coding("fp8", group)
    if coding.unit(x.shape[1]) == unit:
        weight = QuantizedWeight.of(codes.view(torch.uint8), scales.float(), coding)
        expected = weight.codes.view(torch.uint8)
        assert torch.equal(made & 0x7F, expected & 0x7F)
        assert ((made == expected) | (made & 0x7F == 0x7F)).all()
