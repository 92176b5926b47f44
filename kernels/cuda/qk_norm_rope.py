"""Between the QKV projection and attention: norms of q and k, rotation, and the write of k and v. Attends nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import options, start_next, wait_for_previous
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_BLOCK_HEADS = 4


@triton.jit
def qk_norm_rope_kernel(  # type: ignore[no-untyped-def]
    qkv,
    qk_norm,
    cos,
    sin,
    slots,
    cache,
    qkv_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # In this order the kernel behind this one starts when all those ahead of it are finished, and may read what they
    # wrote before it waits itself.
    wait_for_previous(DEPENDENT)
    start_next(DEPENDENT)
    D: tl.constexpr = 2 * HALF
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    i = tl.arange(0, BLOCK_HALF)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (i < HALF)[None, :]
    rotated = (head < HEADS + KV_HEADS)[:, None] & (i < HALF)[None, :]
    place = head[:, None] * D + i[None, :]
    source = qkv + row * qkv_stride + place
    first = tl.load(source, mask=inside, other=0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0).to(tl.float32)
    if qk_norm is not None:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
        first = tl.where(rotated, first * scale * tl.load(qk_norm + place, mask=rotated, other=0).to(tl.float32), first)
        norm = tl.load(qk_norm + HALF + place, mask=rotated, other=0).to(tl.float32)
        second = tl.where(rotated, second * scale * norm, second)
    c = tl.load(cos + row * HALF + i, mask=i < HALF, other=0)[None, :]
    s = tl.load(sin + row * HALF + i, mask=i < HALF, other=0)[None, :]
    turned = tl.where(rotated, first * c - second * s, first).to(qkv.dtype.element_ty)
    second = tl.where(rotated, second * c + first * s, second).to(qkv.dtype.element_ty)

    is_q = inside & (head < HEADS)[:, None]
    tl.store(source, turned, mask=is_q)
    tl.store(source + HALF, second, mask=is_q)
    slot = tl.load(slots + row + 0 * head)
    written = inside & ((head >= HEADS) & (slot >= 0))[:, None]
    block = slot // BLOCK_SIZE * (2 * KV_HEADS) + (head - HEADS)
    target = cache + (block * BLOCK_SIZE + slot % BLOCK_SIZE)[:, None] * D + i[None, :]
    tl.store(target, turned, mask=written)
    tl.store(target + HALF, second, mask=written)


@torch.library.custom_op("specrs::qk_norm_rope", mutates_args=("qkv", "cache"))
def qk_norm_rope(
    qkv: Tensor,
    qk_norm: Tensor | None,
    angles: list[Tensor],
    slots: Tensor,
    cache: Tensor,
    num_heads: int,
    eps: float,
    dependent: bool,
) -> None:
    """Norm and rotate the q heads in place, and write the k heads, normed and rotated, and the v heads into the cache.

    Args:
        qkv: `[N, (heads + 2 * kv_heads) * D]`, contiguous rows of any stride: the q, k and v heads of each row. Its k
            and v are left as they were.
        qk_norm: `[heads + kv_heads, D]` weights of the RMSNorm of each head, or None.
        angles: cos and sin, `[N, D / 2]` fp32, of `embed`.
        slots: `[N]` int64; -1 writes nothing.
        cache: one layer, `[num_blocks + 1, 2, kv_heads, block_size, D]` contiguous, of qkv's dtype.
        num_heads: heads of q.
        dependent: launch dependently (see `_dependent_launch`).

    Everything is computed in fp32 and rounded once. No two rows may have the same slot.
    """
    _check(qkv, qk_norm, angles, slots, cache, num_heads)
    kv_heads, block_size, dim = cache.shape[2:]
    qk_norm_rope_kernel[(qkv.shape[0], triton.cdiv(num_heads + 2 * kv_heads, _BLOCK_HEADS))](
        qkv,
        qk_norm,
        *angles,
        slots,
        cache,
        qkv.stride(0),
        eps,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        BLOCK_SIZE=block_size,
        BLOCK_HEADS=_BLOCK_HEADS,
        BLOCK_HALF=triton.next_power_of_2(dim // 2),
        num_warps=1,
        **options(dependent),
    )


@qk_norm_rope.register_fake
def _(
    qkv: Tensor,
    qk_norm: Tensor | None,
    angles: list[Tensor],
    slots: Tensor,
    cache: Tensor,
    num_heads: int,
    eps: float,
    dependent: bool,
) -> None:
    _check(qkv, qk_norm, angles, slots, cache, num_heads)


def _check(
    qkv: Tensor, qk_norm: Tensor | None, angles: list[Tensor], slots: Tensor, cache: Tensor, num_heads: int
) -> None:
    cos, sin = angles
    rows, kv_heads, dim = qkv.shape[0], cache.shape[2], cache.shape[4]
    assert qkv.shape[1] == (num_heads + 2 * kv_heads) * dim
    assert qkv.stride(1) == 1
    assert qk_norm is None or (qk_norm.shape == (num_heads + kv_heads, dim) and qk_norm.is_contiguous())
    assert cos.shape == sin.shape == (rows, dim // 2)
    assert slots.shape == (rows,)
    assert cache.is_contiguous()
    assert cache.dtype == qkv.dtype


def qk_norm_rope_reference(
    qkv: Tensor,
    qk_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    num_heads: int,
    eps: float,
) -> None:
    """`qk_norm_rope` in plain torch, in float64 and rounded once."""
    kv_heads, block_size, dim = cache.shape[2:]
    heads = qkv.view(qkv.shape[0], -1, dim)
    x = heads[:, : num_heads + kv_heads].double()
    if qk_norm is not None:
        x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * qk_norm.double()
    first, second = x.chunk(2, dim=-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    x = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    heads[:, :num_heads] = x[:, :num_heads].to(qkv.dtype)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            cache[block, 0, :, offset] = x[row, num_heads:].to(cache.dtype)
            cache[block, 1, :, offset] = heads[row, num_heads + kv_heads :]


VARIANTS = tuple(
    Variant(
        f"qk_norm_rope_{dtype}_d{dim}{'_normed' * normed}",
        qk_norm_rope_kernel,
        {
            "qkv": f"*{dtype}",
            "cos": "*fp32",
            "sin": "*fp32",
            "slots": "*i64",
            "cache": f"*{dtype}",
            "qkv_stride": "i32",
            "eps": "fp32",
        }
        | ({"qk_norm": f"*{dtype}"} if normed else {}),
        {
            "HEADS": 16,
            "KV_HEADS": 8,
            "HALF": dim // 2,
            "BLOCK_SIZE": 16,
            "BLOCK_HEADS": _BLOCK_HEADS,
            "BLOCK_HALF": triton.next_power_of_2(dim // 2),
            "DEPENDENT": False,
        }
        | ({} if normed else {"qk_norm": None}),
        num_warps=1,
        aligned=("qkv_stride",),
    )
    for dtype, dim, normed in (("bf16", 128, True), ("bf16", 64, False), ("bf16", 96, False), ("fp16", 256, True))
)
