"""Top-k, top-p and min-p against sorts: exact, ties included, row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.verify.thresholds import apply_coarse_top_k_top_p, apply_min_p, apply_top_k_top_p, descending_keys
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from verify.reference import keep_top_k, keep_top_p

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def rows(draw: Any, dtype: torch.dtype) -> torch.Tensor:
    """Draw logits `[1, V]` with many ties, neighbouring floats, zeros of both signs, tiny and huge values, and -inf."""
    special = [0.0, -0.0, 1.0, float(np.nextafter(np.float32(1), np.float32(2))), -1.0, 1e-40, -1e-40, 1e30, -math.inf]
    near = st.floats(-20, 20, width=32)  # float64 keys drop the last bit
    values = draw(st.lists(st.one_of(st.sampled_from(special), near), min_size=1, max_size=24))
    repeated = values + draw(st.lists(st.sampled_from(values), max_size=24))
    if all(math.isinf(v) for v in repeated):
        repeated[0] = 0.0
    return torch.tensor([repeated], dtype=dtype)


def column(value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[value]], dtype=dtype)


def kept(logits: torch.Tensor, filtered: torch.Tensor) -> list[bool]:
    """Return which logits the filter keeps. Checks that the kept logits have the same bits as before."""
    mask = filtered != -torch.inf
    assert torch.equal(torch.where(mask, logits, 0.0), torch.where(mask, filtered, 0.0))
    return [bool(m) for m in mask[0]]


def finite(logits: torch.Tensor, mask: np.ndarray) -> list[bool]:
    return [bool(m) for m in mask & (logits[0].numpy() != -np.inf)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=st.data())
@SETTINGS
def test_top_k_is_the_kth_largest_of_a_sort(dtype: torch.dtype, data: st.DataObject) -> None:
    logits = data.draw(rows(dtype))
    k = data.draw(st.integers(1, logits.shape[1] + 3))
    expected = keep_top_k(logits[0].numpy().astype(np.float64), k)
    assert kept(logits, apply_top_k_top_p(logits, column(k, dtype), None)) == finite(logits, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=st.data())
@SETTINGS
def test_top_p_is_the_shortest_head_of_a_sort(dtype: torch.dtype, data: st.DataObject) -> None:
    logits = data.draw(rows(dtype))
    p = float(np.float32(data.draw(st.one_of(st.floats(0.001, 0.999), st.sampled_from([0.25, 0.5, 0.75])))))
    k = data.draw(st.integers(0, logits.shape[1] + 1))
    x = logits[0].numpy().astype(np.float64)
    probs = logits.softmax(dim=-1)[0].numpy().astype(np.float64)
    if k:
        head = keep_top_k(x, k)
        x, probs = np.where(head, x, -np.inf), np.where(head, probs, 0.0)
    # A sum within rounding of the target may be cut on either side.
    expected = [finite(logits, keep_top_p(x, p * (1 + e), probs) & (x != -np.inf)) for e in (-1e-13, 0.0, 1e-13)]
    filtered = apply_top_k_top_p(logits, column(k or math.inf, dtype), column(p, dtype))
    assert kept(logits, filtered) in expected
    if not k:
        assert torch.equal(filtered, apply_top_k_top_p(logits, None, column(p, dtype)))


@given(data=st.data())
@SETTINGS
def test_sums_that_are_exact_are_cut_at_equality(data: st.DataObject) -> None:
    """Check sums that are exact, of powers of two: every comparison with the target is exact, and equality counts as
    reached."""
    n = data.draw(st.integers(2, 12))
    order = data.draw(st.permutations(range(n)))
    logits = torch.tensor([[-math.log(2.0) * min(i + 1, n - 1) for i in order]], dtype=torch.float64)
    m = data.draw(st.integers(1, n - 2)) if n > 2 else 1
    at = apply_top_k_top_p(logits, None, column(1 - 0.5**m - 1e-9, torch.float64))
    above = apply_top_k_top_p(logits, None, column(1 - 0.5**m + 1e-9, torch.float64))
    assert sum(kept(logits, at)) == (m if m < n - 1 else n)
    assert sum(kept(logits, above)) == (m + 1 if m + 1 < n - 1 else n)


@given(data=st.data())
@SETTINGS
def test_min_p_keeps_what_is_probable_enough(data: st.DataObject) -> None:
    logits = data.draw(rows(torch.float64))
    min_p = data.draw(st.floats(1e-6, 1.0))
    weight = np.exp((logits[0] - logits[0].max()).numpy())
    expected = [finite(logits, weight >= min_p * (1 + e)) for e in (-1e-14, 0.0, 1e-14)]
    assert kept(logits, apply_min_p(logits, column(min_p, torch.float64).log())) in expected


def test_equal_logits_share_their_fate() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 2.0], [0.0, -0.0, -1.0, 0.0, -0.0, -2.0]])
    top_2 = apply_top_k_top_p(logits, torch.full((2, 1), 2.0), None)
    assert [kept(logits[i : i + 1], top_2[i : i + 1]) for i in range(2)] == [
        [False, True, True, True, False, True],
        [True, True, False, True, True, False],
    ]
    half = apply_top_k_top_p(torch.zeros((1, 8)), None, torch.full((1, 1), 0.5))
    assert torch.equal(half, torch.zeros((1, 8)))


@pytest.mark.parametrize("vocab_size", [211, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_agrees_with_transformers(vocab_size: int, dtype: torch.dtype) -> None:
    logits = (torch.randn((24, vocab_size), generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    full = torch.ones((24, 1), dtype=dtype)
    for k in (1, 2, 7, 50, vocab_size, 10**6):
        assert torch.equal(apply_top_k_top_p(logits, full * k, None), TopKLogitsWarper(k)(None, logits))
    top_20 = TopKLogitsWarper(20)(None, logits)
    for p in (0.1, 0.5, 0.9, 0.99):
        for k, given_logits in ((None, logits), (full * 20, top_20)):
            theirs = TopPLogitsWarper(p)(None, given_logits)
            clear = clear_of(1 - p, given_logits.double().softmax(dim=-1).sort().values.cumsum(dim=-1), dtype)
            assert torch.equal(apply_top_k_top_p(logits, k, full * p)[clear], theirs[clear])
    for p in (0.001, 0.05, 0.5, 1.0):
        clear = clear_of(p, (logits.double() - logits.double().amax(dim=-1, keepdim=True)).exp(), dtype)
        assert torch.equal(apply_min_p(logits, (full * p).log())[clear], MinPLogitsWarper(p)(None, logits)[clear])


def clear_of(target: float, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return which rows of `values` `[N, V]` (float64) have no value within rounding of `target`, so that two orders of
    a sum cut alike. V roundings are allowed; a value equal to the target is allowed. The result is `[N]`."""
    gap = (values - target).abs()
    clear: torch.Tensor = ((gap > values.shape[-1] * torch.finfo(dtype).eps * target) | (gap == 0)).all(dim=-1)
    assert clear.double().mean() > 0.9
    return clear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("apply", [apply_top_k_top_p, apply_coarse_top_k_top_p])
def test_a_row_does_not_depend_on_its_batch(apply: Any, dtype: torch.dtype) -> None:
    """Check bit for bit that a row does not depend on its batch, for a vocabulary that fits no vector width, with
    parameters per row."""
    g = torch.Generator().manual_seed(1)
    logits = (torch.randn((40, 211), generator=g) * 3).to(dtype)
    off = torch.arange(40)[:, None]
    top_k = torch.where(off % 3 == 0, math.inf, torch.randint(1, 211, (40, 1), generator=g).to(dtype))
    top_p = torch.where(off % 4 == 0, math.inf, torch.rand((40, 1), generator=g).to(dtype).clamp(0.01, 0.99))
    whole = apply(logits, top_k, top_p)
    for i in range(40):
        row = slice(i, i + 1)
        alone = apply(
            logits[row].clone(),
            None if top_k[i].isinf() else top_k[row],
            None if top_p[i].isinf() else top_p[row],
        )
        assert torch.equal(whole[row], alone), i
    assert torch.equal(whole[off[:, 0] % 12 == 0], logits[off[:, 0] % 12 == 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=st.data())
@SETTINGS
def test_keys_have_the_order_of_floats(dtype: torch.dtype, data: st.DataObject) -> None:
    x = data.draw(rows(dtype))[0]
    keys = descending_keys(x)
    assert torch.equal(keys[:, None] < keys, x[:, None] > x)
    assert torch.equal(keys[:, None] == keys, x[:, None] == x)


def test_the_coarse_cut_lies_within_its_grid() -> None:
    g = torch.Generator().manual_seed(2)
    logits = torch.randn((200, 512), generator=g) * 4
    top_k = torch.randint(1, 100, (200, 1), generator=g).float()
    top_p = torch.rand((200, 1), generator=g).clamp(0.05, 0.99)
    for k, p in ((top_k, None), (None, top_p), (top_k, top_p)):
        exact, coarse = (f(logits, k, p) != -torch.inf for f in (apply_top_k_top_p, apply_coarse_top_k_top_p))
        if p is None or k is None:
            assert (coarse | ~exact).all()
        last = torch.where(exact, logits, torch.inf).amin(dim=-1, keepdim=True)
        assert (logits[coarse & ~exact] >= (last - 1 / 32 - 1e-5).expand_as(logits)[coarse & ~exact]).all()
        assert (coarse ^ exact).float().mean() < 0.01


@pytest.mark.parametrize("apply", [apply_top_k_top_p, apply_coarse_top_k_top_p])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_without_a_distribution_raise_nothing_and_touch_no_neighbour(apply: Any, bad: float) -> None:
    logits = torch.randn((3, 64), generator=torch.Generator().manual_seed(3))
    k, p = torch.full((3, 1), 5.0), torch.full((3, 1), 0.9)
    before = apply(logits, k, p)
    broken = logits.clone()
    broken[1] = bad
    broken[1, 3] = math.nan if bad == math.inf else bad
    after = apply(broken, k, p)
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_other_dtypes_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"logits: dtype torch\.bfloat16; must be torch\.float32 or torch\.float64"):
        apply_top_k_top_p(torch.zeros((1, 4), dtype=torch.bfloat16), torch.ones((1, 1)), None)
