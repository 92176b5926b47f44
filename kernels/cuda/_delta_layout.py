"""Sizes of a gated delta net, and where its heads lie in the output of its input projection. Launches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

COLUMNS = 16
"""Number of columns of a head's state that one program of the delta rule computes. A warp holds 16 columns of 128 keys
in 64 registers per thread, so that a sum over keys needs no shared memory."""
Sizes = Sequence[int]
"""Type of the sizes of a delta net, a tuple of six integers: number of key heads, number of value heads, features of a
key head, features of a value head, positions that the convolution reads, and 1 if the projection's outputs are grouped
by key head, else 0. `specrs.models.delta_net.DeltaNet` describes them."""


def sizes_of(sizes: Sizes) -> dict[str, Any]:
    """Return the constants of kernels for these sizes."""
    key_heads, value_heads, key_dim, value_dim, kernel, by_key_head = sizes
    return {
        "KEY_HEADS": key_heads,
        "VALUE_HEADS": value_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KERNEL": kernel,
        "BY_KEY_HEAD": bool(by_key_head),
    }


def conv_dim(sizes: Sizes) -> int:
    """Return the number of features of q, k and v together, which the convolution mixes."""
    key_heads, value_heads, key_dim, value_dim = sizes[:4]
    return 2 * key_heads * key_dim + value_heads * value_dim


def outputs(sizes: Sizes) -> int:
    """Return the number of outputs of the input projection: q, k, v and z features, and b and a of value heads."""
    return conv_dim(sizes) + sizes[1] * sizes[3] + 2 * sizes[1]


def slices(sizes: Sizes) -> int:
    """Return the number of programs that share the state of a head."""
    return -(-sizes[3] // COLUMNS)


@triton.jit
def channel_column(  # type: ignore[no-untyped-def]
    channel,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BY_KEY_HEAD: tl.constexpr,
):
    """Return the projection's output that is `channel` of q, k and v of all heads."""
    if not BY_KEY_HEAD:
        return channel
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    WIDTH: tl.constexpr = 2 * KEY_DIM + 2 * SHARED * VALUE_DIM
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    of_keys = channel % KEYS
    key = of_keys // KEY_DIM * WIDTH + channel // KEYS * KEY_DIM + of_keys % KEY_DIM
    of_values = channel - 2 * KEYS
    head = of_values // VALUE_DIM
    value = head // SHARED * WIDTH + 2 * KEY_DIM + head % SHARED * VALUE_DIM + of_values % VALUE_DIM
    return tl.where(channel < 2 * KEYS, key, value)


@triton.jit
def gate_column(  # type: ignore[no-untyped-def]
    head,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BY_KEY_HEAD: tl.constexpr,
):
    """Return the projection's output that is the first z feature of a value head."""
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    if BY_KEY_HEAD:
        first = head // SHARED * (2 * KEY_DIM + 2 * SHARED * VALUE_DIM)
        return first + 2 * KEY_DIM + SHARED * VALUE_DIM + head % SHARED * VALUE_DIM
    return 2 * KEY_HEADS * KEY_DIM + (VALUE_HEADS + head) * VALUE_DIM


@triton.jit
def number_columns(  # type: ignore[no-untyped-def]
    head,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BY_KEY_HEAD: tl.constexpr,
):
    """Return the projection's outputs that are b and a of a value head."""
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    FIRST: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + 2 * VALUE_HEADS * VALUE_DIM
    if BY_KEY_HEAD:
        b = FIRST + head // SHARED * (2 * SHARED) + head % SHARED
        return b, b + SHARED
    return FIRST + head, FIRST + VALUE_HEADS + head
