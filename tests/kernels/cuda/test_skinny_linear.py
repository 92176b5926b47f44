"""Products of few rows, interpreted: every split of the work, norms, biases, gates, residuals."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.kernels.cuda.configs import LinearConfig
from specrs.kernels.cuda.linear_product import (
    DRAFT_ROWS,
    MAX_ROWS,
    Next,
    Product,
    scratch_sizes,
    skinny_linear_reference,
)
from specrs.kernels.cuda.skinny_linear import skinny_linear
from sweep import sweep
from torch import Tensor
from torch.nn.functional import gelu as gelu_of
from torch.nn.functional import silu

from .tolerance import assert_near

EPS = 1e-5


def width(rows: int) -> int:
    """Return the number of columns of the sums of squares: 64, or 128 for more than 64 rows, which only a draft model
    may have."""
    return MAX_ROWS if rows <= MAX_ROWS else DRAFT_ROWS


def operands(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    bias: bool = False,
    norm: int = 0,
    next: bool = False,
) -> dict[str, Any]:
    """Return operands of a product. `norm`: number of rows of sums of squares for the norm, made from other data than
    x."""
    generator = torch.Generator().manual_seed(m * n + k)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        # The columns after K belong to somebody else.
        "x": torch.cat((random(m, k), torch.full((m, 5), torch.nan, dtype=dtype)), dim=1)[:, :k],
        "weight": random(n * (1 + gated), k),
        "bias": random(n * (1 + gated)) if bias else None,
        # None near zero, or the product of a gate and what it lets through is beyond float16.
        "squares": k * (0.2 + 3 * torch.rand(norm, width(m), generator=generator)) if norm else None,
        "next_norm": random(n) if next else None,
        "out": random(m, n + 3)[:, :n],
    }


def product_of(ops: dict[str, Any], out: Tensor, **flags: Any) -> Product:
    following = None
    if ops["next_norm"] is not None:
        x = torch.full_like(out, torch.nan, memory_format=torch.preserve_format)
        tiles = -(-out.shape[1] // 16)
        following = Next(ops["next_norm"], x, torch.full((tiles + 1, width(len(out))), torch.nan))
    return Product(ops["weight"], ops["bias"], ops["squares"], EPS, **flags, next=following)


def launch(ops: dict[str, Any], config: LinearConfig, **flags: Any) -> tuple[Tensor, Product]:
    """Run the kernel. Return its output and its other results. Scratch begins as NaN. Checks that the counters are zero
    afterwards."""
    out = ops["out"].clone(memory_format=torch.preserve_format)
    product = product_of(ops, out, **flags)
    sizes = scratch_sizes(config, out.shape[0], n=out.shape[1], sides=product.sides)
    partials, counters = torch.full((sizes[0],), torch.nan), torch.zeros(sizes[1], dtype=torch.int32)
    skinny_linear(ops["x"], product, out, (partials, counters), config.as_list(), False)
    assert not counters.any()
    return out, product


def run(ops: dict[str, Any], config: LinearConfig, **flags: Any) -> Tensor:
    return launch(ops, config, **flags)[0]


def own(
    ops: dict[str, Any], *, gated: bool = False, gelu: bool = False, accumulate: bool = False, multiplier: float = 1.0
) -> Tensor:
    """Return the product as torch computes it in the operands' dtype."""
    y = torch.nn.functional.linear(ops["x"], ops["weight"])
    if ops["squares"] is not None:
        mean = ops["squares"][:, : len(y)].sum(0) / ops["x"].shape[1]
        y = (y.float() * (mean + EPS).rsqrt()[:, None]).to(y.dtype)
    if ops["bias"] is not None:
        y = y + ops["bias"]
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = (gelu_of(gate, approximate="tanh") if gelu else silu(gate)) * up
    y = y * multiplier
    return ops["out"] + y if accumulate else y


def check(ops: dict[str, Any], config: LinearConfig, **flags: Any) -> Tensor:
    out, product = launch(ops, config, **flags)
    exact = ops["out"].double()
    skinny_linear_reference(ops["x"], product_of({**ops, "next_norm": None}, exact, **flags), exact)
    assert_near(out, exact, own(ops, **flags))
    if product.next is not None:
        # Of the output as it was rounded: the products to the bit, the sums within a sum's rounding.
        expected = (out.float() * ops["next_norm"].float()).to(out.dtype)
        assert torch.equal(product.next.x, expected)
        tiles, rows = -(-out.shape[1] // 16), len(out)
        assert product.next.squares[tiles:].isnan().all()
        assert product.next.squares[:, rows:].isnan().all()
        sums = product.next.squares[:tiles, :rows].double().sum(0)
        torch.testing.assert_close(sums, out.double().square().sum(1), rtol=1e-5, atol=1e-12)
    return out


@sweep(30)
@given(
    m=st.sampled_from([1, 2, 6, 16, 17, 33, 64, 65, 128]),
    n=st.integers(1, 70),
    k=st.integers(1, 90),
    programs=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    norm=st.sampled_from([0, 0, 1, 3]),
    flags=st.tuples(*[st.booleans()] * 5),
    multiplier=st.sampled_from([1.0, 1.0, 0.3]),
)
def test_any_shape_and_split(
    m: int,
    n: int,
    k: int,
    programs: int,
    dtype: torch.dtype,
    norm: int,
    flags: tuple[bool, bool, bool, bool, bool],
    multiplier: float,
) -> None:
    gated, gelu, bias, following, accumulate = flags
    steps = -(-n // 16) * -(-k // 16)
    config = LinearConfig(16, 16, min(programs, steps), 4, 1)
    ops = operands(m, n, k, dtype, gated=gated, bias=bias, norm=norm, next=following)
    check(ops, config, gated=gated, gelu=gelu, accumulate=accumulate, multiplier=multiplier)


@pytest.mark.parametrize("programs", [1, 2, 3, 5, 8, 13, 15])
def test_every_way_to_share_tiles(programs: int) -> None:
    """Check every way to share tiles, for 5 tiles of 3 steps: whole tiles, tiles of two and three programs, programs in
    two tiles."""
    check(
        operands(3, 80, 48, torch.float32, gated=True, bias=True, norm=2, next=True),
        LinearConfig(16, 16, programs, 4, 1),
        gated=True,
    )


def test_rows_do_not_touch_each_other() -> None:
    ops = operands(5, 24, 40, torch.float32, gated=True, norm=1)
    clean = run(ops, LinearConfig(16, 16, 3, 4, 1), gated=True)
    ops["x"][2] = torch.nan
    out = run(ops, LinearConfig(16, 16, 3, 4, 1), gated=True)
    assert out[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(out[others], clean[others])


def test_output_is_rounded_once() -> None:
    """Check that the output is rounded once: fp32 from fp16 operands, as logits are."""
    ops = operands(3, 20, 64, torch.float16)
    ops["out"] = ops["out"].float()
    out = run(ops, LinearConfig(16, 16, 2, 4, 1))
    exact = ops["x"].double() @ ops["weight"].double().t()
    assert_near(out, exact, ops["x"].float() @ ops["weight"].float().t())


def test_operands_that_would_be_read_past_are_rejected() -> None:
    ops = operands(3, 20, 64, torch.float32)
    config = LinearConfig(16, 16, 2, 4, 1)
    with pytest.raises(AssertionError, match="rows=129: must be from 1 to 128"):
        run(ops | {"x": torch.zeros(129, 64), "out": torch.zeros(129, 20)}, config)
    squares = torch.ones(1, MAX_ROWS)
    with pytest.raises(AssertionError, match="rows=65: must be at most the 64 columns of squares"):
        run(ops | {"x": torch.zeros(65, 64), "out": torch.zeros(65, 20), "squares": squares}, config)
    scratch = (torch.zeros(5), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(AssertionError, match="partials must have"):
        skinny_linear(ops["x"], Product(ops["weight"]), ops["out"], scratch, config.as_list(), False)
