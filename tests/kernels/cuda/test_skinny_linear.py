"""Products of few rows, interpreted: every shape of the work's split, norms, biases, gates, residuals."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.kernels.cuda.configs import LinearConfig
from specrs.kernels.cuda.skinny_linear import Product, scratch_sizes, skinny_linear, skinny_linear_reference
from torch import Tensor
from torch.nn.functional import silu

from .tolerance import assert_near

EPS = 1e-5


def operands(m: int, n: int, k: int, dtype: torch.dtype, *, gated: bool, bias: bool, norm: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(m * n + k)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        # The columns behind K belong to somebody else.
        "x": torch.cat((random(m, k), torch.full((m, 5), torch.nan, dtype=dtype)), dim=1)[:, :k],
        "weight": random(n * (1 + gated), k),
        "bias": random(n * (1 + gated)) if bias else None,
        "norm_weight": random(k) if norm else None,
        "out": random(m, n + 3)[:, :n],
    }


def run(ops: dict[str, Any], config: LinearConfig, *, gated: bool = False, accumulate: bool = False) -> Tensor:
    """The kernel's output; scratch is NaN before, counters are checked to be zero after."""
    out = ops["out"].clone(memory_format=torch.preserve_format)
    sizes = scratch_sizes(config, out.shape[0], n=out.shape[1], gated=gated)
    partials, counters = torch.full((sizes[0],), torch.nan), torch.zeros(sizes[1], dtype=torch.int32)
    product = Product(ops["weight"], ops["bias"], ops["norm_weight"], EPS, gated, accumulate)
    skinny_linear(ops["x"], product, out, (partials, counters), config.as_list(), False)
    assert not counters.any()
    return out


def own(ops: dict[str, Any], *, gated: bool, accumulate: bool) -> Tensor:
    """What torch makes of it in the operands' dtype."""
    x = ops["x"]
    if ops["norm_weight"] is not None:
        x = torch.nn.functional.rms_norm(x.contiguous(), x.shape[1:], ops["norm_weight"], EPS)
    y = torch.nn.functional.linear(x, ops["weight"], ops["bias"])
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = silu(gate) * up
    return ops["out"] + y if accumulate else y


def check(ops: dict[str, Any], config: LinearConfig, *, gated: bool = False, accumulate: bool = False) -> Tensor:
    out = run(ops, config, gated=gated, accumulate=accumulate)
    exact = ops["out"].double()
    skinny_linear_reference(
        ops["x"], ops["weight"], ops["bias"], ops["norm_weight"], exact, EPS, gated=gated, accumulate=accumulate
    )
    assert_near(out, exact, own(ops, gated=gated, accumulate=accumulate))
    return out


@settings(max_examples=30, deadline=None)
@given(
    m=st.sampled_from([1, 2, 6, 16, 17, 33, 64]),
    n=st.integers(1, 70),
    k=st.integers(1, 90),
    programs=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    flags=st.tuples(*[st.booleans()] * 4),
)
def test_any_shape_and_split(
    m: int, n: int, k: int, programs: int, dtype: torch.dtype, flags: tuple[bool, bool, bool, bool]
) -> None:
    gated, bias, norm, accumulate = flags
    steps = -(-n // 16) * -(-k // 16)
    config = LinearConfig(16, 16, min(programs, steps), 4, 1)
    check(operands(m, n, k, dtype, gated=gated, bias=bias, norm=norm), config, gated=gated, accumulate=accumulate)


@pytest.mark.parametrize("programs", [1, 2, 3, 5, 8, 13, 15])
def test_every_way_to_share_tiles(programs: int) -> None:
    """5 tiles of 3 steps: whole tiles, tiles of two and of three programs, programs in two tiles."""
    check(
        operands(3, 80, 48, torch.float32, gated=True, bias=True, norm=True),
        LinearConfig(16, 16, programs, 4, 1),
        gated=True,
    )


def test_fp16_norm_does_not_overflow() -> None:
    """x times the norm's weight is beyond fp16, the normalised x is not."""
    ops = operands(4, 16, 32, torch.float16, gated=False, bias=False, norm=True)
    ops["x"] = ops["x"] * 15000
    ops["norm_weight"] = ops["norm_weight"] * 4
    assert (ops["x"].float() * ops["norm_weight"].float()).abs().max() > 65504
    check(ops, LinearConfig(16, 16, 2, 4, 1))


def test_rows_do_not_touch_each_other() -> None:
    ops = operands(5, 24, 40, torch.float32, gated=True, bias=False, norm=True)
    clean = run(ops, LinearConfig(16, 16, 3, 4, 1), gated=True)
    ops["x"][2] = torch.nan
    out = run(ops, LinearConfig(16, 16, 3, 4, 1), gated=True)
    assert out[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(out[others], clean[others])


def test_output_is_rounded_once() -> None:
    """fp32 from fp16 operands, as logits are."""
    ops = operands(3, 20, 64, torch.float16, gated=False, bias=False, norm=False)
    ops["out"] = ops["out"].float()
    out = run(ops, LinearConfig(16, 16, 2, 4, 1))
    exact = ops["x"].double() @ ops["weight"].double().t()
    assert_near(out, exact, ops["x"].float() @ ops["weight"].float().t())


def test_operands_that_would_be_read_past_are_refused() -> None:
    ops = operands(3, 20, 64, torch.float32, gated=False, bias=False, norm=False)
    config = LinearConfig(16, 16, 2, 4, 1)
    with pytest.raises(AssertionError, match="rows=65: must be from 1 to 64"):
        run(ops | {"x": torch.zeros(65, 64), "out": torch.zeros(65, 20)}, config)
    scratch = (torch.zeros(5), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(AssertionError, match="partials must have"):
        skinny_linear(ops["x"], Product(ops["weight"]), ops["out"], scratch, config.as_list(), False)
