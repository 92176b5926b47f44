"""Noise on the device against the Rust core: words and uniforms to the bit, Gumbel values to 2 ulp."""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.core import PURPOSE_ACCEPT, PURPOSE_DRAFT, PURPOSE_GUMBEL, PURPOSE_RECOVER
from specrs.kernels.cuda.philox import fill_noise, fill_noise_reference, gumbel_from_word

from .launch import directly

INT64 = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1), st.sampled_from([0, 1, -1, 1 << 32, (1 << 32) - 1, -(1 << 63)])
)
PURPOSES = [PURPOSE_DRAFT, PURPOSE_ACCEPT, PURPOSE_RECOVER, PURPOSE_GUMBEL]


def both(seeds: list[int], positions: list[int], purpose: int, v: int, gumbel: bool) -> tuple[np.ndarray, np.ndarray]:
    out, expected = torch.full((len(seeds), v), torch.nan), torch.full((len(seeds), v), torch.nan)
    args = torch.tensor(seeds, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64), purpose
    fill_noise(*args, out, gumbel)
    fill_noise_reference(*args, expected, gumbel)
    return out.numpy(), expected.numpy()


@settings(max_examples=12, deadline=None)
@given(
    rows=st.lists(st.tuples(INT64, INT64), min_size=1, max_size=3),
    purpose=st.sampled_from(PURPOSES),
    v=st.sampled_from([1, 2, 5, 257, 1024, 1030]),
)
def test_the_same_noise_as_the_core(rows: list[tuple[int, int]], purpose: int, v: int) -> None:
    seeds, positions = [s for s, _ in rows], [p for _, p in rows]
    uniforms, expected = both(seeds, positions, purpose, v, gumbel=False)
    np.testing.assert_array_equal(uniforms.view(np.int32), expected.view(np.int32))
    values, expected = both(seeds, positions, purpose, v, gumbel=True)
    # The core itself is within 1 ulp down to 2^-16, and within 2^-40 closer to the root.
    np.testing.assert_array_less(np.abs(values - expected), 2 * np.spacing(np.abs(expected)) + 2.0**-39)


def test_known_answers_of_random123() -> None:
    # Counter (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344) needs a purpose that no stream has; zeros do not.
    uniforms, _ = both([0], [0], PURPOSE_DRAFT, 4, gumbel=False)
    words = np.array([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8])
    np.testing.assert_array_equal(uniforms[0], ((words >> 9) + 0.5) * 2.0**-23)


def test_every_lane_and_purpose_is_its_own_stream() -> None:
    drawn = [both([7], [3], purpose, 64, gumbel=False)[0][0] for purpose in PURPOSES]
    assert len(np.unique(np.concatenate(drawn))) == 4 * 64


@triton.jit
def gumbel_of_words(words, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out + at, gumbel_from_word(tl.load(words + at).to(tl.uint32)))


def test_gumbel_values_of_the_ends_and_near_the_root() -> None:
    """Check Gumbel values at the ends of the range and near their root (u = 1 / e) against the standard library's
    logarithms."""
    root = int(math.exp(-1.0) * 2**32)
    ends = [*range(400), *(2**32 - 1 - i for i in range(400))]
    words = np.array([*ends, *range(root - 100, root + 100), *(i * 2654435761 % 2**32 for i in range(1048))])
    out = torch.empty(len(words))
    directly(lambda *on: gumbel_of_words[(1,)](*on, BLOCK=len(words)), torch.from_numpy(words), out)
    small = [-math.log((w + 0.5) / 2**32) if w < 2**31 else -math.log1p(-(2**32 - 0.5 - w) / 2**32) for w in words]
    exact = np.array([-math.log(e) for e in small])
    allowed = np.where(np.abs(exact) >= 2.0**-16, np.spacing(np.abs(exact).astype(np.float32)), 2.0**-40)
    assert (np.abs(out.numpy() - exact) <= allowed).all()
