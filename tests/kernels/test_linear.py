"""Laid-out weights against float64 products, in every layout and at every row count that is treated differently."""

import pytest
import torch
from specrs.kernels import linear as kernel
from specrs.kernels.linear import DenseWeight, PackedWeight, Weight, linear, pack
from torch import Tensor

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
    assert isinstance(w, DenseWeight)
    assert_same_product(linear(x, w), with_packing, x, weight)


PACKS = pytest.mark.skipif(kernel._linear_packed is None, reason="this build of torch has no packed products")


def kinds(shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None) -> list[Weight]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    dense = DenseWeight(weight, bias)
    return [dense, pack(weight, bias)]


@PACKS
def test_a_weight_knows_its_bytes_and_shape() -> None:
    large, small = torch.randn(1024, 1024), torch.randn(64, 32)
    bias = torch.randn(64)
    for w, held in (
        (DenseWeight(small, bias), 4 * (64 * 32 + 64)),
        (pack(large), 4 * 2**20),  # 2^20 elements: held once
        (pack(small, bias), 4 * (2 * 64 * 32 + 64)),  # small: in both layouts
        (pack(small.double(), bias.double()), 8 * (64 * 32 + 64)),
    ):
        assert w.num_bytes == held
    assert pack(small).shape == DenseWeight(small).shape == (64, 32)
    stored = DenseWeight(large)
    assert stored.weight.data_ptr() == large.data_ptr()


def test_no_kind_loses_a_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        dense, packed = kinds((48, 80), dtype, None)
        assert dense.dequantized().dtype == torch.float64
        assert packed.dequantized().equal(dense.dequantized())


@PACKS
def test_packed_is_what_a_cpu_gets() -> None:
    assert isinstance(pack(torch.randn(8, 8)), PackedWeight)
    assert isinstance(pack(torch.randn(8, 8).double()), DenseWeight)
