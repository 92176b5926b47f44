"""The gated activation against math.exp."""

import math

import pytest
import torch
from specrs.kernels.activation import clamped_swiglu, silu_and_mul


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


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 3e-2)]
)
def test_clamped_matches_formula(dtype: torch.dtype, tolerance: float) -> None:
    alpha, limit = 1.5, 2.0
    x = (torch.randn(3, 2 * 123) * 4).to(dtype)
    before = x.clone()
    out = clamped_swiglu(x, alpha, limit)
    for row, result in zip(before.tolist(), out.tolist(), strict=True):
        pairs = [(min(g, limit), max(-limit, min(u, limit))) for g, u in zip(row[:123], row[123:], strict=True)]
        expected = [g / (1 + math.exp(-alpha * g)) * (u + 1) for g, u in pairs]
        assert result == pytest.approx(expected, rel=tolerance, abs=tolerance)
    assert torch.equal(x, before)
    assert out.dtype == dtype
    assert out.is_contiguous()
