"""Products of dense weights against float64 ones."""

import pytest
import torch
from specrs.kernels.linear import DenseWeight, dense_weight, linear

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(5, 3), (160, 96), (2048, 256)])
@pytest.mark.parametrize("rows", [1, 6, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_matches_float64(shape: tuple[int, int], rows: int, with_bias: bool, dtype: torch.dtype) -> None:
    weight, x = torch.randn(shape).to(dtype), torch.randn(rows, shape[1]).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if with_bias else None
    before = x.clone()
    out = linear(x, dense_weight(weight, bias))
    expected = torch.einsum("ni,oi->no", x.double(), weight.double())
    if bias is not None:
        expected += bias.double()
    assert out.dtype == dtype
    assert out.shape == (rows, shape[0])
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * shape[1] ** 0.5)
    assert torch.equal(x, before)


def test_a_weight_knows_its_bytes_and_shape() -> None:
    weight, bias = torch.randn(64, 32), torch.randn(64)
    stored = dense_weight(weight, bias)
    assert (stored.num_bytes, stored.shape) == (4 * (64 * 32 + 64), (64, 32))
    assert stored.weight.data_ptr() == weight.data_ptr(), "nothing is copied"
    assert stored.dequantized().equal(weight.double())


def test_strides_do_not_matter() -> None:
    weight, x = torch.randn(32, 64), torch.randn(3, 32)
    stored = dense_weight(weight.t())
    assert stored.weight.is_contiguous()
    assert linear(x, stored).equal(linear(x, DenseWeight(weight.t().contiguous())))
