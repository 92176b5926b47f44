"""A fingerprint of weights changes with any write, however it is made, and not with their place in memory."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.integrations import fingerprint as module
from specrs.integrations.fingerprint import fingerprint
from torch import Tensor

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pieces of a tensor small, so that its hash has several pieces, and sums of sums."""
    monkeypatch.setitem(module._PIECE, "cpu", 4)


def tensor(dtype: torch.dtype, count: int) -> Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(count)) * 50).to(dtype)


@pytest.mark.usefixtures("small_pieces")
@settings(max_examples=150, deadline=None)
@given(dtype=st.sampled_from(DTYPES), count=st.integers(1, 150), data=st.data())
def test_any_flipped_bits_are_seen(dtype: torch.dtype, count: int, data: st.DataObject) -> None:
    x = tensor(dtype, count)
    before = fingerprint([x])
    at = data.draw(st.sets(st.integers(0, x.nbytes * 8 - 1), min_size=1))
    raw = x.view(torch.uint8)
    for bit in at:
        raw[bit // 8] ^= 1 << bit % 8
    assert fingerprint([x]) != before
    for bit in at:
        raw[bit // 8] ^= 1 << bit % 8
    assert fingerprint([x]) == before


@pytest.mark.parametrize("dtype", DTYPES[:4])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 1000, 2**16 + 5])
def test_signs_alone_are_seen(dtype: torch.dtype, count: int) -> None:
    """Check that changed signs alone are noticed: all, every second one, the last. A product modulo 2^64 would lose the
    highest bits."""
    x = tensor(dtype, count)
    seen = {fingerprint([x])}
    for where in (slice(None), slice(None, None, 2), slice(1, None, 2), slice(-1, None)):
        y = x.clone()
        y[where].neg_()
        if not y.equal(x):
            seen.add(fingerprint([y]))
    distinct = 4 if count > 2 else count + 1 if count == 2 else 2
    assert len(seen) >= distinct


@pytest.mark.usefixtures("small_pieces")
def test_every_two_rows_can_be_told_apart() -> None:
    x = tensor(torch.float32, 24 * 6).view(24, 6)
    swapped = set()
    for i, j in itertools.combinations(range(24), 2):
        y = x.clone()
        y[[i, j]] = y[[j, i]]
        swapped.add(fingerprint([y]))
    assert len(swapped | {fingerprint([x])}) == 24 * 23 // 2 + 1


def test_what_a_tensor_is_counts_and_where_it_lies_does_not() -> None:
    x = torch.zeros(6, 4)
    assert fingerprint([x]) != fingerprint([x.view(4, 6)])
    assert fingerprint([x]) != fingerprint([x.view(torch.int32)])
    assert fingerprint([x, torch.ones(3)]) != fingerprint([torch.ones(3), x])
    assert fingerprint([]) == fingerprint(())
    assert fingerprint([torch.empty(0)]) == fingerprint([torch.empty(0)])
    y = tensor(torch.float32, 1001)
    parts = [y[1:8], y.view(7, 143).t(), y[::3]]
    assert fingerprint(parts) == fingerprint([part.clone(memory_format=torch.contiguous_format) for part in parts])
    with torch.inference_mode():
        inference = y.clone()
    assert fingerprint([inference, torch.nn.Parameter(y)]) == fingerprint([y, y])
