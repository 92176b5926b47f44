"""Kernels for experts, interpreted: the choice per row, the order of pairs, and the weighted sum of experts'
outputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.kernels.cuda.experts import (
    add_pairs,
    add_pairs_reference,
    route,
    route_reference,
    sort_pairs,
    sort_pairs_reference,
    weigh_inputs,
)
from torch import Tensor

from .tolerance import assert_near


def choices(rows: int, experts: int, each: int, seed: int) -> Tensor:
    """Return choices of experts, `[N, k]` int32, distinct in a row; some rows have none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:each] for _ in range(rows)]).int()
    ids[torch.rand(rows, generator=generator) < 0.2] = -1
    return ids


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 5),
    experts=st.integers(1, 20),
    each=st.integers(1, 9),
    normalize=st.booleans(),
    tied=st.booleans(),
    scaled=st.booleans(),
    routing=st.sampled_from(["softmax", "sigmoid", "biased sigmoid"]),
    factor=st.sampled_from([1.0, 2.5]),
)
def test_route(
    rows: int, experts: int, each: int, normalize: bool, tied: bool, scaled: bool, routing: str, factor: float
) -> None:
    each = min(each, experts)
    logits = torch.randn(rows, experts + 3, generator=torch.Generator().manual_seed(rows * experts))[:, :experts] * 3
    if tied:
        logits = logits.round()
    positions = torch.arange(rows) - 1  # the first row is masked
    ids, shares = torch.full((rows, each), -9, dtype=torch.int32), torch.full((rows, each), torch.nan)
    scales = torch.randn(experts) if scaled else None
    sigmoid, bias = routing != "softmax", torch.randn(experts) if routing.startswith("biased") else None
    rules = [normalize, sigmoid, False], scales, bias, factor
    route(logits, positions, ids, shares, *rules)
    expected = torch.empty_like(ids), torch.empty(rows, each, dtype=torch.float64)
    route_reference(logits, positions, *expected, *rules)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(shares.double(), expected[1], rtol=1e-5, atol=1e-7)


def test_a_row_with_nan_is_sent_to_different_experts() -> None:
    """Check that a row with NaN is sent to distinct, existing experts, so that nothing is read past them and no expert
    has more pairs than rows."""
    logits = torch.randn(3, 6)
    logits[1, 2:] = torch.nan
    logits[2] = torch.nan
    ids, shares = torch.empty(3, 4, dtype=torch.int32), torch.empty(3, 4)
    for bias in (None, torch.zeros(6)):
        rules = [True, bias is not None, False], None, bias
        route(logits, torch.zeros(3, dtype=torch.int64), ids, shares, *rules)
        for row in ids.tolist():
            assert len(set(row)) == 4
            assert set(row) <= set(range(6))
        assert shares[0].isfinite().all()
        assert shares[1:].isnan().all()


@settings(max_examples=15, deadline=None)
@given(rows=st.sampled_from([1, 3, 40, 300]), experts=st.integers(1, 9), each=st.integers(1, 4), seed=st.integers(0, 9))
def test_sort_pairs(rows: int, experts: int, each: int, seed: int) -> None:
    ids = choices(rows, experts, min(each, experts), seed)
    made = [torch.full((size,), -7, dtype=torch.int32) for size in (ids.numel(), experts + 1)]
    expected = [tensor.clone() for tensor in made]
    sort_pairs(ids, *made, False)
    sort_pairs_reference(ids, *expected)
    assert torch.equal(made[1], expected[1])
    assert torch.equal(made[0], expected[0])


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("has_shared", ["no", "gated", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_add_pairs(dtype: torch.dtype, has_shared: str, weighted: bool) -> None:
    """Check the sum, weighted and plain, and the output of a shared expert, with large gates of both signs and without.
    Pairs without an expert, and shared experts of rows without any, hold NaN, which must not be read."""
    ids = choices(9, 6, 3, 1)
    x = torch.randn(27, 1100, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[ids.flatten() < 0] = torch.nan
    shares: Tensor | None = None
    if weighted:
        shares = torch.rand(9, 3).masked_fill(ids < 0, torch.nan)
    out, exact = torch.full((9, 1100), torch.nan, dtype=dtype), torch.empty(9, 1100, dtype=torch.float64)
    shared: list[Tensor] = []
    if has_shared != "no":
        generator = torch.Generator().manual_seed(2)
        shared = [torch.randn(shape, generator=generator).to(dtype) for shape in ((9, 1100), (1100,), (9, 1100))]
        shared[0][ids[:, 0] < 0] = shared[2][ids[:, 0] < 0] = torch.nan
        gates = (shared[0].double() @ shared[1].double())[ids[:, 0] >= 0]
        assert gates.min() < -20 < 20 < gates.max()
    if has_shared == "plain":
        del shared[:2]
    add_pairs(x, ids, shares, shared, out, False)
    add_pairs_reference(x, ids, shares, shared, exact)
    parts = x.view(9, 3, -1) if shares is None else x.view(9, 3, -1) * shares.to(dtype)[:, :, None]
    own = torch.where((ids >= 0)[:, :, None], parts, 0).sum(1)
    if shared:
        part = shared[-1] * (torch.sigmoid(shared[0] @ shared[1])[:, None] if len(shared) > 1 else 1)
        own += torch.where(ids[:, :1] >= 0, part, 0)
    assert_near(out, exact, own)
    assert (ids < 0).any()
    assert not out[ids[:, 0] < 0].any()


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weigh_inputs(dtype: torch.dtype, each: int) -> None:
    """Check inputs of experts times their shares. Rows of pairs without an expert are not written."""
    ids, width = choices(9, 6, each, 1), 1100
    x = torch.randn(9, width + 3, generator=torch.Generator().manual_seed(0)).to(dtype)[:, :width]
    shares, out = torch.rand(9, each), torch.full((9 * each, width), torch.nan, dtype=dtype)
    weigh_inputs(x, ids, shares, out, False)
    there = ids.flatten() >= 0
    exact = (x.double()[:, None] * shares.double()[:, :, None]).flatten(0, 1)
    assert out[there].equal(exact.to(dtype)[there])
    assert out[~there].isnan().all()
    assert not there.all()
