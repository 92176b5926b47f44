"""Kernels that work on single rows, interpreted: embedding, RMSNorm, activation, qk-norm with RoPE and KV write."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.kernels.cuda.activation import activation_and_mul, activation_and_mul_reference
from specrs.kernels.cuda.embedding import embed, embed_reference
from specrs.kernels.cuda.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from specrs.kernels.cuda.rms_norm import rms_norm, rms_norm_reference
from specrs.kernels.kv_codes import FRACTIONS
from specrs.kernels.rotary import (
    apply_interleaved_rotary_,
    apply_rotary_,
    inverse_frequencies,
    rotary_cos_sin,
    signed_frequencies,
)
from torch import Tensor

from .tolerance import assert_near

EPS = 1e-5
DTYPES = [torch.float32, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + math.prod(shape))).to(dtype)


@pytest.mark.parametrize(("width", "dim", "thetas"), [(2049, 6, [1e4]), (40, 96, [1e4, 300.0])])
def test_embed(width: int, dim: int, thetas: list[float]) -> None:
    """Check embedding with one RoPE table and with two; the latter with magnitudes and scaled embeddings."""
    table = random(11, width)
    rotary = torch.stack([signed_frequencies(inverse_frequencies(dim, theta)) for theta in thetas])
    ids, positions = torch.tensor([3, 10, 0, 12, -4]), torch.tensor([0, 131071, -1, 77, 4095])
    magnitudes, multiplier = (None, 1.0) if len(thetas) == 1 else (torch.tensor([1.25, 0.5]), 3.5)
    angles = [torch.full((len(thetas), 9, dim // 2), torch.nan) for _ in range(2)]
    outputs = [torch.full((5, width), torch.nan), *(values[:, :5] for values in angles)]
    expected = [torch.empty_like(out) for out in outputs]
    tables = [table, rotary, magnitudes, None]
    embed(ids, positions, tables, outputs[0], outputs[1:], [], False, multiplier)
    embed_reference(ids, positions, tables, expected[0], expected[1:], (), multiplier)
    assert torch.equal(outputs[0], expected[0])
    assert torch.equal(outputs[0][3], table[10] * multiplier)  # cut to the vocabulary
    torch.testing.assert_close(outputs[1:], expected[1:], rtol=0, atol=3e-7)
    assert all(values[:, 5:].isnan().all() for values in angles)


def test_embed_for_the_next_norm() -> None:
    table, rotary, norm = random(7, 2300), signed_frequencies(inverse_frequencies(8, 1e4)).view(1, -1), random(2300)
    ids, positions = torch.tensor([3, 6, 0]), torch.arange(3)
    hidden, angles = torch.empty(3, 2300), [torch.empty(1, 3, 4), torch.empty(1, 3, 4)]
    following = [torch.full((3, 2300), torch.nan), torch.full((2, 64), torch.nan)]
    embed(ids, positions, [table, rotary, None, norm], hidden, angles, following, False, 0.75)
    assert torch.equal(hidden, table[ids] * 0.75)
    assert torch.equal(following[0], hidden * norm)
    torch.testing.assert_close(following[1][0, :3].double(), hidden.double().square().sum(1), rtol=1e-6, atol=0)
    assert following[1][0, 3:].isnan().all()
    assert following[1][1].isnan().all()


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 130),
    dtype=st.sampled_from(DTYPES),
    added=st.sampled_from(["no", "as it is", "times", "normed", "normed, times", "normed, scaled"]),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 300.0]),
    read=st.booleans(),
)
def test_rms_norm(rows: int, width: int, dtype: torch.dtype, added: str, scale: float, read: bool) -> None:
    """Check norms of rows, norms after an addition, and the addition alone."""
    x, weight = random(rows, width, dtype=dtype) * scale, random(width, dtype=dtype)
    read = read or added == "no"
    scalar = 0.3125 if "scaled" in added else None
    residual = None if added == "no" else random(rows, width, dtype=dtype, seed=1) * scale
    after = random(width, dtype=dtype, seed=2) if "normed" in added else None
    multiplier = 0.375 if "times" in added else 1.0
    factors = None if multiplier == 1 and scalar is None else [multiplier] if scalar is None else [multiplier, scalar]
    before = None if residual is None else residual.clone()
    out = torch.full_like(x, torch.nan)
    rms_norm(x, residual, weight if read else None, out if read else None, EPS, False, after, factors)
    normed = x if after is None else torch.nn.functional.rms_norm(x, (width,), after, EPS)
    if residual is not None and before is not None:
        exact = before.double()
        rms_norm_reference(x, exact, None, None, EPS, after, multiplier, scalar)
        assert_near(residual, exact, (before + normed * multiplier) * (scalar or 1.0))
    if read:
        given_rows = x if residual is None else residual
        exact = torch.empty(rows, width, dtype=torch.float64)
        rms_norm_reference(given_rows, None, weight, exact, EPS)
        assert_near(out, exact, torch.nn.functional.rms_norm(given_rows, (width,), weight, EPS))
    else:
        assert out.isnan().all()


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 3),
    width=st.sampled_from([1, 33, 1024, 1030]),
    dtype=st.sampled_from(DTYPES),
    gelu=st.booleans(),
)
def test_activation_and_mul(rows: int, width: int, dtype: torch.dtype, gelu: bool) -> None:
    x = random(rows, 2 * width, dtype=dtype) * 5
    x[:, 0] = 100 if dtype == torch.float16 else 1e4
    x[-1, 0] *= -1  # exp of its negative overflows
    out = torch.full((rows, width), torch.nan, dtype=dtype)
    activation_and_mul(x, out, gelu, False)
    exact = torch.empty(rows, width, dtype=torch.float64)
    activation_and_mul_reference(x, exact, gelu)
    gate, up = x.chunk(2, dim=1)
    f = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
    assert_near(out, exact, f * up)


@pytest.mark.parametrize("interleaved", [False, True])
@settings(max_examples=16, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (4, 2), (5, 1), (6, 3)]),
    dim=st.sampled_from([2, 20, 64, 96]),
    block_size=st.sampled_from([1, 4, 16]),
    norm=st.sampled_from(["none", "heads", "whole"]),
    part=st.sampled_from([1.0, 1.0, 0.7, 0.1, 0.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_qk_norm_rope(
    heads: tuple[int, int], dim: int, block_size: int, norm: str, part: float, interleaved: bool, dtype: torch.dtype
) -> None:
    """Check qk-norm and RoPE, which rotates the share `part` of a head's features, or all of them with their
    neighbours."""
    part = 1.0 if interleaved else part
    num_heads, kv_heads = heads
    turned = 2 * math.ceil(part * dim / 2)
    positions, slots = torch.tensor([0, 5, -1, 40000]), torch.tensor([1, -1, -1, 3 * block_size])
    rows, width = len(positions), (num_heads + 2 * kv_heads) * dim
    qkv = torch.cat((random(rows, width, dtype=dtype), torch.full((rows, 3), torch.nan, dtype=dtype)), 1)[:, :width]
    qk_norm = None if norm == "none" else random(num_heads + kv_heads, dim, dtype=dtype)
    given_norm = qk_norm.view(-1) if qk_norm is not None and norm == "whole" else qk_norm
    cache = torch.full((5, 2, kv_heads, block_size, dim), torch.nan, dtype=dtype)
    signed = signed_frequencies(inverse_frequencies(turned, 1e4))
    angles = positions.float()[:, None] * signed[turned // 2 :]
    cos_sin = [angles.cos(), angles.sin()] if turned else []

    exact_qkv, exact_cache = qkv.contiguous().double(), cache.double()
    shape = [num_heads, int(interleaved)]
    qk_norm_rope_reference(exact_qkv, given_norm, cos_sin, slots, exact_cache, shape, EPS)
    own = qkv.reshape(rows, -1, dim).clone()
    qk = own[:, : num_heads + kv_heads]
    if qk_norm is not None and norm == "heads":
        qk.copy_(torch.nn.functional.rms_norm(qk, (dim,), None, EPS) * qk_norm)
    elif qk_norm is not None:
        for part_of in (slice(0, num_heads), slice(num_heads, num_heads + kv_heads)):
            whole = qk[:, part_of].flatten(1)
            normed = torch.nn.functional.rms_norm(whole, whole.shape[1:], None, EPS)
            qk[:, part_of] = normed.view(rows, -1, dim) * qk_norm[part_of]
    if turned:
        rotate = apply_interleaved_rotary_ if interleaved else apply_rotary_
        rotate(qk[..., :turned], *rotary_cos_sin(positions, signed, dtype))
    before = qkv.clone()
    qk_norm_rope(qkv, given_norm, cos_sin, slots, cache, shape, [EPS, 3.0, 5.0], False)

    q = num_heads * dim
    assert_near(qkv[:, :q], exact_qkv[:, :q], own[:, :num_heads].reshape(rows, -1))
    assert torch.equal(qkv[:, q:], before[:, q:])
    assert torch.equal(cache.isnan(), exact_cache.isnan())  # written where a slot says so, and nowhere else
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k, v = cache[slot // block_size, :, :, slot % block_size]
            exact = exact_cache[slot // block_size, 0, :, slot % block_size]
            assert_near(k, exact, own[row, num_heads : num_heads + kv_heads])
            assert torch.equal(v, before[row].view(-1, dim)[num_heads + kv_heads :])


@pytest.mark.parametrize("projected", ["q, k, v", "q, k", "q"])
def test_normed_values_and_keys_that_are_values(projected: str) -> None:
    """Check norms of values, values that are keys before norm and rotation, and queries alone, with angles in rows that
    are wider than a half."""
    heads, kv_heads, dim = 3, 2, 20
    count = {"q, k, v": 2, "q, k": 1, "q": 0}[projected] * kv_heads
    positions, slots = torch.tensor([0, 5, 2, 40000]), torch.tensor([1, -1, 6, 12])
    qkv = random(4, (heads + count) * dim)
    norm = random(heads + 2 * kv_heads, dim)
    norm[heads + kv_heads :] = 1
    norm = norm if count else norm[:heads].contiguous()
    signed = signed_frequencies(inverse_frequencies(dim, 1e4))
    angles = positions.float()[:, None] * signed[dim // 2 :]
    cos_sin = [
        torch.cat((each, torch.full((4, 3), torch.nan)), 1)[:, : dim // 2] for each in (angles.cos(), angles.sin())
    ]
    cache = torch.full((5, 2, kv_heads, 4, dim), torch.nan)
    before = qkv.clone()
    qk_norm_rope(qkv, norm, cos_sin, slots, cache, [heads, 0], [EPS, 1.0, 1.0], False)

    own = before.view(4, -1, dim)
    exact = own.double() / (own.double().square().mean(2, keepdim=True) + EPS).sqrt()
    turned = exact[:, : heads + min(count, kv_heads)] * norm[: heads + min(count, kv_heads)].double()
    apply_rotary_(turned, *rotary_cos_sin(positions, signed, torch.float64))
    torch.testing.assert_close(qkv[:, : heads * dim].double(), turned[:, :heads].flatten(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(qkv[:, heads * dim :], before[:, heads * dim :])
    expected = torch.full_like(cache, torch.nan, dtype=torch.float64)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0 and count:
            expected[slot // 4, 0, :, slot % 4] = turned[row, heads:]
            expected[slot // 4, 1, :, slot % 4] = exact[row, -kv_heads:]
    torch.testing.assert_close(cache.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    again, exact_cache = before.double(), torch.full_like(expected, torch.nan)
    qk_norm_rope_reference(again, norm, cos_sin, slots, exact_cache, [heads, 0], EPS)
    torch.testing.assert_close(exact_cache, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(again[:, : heads * dim], turned[:, :heads].flatten(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codes", FRACTIONS)
@pytest.mark.parametrize("part", [1.0, 0.5, 0.0])
def test_quantized_keys_and_values(codes: torch.dtype, part: float) -> None:
    """Check quantized K and V: each is the code nearest to the float64 result, or a neighbour if that is halfway; too
    large ones become the largest code."""
    heads, kv_heads, dim, block_size, scales = 2, 3, 12, 4, [0.02, 0.3]
    turned = int(part * dim)
    qkv = random(3, (heads + 2 * kv_heads) * dim) * torch.logspace(-3, 3, dim).repeat(heads + 2 * kv_heads)
    qkv[2, 5 * dim], qkv[2, 6 * dim] = 1e9, torch.nan  # of V
    norm, slots = random(heads + kv_heads, dim), torch.tensor([5, -1, 8])
    angles = torch.tensor([0.0, 5.0, 40.0])[:, None] * inverse_frequencies(turned, 1e4) if turned else None
    cos_sin = [] if angles is None else [angles.cos(), angles.sin()]
    cache = torch.full((5, 2, kv_heads, block_size, dim), torch.nan, dtype=codes)
    numbers = torch.full(cache.shape, torch.nan, dtype=torch.float64)
    qk_norm_rope_reference(qkv.double(), norm, cos_sin, slots, numbers, [heads, 0], EPS)
    qk_norm_rope(qkv, norm, cos_sin, slots, cache, [heads, 0], [EPS, *scales], False)

    found = cache.double()
    assert torch.equal(found.isnan(), numbers.isnan())
    most, bits = torch.finfo(codes).max, FRACTIONS[codes]
    exact = (numbers / torch.tensor(scales, dtype=torch.float64)[:, None, None, None]).clamp(-most, most)
    step = 2.0 ** (exact.abs().log2().floor().clamp(min=math.log2(torch.finfo(codes).smallest_normal)) - bits)
    assert (((found - exact).abs() <= step * (0.5 + 1e-4)) | exact.isnan()).all()
    assert (found.abs() == most).any()
    assert (found[1, 1, 0, 1] != found[1, 0, 0, 1]).any()
