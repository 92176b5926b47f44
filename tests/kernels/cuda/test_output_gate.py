"""Gates of attention's outputs, interpreted: split from the queries, and applied."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.kernels.cuda.output_gate import (
    apply_gates,
    apply_gates_reference,
    split_gates,
    split_gates_reference,
)
from sweep import sweep

from .tolerance import assert_near


@sweep(20)
@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (4, 2), (6, 3), (16, 2)]),
    st.sampled_from([2, 20, 64]),
    st.sampled_from([torch.float32, torch.float16]),
)
def test_gates(rows: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    """Check gates in strided rows. Some are so large that their exponential overflows."""
    num_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(dim)
    width = 2 * (num_heads + kv_heads) * dim
    x = torch.randn(rows, width + 3, generator=generator).to(dtype)[:, :width]
    x[0, dim], x[0, dim + 1] = 1e4, -1e4
    out = torch.full((rows, (num_heads + 2 * kv_heads) * dim + 1), torch.nan, dtype=dtype)[:, :-1]
    expected = torch.empty_like(out)
    split_gates(x, out, num_heads, dim, False)
    split_gates_reference(x, expected, num_heads, dim)
    assert out.equal(expected)

    attended = torch.randn(rows, num_heads * dim, generator=generator).to(dtype)
    exact, own = attended.double(), attended.clone()
    own *= x.reshape(rows, -1, dim)[:, 1 : 2 * num_heads : 2].flatten(1).sigmoid()
    apply_gates_reference(x, exact, num_heads, dim)
    apply_gates(x, attended, num_heads, dim, False)
    assert_near(attended, exact, own)
