"""Factors of queries by position, interpreted."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.kernels.cuda.scale_queries import scale_queries, scale_queries_reference
from sweep import sweep

from .tolerance import assert_near


@sweep(20)
@given(
    st.lists(st.integers(0, 100) | st.integers(0, 2**20), max_size=3),
    st.sampled_from([2, 60, 1030]),
    st.sampled_from([1, 7, 16384]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.integers(0, 1),
)
def test_queries_grow(positions: list[int], width: int, length: int, dtype: torch.dtype, offset: int) -> None:
    """Check queries in strided rows. Keys after them, and queries before the first length, stay as they were."""
    positions = [*positions, -1, length - 1, length, 2 * length]
    generator = torch.Generator().manual_seed(width)
    qkv = torch.randn(len(positions), width + 5, generator=generator).to(dtype)
    at, before, exact = torch.tensor(positions), qkv.clone(), qkv.double()
    q, own = qkv[:, :width], qkv.clone()[:, :width]
    scale_queries_reference(exact[:, :width], at, 0.6, length, offset)
    scale_queries_reference(own, at, 0.6, length, offset)
    scale_queries(q, at, 0.6, length, False, offset)
    assert_near(q, exact[:, :width], own)
    assert qkv[:, width:].equal(before[:, width:])
    assert q[at + offset < length].equal(before[:, :width][at + offset < length])
