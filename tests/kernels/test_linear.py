"""Laid-out weights against float64 products, in every layout and at every row count that is treated differently."""

import pytest
import torch
from specrs.kernels import linear as kernel
from specrs.kernels.linear import linear, pack

from kernels.cuda.tolerance import assert_same_product

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(5, 3), (160, 96), (2048, 256)])
@pytest.mark.parametrize("rows", [1, 2, 6, 32, 33, 47, 48])
@pytest.mark.parametrize("with_bias", [False, True])
def test_matches_float64(shape: tuple[int, int], rows: int, with_bias: bool, dtype: torch.dtype) -> None:
    weight, x = torch.randn(shape).to(dtype), torch.randn(rows, shape[1]).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if with_bias else None
    before = x.clone()
    out = linear(x, pack(weight, bias))
    expected = torch.einsum("ni,oi->no", x.double(), weight.double())
    if bias is not None:
        expected += bias.double()
    assert out.dtype == dtype
    assert out.shape == (rows, shape[0])
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * shape[1] ** 0.5)
    assert torch.equal(x, before)


def test_a_sum_in_place_stays_in_place() -> None:
    """Padded rows are cut off by a view; adding the residual to it must not need them."""
    x, h = torch.randn(33, 8), torch.randn(33, 4)
    w = pack(torch.randn(4, 8))
    y = linear(x, w)
    expected = y + h
    assert torch.equal(y.add_(h), expected)


def test_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(7, 5), torch.randn(3, 5)
    with_packing = linear(x, pack(weight))
    monkeypatch.setattr(kernel, "_linear_packed", None)
    w = pack(weight)
    assert w.packed is None
    assert_same_product(linear(x, w), with_packing, x, weight)


def test_large_weights_are_held_once() -> None:
    w = pack(torch.randn(1024, 1024))  # 2^20 elements
    assert (w.plain is None) != (w.packed is None)
