"""The product that makes q, k and v heads, interpreted: every split of the work, norms, rotation, KV."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.kernels.cuda._heads import Heads
from specrs.kernels.cuda.configs import LinearConfig
from specrs.kernels.cuda.linear_product import MAX_ROWS, Product, scratch_sizes, skinny_linear_reference
from specrs.kernels.cuda.qk_norm_rope import qk_norm_rope_reference
from specrs.kernels.cuda.skinny_linear import skinny_linear
from specrs.kernels.kv_codes import FRACTIONS, encode
from sweep import sweep
from torch import Tensor

from .tolerance import assert_near

EPS, ROW_EPS, BLOCKS = 1e-3, 1e-5, 5


def operands(
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    k: int,
    dtype: torch.dtype = torch.float32,
    *,
    normed: bool = True,
    turned: bool = True,
    bias: bool = False,
) -> tuple[Tensor, Product]:
    """Return operands. Rows get slots of two blocks in turn; every third has none."""
    generator = torch.Generator().manual_seed(rows * k + heads)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    features, block_size = (heads + 2 * kv_heads) * dim, -(-rows // 2)
    slots = torch.tensor([-1 if row % 3 == 2 else (2 * row % 4 + 1) * block_size + row // 2 for row in range(rows)])
    angles = 7 * torch.rand(rows, dim // 2, generator=generator)
    of_heads = Heads(
        random(heads + kv_heads, dim) if normed else None,
        [angles.cos(), angles.sin()] if turned else [],
        slots,
        torch.full((BLOCKS, 2, kv_heads, block_size, dim), torch.nan, dtype=dtype),
        heads,
        EPS,
        (3.0, 5.0),
    )
    squares = k * (0.2 + 3 * torch.rand(2, MAX_ROWS, generator=generator)) if normed else None
    bias_of = random(features) if bias else None
    return random(rows, k), Product(random(features, k), bias_of, squares, ROW_EPS, heads=of_heads)


def run(x: Tensor, product: Product, programs: int, block_k: int = 16) -> tuple[Tensor, Tensor]:
    """Run the product and return `(out, cache)`. Scratch begins as NaN, so a read before a write shows. Checks that the
    kernel leaves its counters at zero."""
    heads = product.heads
    assert heads is not None
    config = LinearConfig(heads.cache.shape[4] // 2, block_k, programs, 4, 1)
    sizes = scratch_sizes(config, len(x), n=product.n, sides=product.sides)
    partials, counters = torch.full((sizes[0],), torch.nan), torch.zeros(sizes[1], dtype=torch.int32)
    cache = torch.full_like(heads.cache, torch.nan)
    # The columns after the heads belong to somebody else.
    out = torch.full((len(x), len(product.weight) + 3), torch.nan, dtype=x.dtype)[:, : len(product.weight)]
    made = replace(product, heads=replace(heads, cache=cache))
    skinny_linear(x, made, out, (partials, counters), config.as_list(), False)
    assert not counters.any()
    return out, cache


def own(x: Tensor, product: Product) -> Tensor:
    """Return heads `[M, heads, D]` as torch computes them in x's dtype."""
    y, heads = torch.nn.functional.linear(x, product.weight), product.heads
    assert heads is not None
    if product.squares is not None:
        mean = product.squares[:, : len(y)].sum(0) / x.shape[1]
        y = (y.float() * (mean + ROW_EPS).rsqrt()[:, None]).to(y.dtype)
    if product.bias is not None:
        y = y + product.bias
    kv_heads, dim = heads.cache.shape[2], heads.cache.shape[4]
    every = y.view(len(x), -1, dim).clone()
    qk = every[:, :-kv_heads]
    if heads.qk_norm is not None:
        qk.copy_(torch.nn.functional.rms_norm(qk, (dim,), None, EPS) * heads.qk_norm)
    if heads.angles:
        c, s = (values[:, None] for values in heads.angles)
        first, second = qk.float().chunk(2, dim=-1)
        qk.copy_(torch.cat((first * c - second * s, second * c + first * s), dim=-1))
    return every


@sweep(25)
@given(
    rows=st.sampled_from([1, 2, 6, 17]),
    heads=st.sampled_from([(1, 1), (4, 2), (5, 1)]),
    dim=st.sampled_from([16, 64]),
    k=st.sampled_from([32, 50]),
    programs=st.integers(1, 15),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    flags=st.tuples(*[st.booleans()] * 3),
)
def test_heads_are_what_norm_and_rotation_make_of_the_product(
    rows: int, heads: tuple[int, int], dim: int, k: int, programs: int, dtype: torch.dtype, flags: tuple[bool, ...]
) -> None:
    normed, turned, bias = flags
    x, product = operands(rows, *heads, dim, k, dtype, normed=normed, turned=turned, bias=bias)
    steps = (heads[0] + 2 * heads[1]) * -(-k // 16)
    out, cache = run(x, product, min(programs, steps))
    of_heads, q = product.heads, heads[0] * dim
    assert of_heads is not None
    exact, exact_cache = torch.empty(rows, len(product.weight), dtype=torch.float64), of_heads.cache.double()
    skinny_linear_reference(x, replace(product, heads=None), exact)
    qk_norm_rope_reference(exact, of_heads.qk_norm, of_heads.angles, of_heads.slots, exact_cache, [heads[0], 0], EPS)
    mine = own(x, product)
    assert_near(out[:, :q], exact[:, :q], mine[:, : heads[0]].flatten(1))
    assert out[:, q:].isnan().all()
    assert torch.equal(cache.isnan(), exact_cache.isnan())  # written where a slot says so, and nowhere else
    block_size = cache.shape[3]
    for row, slot in enumerate(of_heads.slots.tolist()):
        if slot >= 0:
            at = slot // block_size, slice(None), slice(None), slot % block_size
            assert_near(cache[at].flatten(0, 1), exact_cache[at].flatten(0, 1), mine[row, heads[0] :])


@pytest.mark.parametrize("codes", FRACTIONS)
def test_quantized_keys_and_values(codes: torch.dtype) -> None:
    """Check that a quantized cache gets the codes of what an fp32 cache gets, divided by the scales."""
    x, product = operands(4, 2, 3, 16, 32)
    of_heads: Any = product.heads
    numbers = run(x, product, 4)[1]
    quantized = replace(product, heads=replace(of_heads, cache=of_heads.cache.to(codes)))
    q, found = run(x, quantized, 4)
    expected = torch.stack([encode(numbers[:, at], of_heads.kv_scales[at], codes) for at in range(2)], dim=1)
    assert numbers.isfinite().any()
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(q[:, :32], run(x, product, 4)[0][:, :32])


def test_tiles_that_are_no_heads_are_rejected() -> None:
    x, product = operands(2, 2, 1, 64, 32)
    config = LinearConfig(16, 16, 2, 4, 1)
    scratch = torch.zeros(4096), torch.zeros(8, dtype=torch.int32)
    with pytest.raises(AssertionError, match="a tile has 32 features and a head 64"):
        skinny_linear(x, product, torch.zeros(2, 256), scratch, config.as_list(), False)
