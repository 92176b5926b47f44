"""RMSNorm against sums of Python floats, and against transformers' module bit by bit."""

import math

import pytest
import torch
from specrs.kernels.rms_norm import rms_norm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

EPS = 1e-6


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(1, 5), (3, 123), (2, 4, 48)])
@pytest.mark.parametrize("inplace", [False, True])
def test_matches_formula(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, inplace: bool) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    weight = torch.randn(shape[1:]).to(dtype)  # one weight, or one per head
    original = x.clone()
    out = rms_norm(x, weight, EPS, inplace=inplace)
    weights = weight.expand(shape).reshape(-1, shape[-1]).tolist()
    rows = zip(original.view(-1, shape[-1]).tolist(), weights, out.reshape(-1, shape[-1]).tolist(), strict=True)
    for row, w, result in rows:
        root = math.sqrt(sum(v * v for v in row) / len(row) + EPS)
        assert result == pytest.approx(
            [v / root * g for v, g in zip(row, w, strict=True)], rel=tolerance, abs=tolerance
        )
    assert out.dtype == dtype
    if inplace:
        assert out.data_ptr() == x.data_ptr()
    else:
        assert torch.equal(x, original)


def test_inplace_on_a_slice_leaves_the_rest() -> None:
    x = torch.randn(3, 8, 16)
    before = x.clone()
    expected = rms_norm(x[:, :5].clone(), torch.ones(5, 16), EPS)
    rms_norm(x[:, :5], torch.ones(5, 16), EPS, inplace=True)
    # Sums of rows that lie apart may be taken in another order.
    bound = x.shape[-1] * torch.finfo(x.dtype).eps
    torch.testing.assert_close(x[:, :5], expected, rtol=bound, atol=0)
    assert torch.equal(x[:, 5:], before[:, 5:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    """Check RMSNorm bit by bit against transformers. A norm is computed in fp32 even in a float64 model, and both sum a
    row by the same torch operator."""
    module = Qwen3RMSNorm(96, eps=EPS).to(dtype)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(7, 96).to(dtype)
    with torch.no_grad():
        assert torch.equal(rms_norm(x, module.weight, EPS), module(x))


def test_zeros_stay_finite() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 4), torch.ones(4), EPS), torch.zeros(2, 4))
