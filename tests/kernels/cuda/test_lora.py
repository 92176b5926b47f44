"""LoRA adapters of a pass, interpreted: the slot of each row, and what its adapter adds to a projection."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.kernels.cuda.configs import LinearConfig
from specrs.kernels.cuda.linear_product import MAX_ROWS, Added, Product, scratch_sizes, skinny_linear_reference
from specrs.kernels.cuda.lora import (
    Slots,
    adapter_slots,
    adapter_slots_reference,
    lora_expand,
    lora_reference,
    lora_shrink,
    num_splits,
    padded_rank,
)
from specrs.kernels.cuda.skinny_linear import skinny_linear
from sweep import sweep
from torch import Tensor

from .tolerance import assert_near

EPS = 1e-5


@sweep(30)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=70),
    first=st.integers(0, 9),
    padding=st.integers(0, 5),
    seed=st.integers(0, 9),
)
def test_slots_of_rows(lengths: list[int], first: int, padding: int, seed: int) -> None:
    """Requests without rows, masked rows, rows of no request, and rows of others before `first`."""
    generator = torch.Generator().manual_seed(seed)
    rows = first + sum(lengths) + padding
    if rows == first:
        return
    positions = torch.randint(-1, 3, (rows,), generator=generator)
    q_start = torch.tensor([0, *lengths]).cumsum(0)
    device_rows = torch.randint(0, 9, (len(lengths),), generator=generator)
    of_row = torch.randint(-1, 4, (10,), generator=generator, dtype=torch.int32)
    out, expected = (torch.full((rows,), 77, dtype=torch.int32) for _ in range(2))
    adapter_slots(positions, q_start, device_rows, of_row, out, first, False)
    adapter_slots_reference(positions, q_start, device_rows, of_row, expected, first)
    assert out.equal(expected)


def make(k: int, parts: tuple[int, ...], rank: int, count: int, dtype: torch.dtype, generator: Any) -> Slots:
    size = padded_rank(rank)
    a = torch.randn(count, len(parts), size, k, generator=generator) / k**0.5
    a[:, :, rank:] = 0
    b = torch.randn(count, sum(parts), size, generator=generator)
    b[:, :, rank:] = 0
    return Slots(a.flatten(1, 2).to(dtype), b.to(dtype), parts)


def shrunk(x: Tensor, adapters: Slots, slots: Tensor) -> Tensor:
    y = torch.full((num_splits(*x.shape), len(x), adapters.a.shape[1]), torch.nan)
    lora_shrink(x, adapters.a, slots, y, False)
    return y


def in_dtype(x: Tensor, adapters: Slots, slots: Tensor, out: Tensor, scale: Tensor, **flags: Any) -> Tensor:
    """Return the sums that torch computes in the dtype of the operands, with `A x` rounded."""
    made, rank = out.clone(), adapters.b.shape[2]
    for i in (slots >= 0).nonzero().flatten().tolist():
        y = ((adapters.a[slots[i]] @ x[i]) * scale[i]).to(x.dtype).view(-1, rank)
        of_parts = y.repeat_interleave(torch.tensor(adapters.parts), 0)
        one = flags["multiplier"] * (adapters.b[slots[i]] * of_parts).sum(1)
        made[i] = out[i] + one.to(out.dtype) if flags["accumulate"] else one
    return made


@sweep(45)
@given(
    rows=st.sampled_from([1, 3, 17, 64, 70]),
    k=st.sampled_from([24, 130, 256, 520, 1100]),
    parts=st.sampled_from([(40,), (17, 3), (70, 20, 20), (64, 64, 1), (70, 17, 3, 20)]),
    rank=st.sampled_from([1, 4, 16, 33, 130]),
    count=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    normed=st.booleans(),
    accumulate=st.booleans(),
    multiplier=st.sampled_from([1.0, 0.3]),
    seed=st.integers(0, 99),
)
def test_any_shape(
    rows: int,
    k: int,
    parts: tuple[int, ...],
    rank: int,
    count: int,
    dtype: torch.dtype,
    normed: bool,
    accumulate: bool,
    multiplier: float,
    seed: int,
) -> None:
    """Check that output rows without an adapter keep their bits, and that the rows of x for them are not read."""
    generator = torch.Generator().manual_seed(seed)
    adapters = make(k, parts, rank, count, dtype, generator)
    slots = torch.randint(-1, count, (rows,), generator=generator, dtype=torch.int32)
    x = torch.randn(rows, k + 3, generator=generator).to(dtype)[:, :k]
    x[slots < 0] = torch.nan
    squares = None
    if normed and rows <= MAX_ROWS:
        squares = k * (0.2 + torch.rand(2, MAX_ROWS, generator=generator))
    out = torch.randn(rows, sum(parts) + 1, generator=generator).to(dtype)[:, :-1]
    flags: dict[str, Any] = {"accumulate": accumulate, "multiplier": multiplier}
    found, exact = out.clone(), out.double()
    y = shrunk(x, adapters, slots)
    norm = None if squares is None else (squares, EPS)
    lora_expand(y, adapters, slots, found, False, norm=norm, **flags)
    lora_reference(x, adapters, slots, exact, norm=norm, **flags)
    scale = torch.ones(rows)
    if squares is not None:
        scale = (squares[:, :rows].sum(0) / k + EPS).rsqrt()
    none = slots < 0
    assert found[none].equal(out[none])
    assert y[:, none].isnan().all()
    if not none.all():
        own = in_dtype(x, adapters, slots, out, scale, **flags)
        assert_near(found[~none], exact[~none], own[~none])


@pytest.mark.parametrize("rows", [(1, 16), (6, 40), (64, 3)])
def test_a_row_does_not_depend_on_others(rows: tuple[int, int]) -> None:
    """Check that a row of a pass of up to 64 rows has the same bits whatever adapters the other rows have, even if
    those rows contain NaN."""
    generator = torch.Generator().manual_seed(3)
    adapters = make(700, (40, 24), 5, 3, torch.float16, generator)
    x, found = torch.randn(max(rows), 700, generator=generator).half(), []
    for count, shift in zip(rows, (0, 1), strict=True):
        own, slots = x[:count].clone(), (torch.arange(count, dtype=torch.int32) + shift) % 3
        own[1:] += shift
        own[2:] *= torch.nan if shift else 1
        slots[0] = 2
        out = torch.zeros(count, 64, dtype=torch.float32)
        lora_expand(shrunk(own, adapters, slots), adapters, slots, out, False)
        found.append(out[0])
    assert found[0].equal(found[1])
    assert found[0].any()


@sweep(20)
@given(
    rows=st.sampled_from([1, 6, 17]),
    n=st.integers(1, 40),
    k=st.sampled_from([32, 70]),
    programs=st.integers(1, 7),
    gated=st.booleans(),
    normed=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_what_is_added_to_a_product(
    rows: int, n: int, k: int, programs: int, gated: bool, normed: bool, bias: bool, seed: int
) -> None:
    """After the norm's scale and the bias, before the activation, and only to rows with a slot."""
    generator = torch.Generator().manual_seed(seed)
    sides = 1 + gated
    x, weight = torch.randn(rows, k, generator=generator), torch.randn(sides * n, k, generator=generator)
    slots = torch.randint(-1, 2, (rows,), generator=generator, dtype=torch.int32)
    values = torch.randn(rows, sides * n, generator=generator)
    values[slots < 0] = torch.nan
    squares = k * (0.2 + torch.rand(1, MAX_ROWS, generator=generator)) if normed else None
    own_bias = torch.randn(sides * n, generator=generator) if bias else None
    product = Product(weight, own_bias, squares, EPS, gated=gated, added=Added(values, slots))
    config = LinearConfig(16, 32, programs, 4, 1)
    sizes = scratch_sizes(config, rows, n=n, sides=product.sides)
    out, exact = torch.full((rows, n), torch.nan), torch.empty(rows, n, dtype=torch.float64)
    scratch = torch.full((sizes[0],), torch.nan), torch.zeros(sizes[1], dtype=torch.int32)
    skinny_linear(x, product, out, scratch, config.as_list(), False)
    skinny_linear_reference(x, product, exact)
    torch.testing.assert_close(out.double(), exact, rtol=2e-4, atol=2e-4)
