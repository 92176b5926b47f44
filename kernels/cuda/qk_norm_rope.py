"""Work between the QKV projection and attention: norms of q and k, rotation, and the write of k and v into the cache.
Attends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import options, start_next, wait_for_previous
from specrs.kernels.cuda._kv_codes import encoded
from specrs.kernels.cuda.variants import Variant
from specrs.kernels.kv_codes import FRACTIONS, encode, fraction_of
from torch import Tensor

_BLOCK_HEADS = 4
_WARP = 1024
"""Number of pairs of features per warp if a program has all heads of a row: 32 per thread."""


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
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    ANGLES: tl.constexpr,
    WHOLE: tl.constexpr,
    NORMS_V: tl.constexpr,
    K_IS_V: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FRACTION: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # In this order the kernel after this one starts when all those ahead of it are finished, and may read what they
    # wrote before it waits itself.
    wait_for_previous(DEPENDENT)
    start_next(DEPENDENT)
    # A head is two halves that are rotated, and the rest. Features that are rotated with each other are half a head
    # apart, or neighbours.
    D: tl.constexpr = 2 * HALF + REST
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    NEXT: tl.constexpr = 1 if INTERLEAVED else HALF
    tl.static_assert(not (INTERLEAVED and REST > 0))
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    i = tl.arange(0, BLOCK_HALF)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (i < HALF)[None, :]
    is_qk = (head < HEADS + KV_HEADS)[:, None]
    rotated = is_qk & (i < HALF)[None, :]
    feature = (STEP * i)[None, :]
    place = head[:, None] * D + feature
    # Values that are keys are read where the keys are.
    read = tl.where(head < HEADS + KV_HEADS, head, head - KV_HEADS)[:, None] * D + feature if K_IS_V else place
    source = qkv + row * qkv_stride + read
    first = tl.load(source, mask=inside, other=0).to(tl.float32)
    second = tl.load(source + NEXT, mask=inside, other=0).to(tl.float32)
    if REST > 0:
        j = 2 * HALF + tl.arange(0, BLOCK_REST)
        after = (head < HEADS + 2 * KV_HEADS)[:, None] & (j < D)[None, :]
        rest_place = head[:, None] * D + j[None, :]
        tl.static_assert(not (K_IS_V or NORMS_V))
        rest = tl.load(qkv + row * qkv_stride + rest_place, mask=after, other=0).to(tl.float32)
    if qk_norm is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        mean = squares / D
        if WHOLE:
            of_q = tl.sum(tl.where(head < HEADS, mean, 0), 0) / HEADS
            of_k = tl.sum(tl.where((head >= HEADS) & (head < HEADS + KV_HEADS), mean, 0), 0) / KV_HEADS
            mean = tl.where(head < HEADS, of_q, of_k)
        scale = tl.rsqrt(mean + eps)[:, None]
        normed = inside if NORMS_V else rotated
        first = tl.where(normed, first * scale * tl.load(qk_norm + place, mask=normed, other=0).to(tl.float32), first)
        norm = tl.load(qk_norm + NEXT + place, mask=normed, other=0).to(tl.float32)
        second = tl.where(normed, second * scale * norm, second)
        if REST > 0:
            norm = tl.load(qk_norm + rest_place, mask=after & is_qk, other=0).to(tl.float32)
            rest = tl.where(is_qk, rest * scale * norm, rest)
    # What becomes a code is rounded to that alone; what does not takes fewer registers the sooner it is rounded.
    ROTATED: tl.constexpr = tl.float32 if FRACTION > 0 else qkv.dtype.element_ty
    if cos is not None:
        c = tl.load(cos + row * ANGLES + i, mask=i < HALF, other=0)[None, :]
        s = tl.load(sin + row * ANGLES + i, mask=i < HALF, other=0)[None, :]
        turned = tl.where(rotated, first * c - second * s, first).to(ROTATED)
        second = tl.where(rotated, second * c + first * s, second).to(ROTATED)
    else:
        turned = first.to(ROTATED)
        second = second.to(ROTATED)

    is_q = inside & (head < HEADS)[:, None]
    tl.store(source, turned.to(qkv.dtype.element_ty), mask=is_q)
    tl.store(source + NEXT, second.to(qkv.dtype.element_ty), mask=is_q)
    slot = tl.load(slots + row + 0 * head)
    written = inside & ((head >= HEADS) & (slot >= 0))[:, None]
    block = slot // BLOCK_SIZE * (2 * KV_HEADS) + (head - HEADS)
    place = (block * BLOCK_SIZE + slot % BLOCK_SIZE)[:, None] * D
    target = cache + place + feature
    if FRACTION > 0:
        kv_scale = tl.where(is_qk, k_scale, v_scale)
        turned = encoded(turned, kv_scale, FRACTION)
        second = encoded(second, kv_scale, FRACTION)
    tl.store(target, turned.to(cache.dtype.element_ty), mask=written)
    tl.store(target + NEXT, second.to(cache.dtype.element_ty), mask=written)
    if REST > 0:
        rest_target = qkv + row * qkv_stride + rest_place
        tl.store(rest_target, rest.to(qkv.dtype.element_ty), mask=after & (head < HEADS)[:, None])
        if FRACTION > 0:
            rest = encoded(rest, kv_scale, FRACTION)
        kept = after & ((head >= HEADS) & (slot >= 0))[:, None]
        tl.store(cache + place + j[None, :], rest.to(cache.dtype.element_ty), mask=kept)


@torch.library.custom_op("specrs::qk_norm_rope", mutates_args=("qkv", "cache"))
def qk_norm_rope(
    qkv: Tensor,
    qk_norm: Tensor | None,
    angles: list[Tensor],
    slots: Tensor,
    cache: Tensor,
    shape: list[int],
    floats: list[float],
    dependent: bool,
) -> None:
    """Norm and rotate the q heads in place, and write the k heads, normed and rotated, and the v heads into the cache.

    Args:
        qkv: `[N, (heads + 2 * kv_heads) * D]`, contiguous rows of any stride: the q, k and v heads of each row. Its k
            and v are left as they were. With kv_heads fewer heads, there is no v: v is k before norm and rotation. With
            q heads alone nothing is written into the cache.
        qk_norm: `[heads + kv_heads, D]` weights of the RMSNorm of each head; `[heads + 2 * kv_heads, D]`: v heads are
            normed, too; `[heads, D]`, if there are only q heads; `[(heads + kv_heads) * D]`: of one norm over all q
            heads and one over all k heads; or None.
        angles: cos and sin of `embed`, `[N, R / 2]` fp32, rows of one stride, of the first R <= D features of a head;
            the others are not rotated. []: none are.
        slots: `[N]` int64; -1 writes nothing.
        cache: one layer, `[num_blocks + 1, 2, kv_heads, block_size, D]` contiguous, of qkv's dtype or of codes (see
            `kv_codes`).
        shape: heads of q; and 1 if features 2i and 2i + 1 of a head are rotated with each other, which needs R = D,
            or 0 if features i and i + R / 2 are.
        floats: eps of the norms, and the scales of K and V in a cache of codes (`KVScales`), without meaning elsewhere.
        dependent: launch dependently (see `_dependent_launch`).

    Everything is computed in fp32 and rounded once. No two rows may have the same slot.
    """
    num_heads, interleaved = shape
    _check(qkv, qk_norm, angles, slots, cache, num_heads)
    block_size, dim = cache.shape[3:]
    kv_heads, k_is_v = _projected(qkv, cache, num_heads)
    heads, whole = num_heads + 2 * kv_heads, qk_norm is not None and qk_norm.dim() == 1
    constants = _constants(num_heads, kv_heads, dim, 2 * angles[0].shape[1] if angles else dim, whole)
    constants |= {"ANGLES": angles[0].stride(0)} if angles else {}
    constants["NORMS_V"] = kv_heads > 0 and qk_norm is not None and qk_norm.shape[0] == heads
    constants["K_IS_V"], constants["INTERLEAVED"] = k_is_v, bool(interleaved)
    fraction = fraction_of(cache.dtype)
    qk_norm_rope_kernel[(qkv.shape[0], triton.cdiv(heads, constants["BLOCK_HEADS"]))](
        qkv,
        qk_norm,
        *(angles or (None, None)),
        slots,
        cache.view(torch.uint8) if fraction else cache,
        qkv.stride(0),
        floats[0],
        *(floats[1:] if fraction else (None, None)),
        BLOCK_SIZE=block_size,
        FRACTION=fraction,
        **constants,
        num_warps=_num_warps(constants),
        **options(dependent),
    )


def _projected(qkv: Tensor, cache: Tensor, num_heads: int) -> tuple[int, bool]:
    """Return the number of key heads in `qkv`, and whether values are the keys. `cache` is the layer's."""
    kv_heads, dim = cache.shape[2], cache.shape[4]
    projected = qkv.shape[1] // dim - num_heads
    assert projected in (0, kv_heads, 2 * kv_heads)
    return (kv_heads if projected else 0), projected == kv_heads


def _constants(num_heads: int, kv_heads: int, dim: int, rotated: int, whole: bool) -> dict[str, Any]:
    """Return the kernel's constants for heads of `dim` features, the first `rotated` of them rotated. With `whole`, one
    program normalizes all heads of a row."""
    rest = dim - rotated
    return {
        "HEADS": num_heads,
        "KV_HEADS": kv_heads,
        "HALF": rotated // 2,
        "REST": rest,
        "ANGLES": rotated // 2,
        "WHOLE": whole,
        "NORMS_V": False,
        "K_IS_V": False,
        "INTERLEAVED": False,
        "BLOCK_HEADS": triton.next_power_of_2(num_heads + 2 * kv_heads) if whole else _BLOCK_HEADS,
        "BLOCK_HALF": triton.next_power_of_2(rotated // 2),
        "BLOCK_REST": triton.next_power_of_2(rest) if rest else 1,
    }


def _num_warps(constants: Mapping[str, Any]) -> int:
    pairs = constants["BLOCK_HEADS"] * constants["BLOCK_HALF"]
    return max(1, min(16, pairs // _WARP)) if constants["WHOLE"] else 1


@qk_norm_rope.register_fake
def _(
    qkv: Tensor,
    qk_norm: Tensor | None,
    angles: list[Tensor],
    slots: Tensor,
    cache: Tensor,
    shape: list[int],
    floats: list[float],
    dependent: bool,
) -> None:
    _check(qkv, qk_norm, angles, slots, cache, shape[0])


def _check(
    qkv: Tensor, qk_norm: Tensor | None, angles: list[Tensor], slots: Tensor, cache: Tensor, num_heads: int
) -> None:
    rows, dim = qkv.shape[0], cache.shape[4]
    kv_heads, k_is_v = _projected(qkv, cache, num_heads)
    assert qkv.shape[1] == (num_heads + (1 if k_is_v else 2) * kv_heads) * dim
    assert qkv.stride(1) == 1
    if qk_norm is not None:
        normed = [(num_heads + kv_heads, dim), (num_heads + 2 * kv_heads, dim), ((num_heads + kv_heads) * dim,)]
        assert qk_norm.shape in normed
        assert qk_norm.is_contiguous()
    if angles:
        cos, sin = angles
        assert cos.shape == sin.shape == (rows, cos.shape[1])
        assert 0 < 2 * cos.shape[1] <= dim
        assert cos.stride() == sin.stride()
        assert cos.stride(1) == 1
    assert slots.shape == (rows,)
    assert cache.is_contiguous()
    assert cache.dtype == qkv.dtype or cache.dtype in FRACTIONS


def qk_norm_rope_reference(
    qkv: Tensor,
    qk_norm: Tensor | None,
    angles: Sequence[Tensor],
    slots: Tensor,
    cache: Tensor,
    shape: Sequence[int],
    eps: float,
    kv_scales: Sequence[float] = (1.0, 1.0),
) -> None:
    """Do what `qk_norm_rope` does, in plain torch in float64, rounded once."""
    (num_heads, interleaved), (block_size, dim) = shape, cache.shape[3:]
    kv_heads, k_is_v = _projected(qkv, cache, num_heads)
    heads = qkv.reshape(qkv.shape[0], -1, dim)
    x = heads[:, : num_heads + kv_heads].to(torch.float64, copy=True)
    v = heads[:, -kv_heads:].double() if kv_heads else x[:, :0]
    assert k_is_v or heads.shape[1] == num_heads + 2 * kv_heads
    if qk_norm is not None and len(qk_norm) == num_heads + 2 * kv_heads:
        v = v / (v.square().mean(2, keepdim=True) + eps).sqrt() * qk_norm[num_heads + kv_heads :].double()
        qk_norm = qk_norm[: num_heads + kv_heads]
    if qk_norm is not None:
        parts = torch.split(x, [num_heads, kv_heads] if qk_norm.dim() == 1 else 1, dim=1)
        over = (1, 2)
        scales = [(y.square().mean(over, keepdim=True) + eps).rsqrt().expand_as(y) for y in parts]
        x = x * torch.cat(scales, dim=1) * qk_norm.double().view(-1, dim)
    if angles:
        c, s = (values.double()[:, None] for values in angles)
        half = c.shape[2]
        first, second, rest = torch.split(x, [half, half, dim - 2 * half], dim=-1)
        if interleaved:
            first, second = x[..., ::2], x[..., 1::2]
        turned = first * c - second * s, second * c + first * s
        x = torch.stack(turned, dim=-1).flatten(2) if interleaved else torch.cat((*turned, rest), dim=-1)
    qkv[:, : num_heads * dim] = x[:, :num_heads].flatten(1).to(qkv.dtype)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0 and kv_heads:
            block, offset = divmod(slot, block_size)
            written = x[row, num_heads:], v[row]
            for at, (part, scale) in enumerate(zip(written, kv_scales, strict=True)):
                codes = cache.dtype in FRACTIONS
                cache[block, at, :, offset] = encode(part, scale, cache.dtype) if codes else part.to(cache.dtype)


def _variant(
    name: str,
    dtype: str,
    dim: int,
    *,
    normed: bool,
    rotated: int | None = None,
    whole: bool = False,
    fraction: int = 0,
    own: Mapping[str, Any] | None = None,
) -> Variant:
    """Return a variant to compile for 16 query and 8 KV heads. `rotated` 0: no rotation; `fraction`: fraction bits of
    FP8 codes in the cache, 0 for a cache of `dtype`; `own`: further constants."""
    present = {"qkv": f"*{dtype}", "slots": "*i64", "cache": f"*{dtype}", "qkv_stride": "i32", "eps": "fp32"}
    present |= {"cache": "*u8", "k_scale": "fp32", "v_scale": "fp32"} if fraction else {}
    present |= {"qk_norm": f"*{dtype}"} if normed else {}
    present |= {} if rotated == 0 else {"cos": "*fp32", "sin": "*fp32"}
    constants = _constants(16, 8, dim, rotated or dim, whole) | dict(own or {})
    absent = {arg: None for arg in ("qk_norm", "cos", "sin", "k_scale", "v_scale") if arg not in present}
    return Variant(
        name,
        qk_norm_rope_kernel,
        present,
        constants | {"BLOCK_SIZE": 16, "FRACTION": fraction, "DEPENDENT": False} | absent,
        num_warps=_num_warps(constants),
        aligned=("qkv_stride",),
    )


VARIANTS = (
    *(
        _variant(f"qk_norm_rope_{dtype}_d{dim}{'_normed' * normed}", dtype, dim, normed=normed)
        for dtype, dim, normed in (("bf16", 128, True), ("bf16", 64, False), ("bf16", 96, False), ("fp16", 256, True))
    ),
    _variant("qk_norm_rope_bf16_d128_whole", "bf16", 128, normed=True, whole=True),
    _variant("qk_norm_rope_bf16_d128_rotated96", "bf16", 128, normed=False, rotated=96),
    _variant("qk_norm_rope_bf16_d128_unrotated", "bf16", 128, normed=False, rotated=0),
    _variant("qk_norm_rope_bf16_d128_normed_e4m3", "bf16", 128, normed=True, fraction=3),
    _variant("qk_norm_rope_bf16_d128_rotated96_e5m2", "bf16", 128, normed=False, rotated=96, fraction=2),
    _variant("qk_norm_rope_bf16_d256_values", "bf16", 256, normed=True, own={"ANGLES": 256, "NORMS_V": True}),
    _variant("qk_norm_rope_bf16_d512_keys_are_values", "bf16", 512, normed=True, own={"NORMS_V": True, "K_IS_V": True}),
    _variant("qk_norm_rope_bf16_d128_normed_interleaved", "bf16", 128, normed=True, own={"INTERLEAVED": True}),
    _variant("qk_norm_rope_bf16_d512_queries", "bf16", 512, normed=True, own={"KV_HEADS": 0}),
)
