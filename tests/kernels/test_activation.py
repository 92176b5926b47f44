"""The gated activation against math.exp."""

import math

import pytest
import torch
from specrs.kernels.activation import silu_and_mul


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("size", [1, 123])
def test_matches_formula(size: int, dtype: torch.dtype, tolerance: float) -> None:
    x = (torch.randn(3, 2 * size) * 4).to(dtype)
    before = x.clone()
    out = silu_and_mul(x)
    for row, result in zip(before.tolist(), out.tolist(), strict=True):
        expected = [g / (1 + math.exp(-g)) * u for g, u in zip(row[:size], row[size:], strict=True)]
        assert result == pytest.approx(expected, rel=tolerance, abs=tolerance)
    assert torch.equal(x, before)
    assert out.dtype == dtype
    assert out.is_contiguous()
