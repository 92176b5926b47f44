"""Products of experts' weights with their rows, interpreted: any choice; experts with no rows, one tile, and more."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.kernels.coding import Coding
from specrs.kernels.cuda._codes import coding_as_list
from specrs.kernels.cuda.configs import LinearConfig
from specrs.kernels.cuda.experts import sort_pairs_reference
from specrs.kernels.cuda.grouped_linear import grouped_linear, grouped_linear_reference, most_tiles
from torch import Tensor

from .test_experts import choices
from .test_quantized import random_quantized
from .tolerance import assert_near

CONFIG = LinearConfig(16, 32, 1, 4, 1).as_list()


def operands(ids: Tensor, n: int, k: int, each: int, *, gated: bool, dtype: torch.dtype = torch.float32) -> Any:
    """Return x (columns after K belong to another tensor), weights of 4 experts, sorted pairs, and an output of NaN."""
    generator = torch.Generator().manual_seed(n * k)
    x = torch.randn(ids.numel() // each, k + 5, generator=generator)[:, :k].to(dtype)
    weight = torch.randn(4, n * (1 + gated), k, generator=generator).to(dtype)
    pairs = [torch.full((size,), -7, dtype=torch.int32) for size in (ids.numel(), 5)]
    sort_pairs_reference(ids, *pairs)
    return x, weight, pairs, torch.full((ids.numel(), n), torch.nan, dtype=dtype)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 7, 33]),
    each=st.integers(1, 4),
    n=st.integers(1, 40),
    k=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    of_pairs=st.booleans(),
    gated=st.booleans(),
    activation=st.sampled_from(["silu", "gelu", "clamped"]),
    biased=st.booleans(),
)
def test_any_choice(
    rows: int, each: int, n: int, k: int, dtype: torch.dtype, of_pairs: bool, gated: bool, activation: str, biased: bool
) -> None:
    """Check products for any choice of experts. x has a row for each row or, as in the second product, for each
    pair."""
    ids = choices(rows, 4, each, n)
    flags = [1 if of_pairs else each, int(gated), int(activation == "gelu"), rows]
    x, weight, pairs, out = operands(ids, n, k, flags[0], gated=gated, dtype=dtype)
    biases = 3 * torch.randn(weight.shape[:2], generator=torch.Generator().manual_seed(rows))
    weights = [weight, biases.to(dtype)] if biased else [weight]
    # Sums of many products reach the limit, others do not.
    clamp = [1.702, 4.0] if gated and activation == "clamped" else []
    exact, own = out.double(), out.clone()
    grouped_linear(x, weights, pairs, out, flags, clamp, CONFIG, False)
    grouped_linear_reference(x, weights, pairs, exact, flags, clamp)
    grouped_linear_reference(x.float(), [w.float() for w in weights], pairs, own, flags, clamp)
    sent = ids.flatten() >= 0
    assert out[~sent].isnan().all()
    if sent.any():
        torch_own = own[sent] if dtype == torch.float32 else own[sent].to(dtype)
        assert_near(out[sent], exact[sent], torch_own, ulps=16, least=1.0)


CODINGS = {
    "fp8 blocks": (Coding("fp8", 32, outputs=4), 8, 96),
    "fp8 outputs": (Coding("fp8", 64), 6, 64),
    "int8 groups": (Coding("int8", 16), 6, 64),
    "int4": (Coding("int4", 32), 18, 128),
    "int4 zeros": (Coding("int4", 64, zeros=True), 6, 192),
    "int4 outputs": (Coding("int4", 64, zeros=True), 6, 64),
    "mxfp4": (Coding("mxfp4", 32), 18, 192),
    "q4_1": (Coding("int4", 32, minima="pairs"), 6, 128),
    "q4_k": (Coding("int4", 32, minima="blocks"), 6, 256),
}


@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize("gated", [True, False])
def test_codes(name: str, gated: bool) -> None:
    """Check that quantized weights give the products of their dequantized values, with incomplete tiles and steps,
    biases, and an expert without rows."""
    coding, n, k = CODINGS[name]
    weight = random_quantized(coding, 4 * n * (1 + gated), k)
    numbers = weight.dequantized().view(4, -1, k)
    ids = choices(5, 4, 2, 7)
    ids[ids == 1] = -1
    x, _, pairs, out = operands(ids, n, k, 2, gated=gated)
    bias = torch.randn(numbers.shape[:2], generator=torch.Generator().manual_seed(3))
    flags, config = [2, int(gated), 0, 5], LinearConfig(16, max(128, coding.unit(k) or 0), 1, 4, 1).as_list()
    exact, own = out.double(), out.clone()
    codes = weight.codes.view(4, -1, weight.codes.shape[1])
    weights = [codes, weight.scales, bias]
    grouped_linear(x, weights, pairs, out, flags + coding_as_list(coding), [], config, False)
    grouped_linear_reference(x, [numbers, bias], pairs, exact, flags)
    grouped_linear_reference(x, [numbers.float(), bias], pairs, own, flags)
    sent = ids.flatten() >= 0
    assert 0 < sent.sum() < len(sent)
    assert out[~sent].isnan().all()
    assert_near(out[sent], exact[sent], own[sent], ulps=16, least=1.0)


def test_a_scale_of_two_experts_is_an_error() -> None:
    coding = Coding("fp8", 64, outputs=8)
    weight, ids = random_quantized(coding, 48, 64), choices(2, 4, 1, 0)
    x, _, pairs, out = operands(ids, 12, 64, 1, gated=False)
    weights = [weight.codes.view(4, 12, -1), weight.scales]
    with pytest.raises(AssertionError, match="a scale of several experts"):
        grouped_linear(x, weights, pairs, out, [1, 0, 0, 2, *coding_as_list(coding)], [], CONFIG, False)


def test_an_expert_of_several_tiles() -> None:
    """Check an expert with several tiles: all but one of 150 rows are sent to expert 2, and tiles have 64 rows."""
    ids = torch.full((150, 1), 2, dtype=torch.int32)
    ids[7] = 0
    x, weight, pairs, out = operands(ids, 18, 20, 1, gated=False)
    grouped_linear(x, [weight], pairs, out, [1, 0, 0, 150], [], CONFIG, False)
    exact = (x.double().unsqueeze(1) @ weight[ids.flatten().long()].double().transpose(1, 2)).squeeze(1)
    assert_near(out, exact, exact.float(), ulps=16)


def test_rows_do_not_touch_each_other() -> None:
    """Check bit for bit that a row does not depend on other rows in its expert's tile."""
    ids = choices(6, 4, 2, 3)
    ids[:] = torch.tensor([1, 3])
    x, weight, pairs, out = operands(ids, 20, 40, 2, gated=True)
    grouped_linear(x, [weight], pairs, out, [2, 1, 0, 6], [], CONFIG, False)
    alone = operands(ids[4:5], 20, 40, 2, gated=True)
    grouped_linear(x[4:5], [weight], alone[2], alone[3], [2, 1, 0, 1], [], CONFIG, False)
    assert torch.equal(alone[3], out[8:10])
    x[2] = torch.nan
    spoiled = torch.full_like(out, torch.nan)
    grouped_linear(x, [weight], pairs, spoiled, [2, 1, 0, 6], [], CONFIG, False)
    assert spoiled[4:6].isnan().all()
    assert torch.equal(spoiled[6:], out[6:])


@given(
    counts=st.lists(st.integers(0, 200), min_size=1, max_size=9),
    width=st.sampled_from([16, 32, 64]),
)
def test_the_grid_has_room_for_any_choice(counts: list[int], width: int) -> None:
    if sum(counts):
        assert sum(-(-count // width) for count in counts) <= most_tiles(len(counts), sum(counts), width)
