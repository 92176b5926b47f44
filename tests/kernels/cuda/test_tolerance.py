"""The bound between two sums of the same products holds for every order, and not for another product."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from .tolerance import apart, assert_argmax, assert_same_product


def operands(k: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, k, generator=generator), torch.randn(7, k, generator=generator)


def in_order(x: Tensor, weight: Tensor, order: Tensor) -> Tensor:
    """Return `x W^T`, summed one product after the other in the given order."""
    out = torch.zeros(x.shape[0], weight.shape[0])
    for i in order.tolist():
        out += x[:, i, None] * weight[:, i]
    return out


@settings(max_examples=25, deadline=None)
@given(k=st.integers(1, 200), seed=st.integers(0, 2**31), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_any_order_is_within_it(k: int, seed: int, scale: float) -> None:
    x, weight = operands(k, seed)
    x[:, ::3] *= scale  # cancellation, and products that are lost next to larger ones
    shuffled = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    a, b = (in_order(x, weight, order) for order in (torch.arange(k), shuffled))
    assert_same_product(a, b, x, weight)
    assert_same_product(a, x @ weight.t(), x, weight)
    assert_argmax(a.argmax(dim=1), a.amax(dim=1), b, x, weight)


@pytest.mark.parametrize("k", [5, 40, 200])
def test_a_product_too_few_is_beyond_it(k: int) -> None:
    x, weight = operands(k, k)
    whole = x @ weight.t()
    for i in range(k):
        without = torch.cat((x[:, :i], x[:, i + 1 :]), 1) @ torch.cat((weight[:, :i], weight[:, i + 1 :]), 1).t()
        with pytest.raises(AssertionError, match="beyond what the order of a sum explains"):
            assert_same_product(without, whole, x, weight)


def test_the_second_largest_is_beyond_it() -> None:
    x, weight = operands(40, 0)
    logits = x @ weight.t()
    top, ids = logits.topk(2, dim=1)
    assert_argmax(ids[:, 0], top[:, 0], logits, x, weight)
    with pytest.raises(AssertionError, match="ids"):
        assert_argmax(ids[:, 1], top[:, 0], logits, x, weight)
    with pytest.raises(AssertionError, match="expected"):
        assert_argmax(ids[:, 0], top[:, 1], logits, x, weight)
    tie = weight.clone()
    tie[ids[0, 1]] = weight[ids[0, 0]]  # either id is right, whatever the last bits
    both = x[:1] @ tie.t()
    for column in range(2):
        assert_argmax(ids[:1, column], top[:1, 0], both, x[:1], tie)


def test_it_is_a_few_roundings_wide() -> None:
    assert apart(torch.ones(1, 64), torch.ones(1, 64)).item() == pytest.approx(64 * 64 * 2**-23, rel=1e-5)
