"""FP8 codes of K and V, against a table of every code's number."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.kernels.kv_codes import FRACTIONS, encode, fraction_of
from torch import Tensor

BIAS = {3: 7, 2: 15}


def worth(code: int, fraction: int) -> float:
    """Return the number of a code below 128, by the definition of 8-bit floats (Micikevicius et al. 2022)."""
    exponent, rest = divmod(code, 1 << fraction)
    if exponent == 0:
        return math.ldexp(rest, 1 - BIAS[fraction] - fraction)
    return math.ldexp(rest + (1 << fraction), exponent - BIAS[fraction] - fraction)


def table(fraction: int) -> list[float]:
    """Return the numbers of the finite non-negative codes, ascending. The last code of e4m3 is NaN; the last four of
    e5m2 are infinity and NaN."""
    return [worth(code, fraction) for code in range(127 if fraction == 3 else 124)]


def nearest(x: float, fraction: int) -> int:
    """Return the code whose number is nearest to `x`, found by search; of two equally near codes, the even one."""
    values = table(fraction)
    size = min(abs(x), values[-1])
    code = min(range(len(values)), key=lambda i: (abs(values[i] - size), i % 2))
    return code | 0x80 * (math.copysign(1, x) < 0)


def bits(x: Tensor) -> list[int]:
    return x.view(torch.uint8).tolist()


@pytest.mark.parametrize("codes", FRACTIONS)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40),
    scale=st.sampled_from([1.0, 0.125, 0.0173, 300.0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_the_nearest_code(codes: torch.dtype, values: list[float], scale: float, dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # One rounding of a quotient, which is the rule; to float32 first where torch converts float64 by way of it.
    exact = (x.to(wide) / scale).float().tolist()
    assert bits(encode(x, scale, codes)) == [nearest(value, FRACTIONS[codes]) for value in exact]


@pytest.mark.parametrize("codes", FRACTIONS)
def test_ties_and_ends(codes: torch.dtype) -> None:
    """Check the rounding of values halfway between every two codes, of values just below and above, and of NaN and
    infinity."""
    values = torch.tensor(table(FRACTIONS[codes]), dtype=torch.float64)
    halves = (values[1:] + values[:-1]) / 2
    for x in (values, halves, halves * (1 - 2**-12), halves * (1 + 2**-12)):
        for signed in (x, -x):
            assert bits(encode(signed.float(), 1.0, codes)) == [nearest(v, FRACTIONS[codes]) for v in signed.tolist()]
    most = torch.finfo(codes).max
    ends = encode(torch.tensor([torch.inf, -torch.inf, 1e38, torch.nan]), 0.5, codes).double()
    assert ends[:3].tolist() == [most, -most, most]
    assert ends[3].isnan()


def test_what_has_no_scale() -> None:
    assert {dtype: fraction_of(dtype) for dtype in (*FRACTIONS, torch.bfloat16, torch.float32)} == {
        **FRACTIONS,
        torch.bfloat16: 0,
        torch.float32: 0,
    }
