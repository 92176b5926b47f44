"""Norms, rotates and caches the heads of q, k and v while their product has them in registers. Multiplies nothing.

The result is that of `qk_norm_rope`, which serves products of many rows and the cases that are not handled here. A tile
of the product has both halves of one head for all rows. So a feature and the one that it is rotated with are in one
thread, and a norm's sum is in one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._kv_codes import encoded
from specrs.kernels.kv_codes import FRACTIONS, fraction_of
from torch import Tensor

WIDTHS = (64, 128)
"""Numbers of features per head for which products on a GPU can handle heads."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Arguments with which a product handles its heads of D features. Fields are those of `qk_norm_rope`."""

    qk_norm: Tensor | None
    """[heads + kv_heads, D]; None: no norms. Only `qk_norm_rope` can apply one norm over all heads."""
    angles: Sequence[Tensor]
    """cos and sin, [M, D / 2] fp32; empty: no rotation. Only `qk_norm_rope` can rotate a part of a head."""
    slots: Tensor
    """[M] int64 cache slots of the rows; -1 writes nothing."""
    cache: Tensor
    """[num_blocks + 1, 2, kv_heads, block_size, D], into which K and V are written."""
    num_heads: int
    eps: float
    kv_scales: tuple[float, float]


@triton.jit
def head_places(slots, cos, sin, token, there, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load values that are the same for all heads: slots `[M]`, and cos and sin `[HALF, M]`, which are zeros without a
    rotation."""
    slot = tl.load(slots + token, mask=there, other=-1)
    c = tl.zeros([HALF, token.shape[0]], tl.float32)
    s = tl.zeros([HALF, token.shape[0]], tl.float32)
    if cos is not None:
        place = token[None, :] * HALF + tl.arange(0, HALF)[:, None]
        c = tl.load(cos + place, mask=there[None, :], other=0)
        s = tl.load(sin + place, mask=there[None, :], other=0)
    return slot, c, s


@triton.jit
def store_head(  # type: ignore[no-untyped-def]
    first,
    second,
    head,
    token,
    there,
    slot,
    c,
    s,
    out,
    out_stride,
    qk_norm,
    cos,
    cache,
    eps,
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FRACTION: tl.constexpr,
):
    """Norm, rotate and store one head from the sums of its two halves, fp32 `[HALF, M]`. The sums are first rounded as
    a product without heads would round them."""
    i = tl.arange(0, HALF)
    first = first.to(out.dtype.element_ty).to(tl.float32)
    second = second.to(out.dtype.element_ty).to(tl.float32)
    is_qk = head < HEADS + KV_HEADS
    if qk_norm is not None:
        norm = qk_norm + tl.minimum(head, HEADS + KV_HEADS - 1) * (2 * HALF) + i
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)[None, :]
        first = tl.where(is_qk, first * scale * tl.load(norm).to(tl.float32)[:, None], first)
        second = tl.where(is_qk, second * scale * tl.load(norm + HALF).to(tl.float32)[:, None], second)
    if cos is not None:
        turned = tl.where(is_qk, first * c - second * s, first)
        second = tl.where(is_qk, second * c + first * s, second)
        first = turned
    if head < HEADS:
        place = out + token.to(tl.int64)[None, :] * out_stride + head * (2 * HALF) + i[:, None]
        tl.store(place, first.to(out.dtype.element_ty), mask=there[None, :])
        tl.store(place + HALF, second.to(out.dtype.element_ty), mask=there[None, :])
    else:
        block = slot // BLOCK_SIZE * (2 * KV_HEADS) + (head - HEADS)
        target = cache + ((block * BLOCK_SIZE + slot % BLOCK_SIZE) * (2 * HALF))[None, :] + i[:, None]
        written = (slot >= 0)[None, :]
        if FRACTION > 0:
            kv_scale = tl.where(is_qk, k_scale, v_scale)
            tl.store(target, encoded(first, kv_scale, FRACTION), mask=written)
            tl.store(target + HALF, encoded(second, kv_scale, FRACTION), mask=written)
        else:
            tl.store(target, first.to(cache.dtype.element_ty), mask=written)
            tl.store(target + HALF, second.to(cache.dtype.element_ty), mask=written)


def head_arguments(heads: Heads | None) -> tuple[list[Tensor | None], list[float | None], dict[str, int]]:
    """Return the pointers, numbers and constants of the product's kernel. `heads` None: the output is not heads."""
    if heads is None:
        return [None] * 5, [None] * 3, {"HEADS": 0, "KV_HEADS": 0, "BLOCK_SIZE": 1, "FRACTION": 0}
    fraction, (kv_heads, block_size) = fraction_of(heads.cache.dtype), heads.cache.shape[2:4]
    cache = heads.cache.view(torch.uint8) if fraction else heads.cache
    constants = {"HEADS": heads.num_heads, "KV_HEADS": kv_heads, "BLOCK_SIZE": block_size, "FRACTION": fraction}
    scales: Any = heads.kv_scales if fraction else (None, None)
    return [heads.qk_norm, *(heads.angles or (None, None)), heads.slots, cache], [heads.eps, *scales], constants


def check_heads(heads: Heads, x: Tensor, out: Tensor, features: int, block_n: int) -> None:
    """Raise AssertionError for operands that the kernel would read past, and if a tile is not exactly one head."""
    rows, (kv_heads, _, dim) = x.shape[0], heads.cache.shape[2:]
    assert out.shape == (rows, features)
    assert features == (heads.num_heads + 2 * kv_heads) * dim
    assert 2 * block_n == dim, f"a tile has {2 * block_n} features and a head {dim}"
    if heads.qk_norm is not None:
        assert heads.qk_norm.shape == (heads.num_heads + kv_heads, dim)
        assert heads.qk_norm.is_contiguous()
    for values in heads.angles:
        assert values.shape == (rows, dim // 2)
        assert values.is_contiguous()
    assert heads.slots.shape == (rows,)
    assert heads.cache.is_contiguous()
    assert heads.cache.dtype == out.dtype or heads.cache.dtype in FRACTIONS
