"""Products of few rows with a weight, fused with the operations before and after them: at most 64 rows, of a draft 128.
Packs no weights.

Two products share an RMSNorm. The one that adds to the residual stream h also writes `round(g h)`, with g the weight of
the next norm, and sums of squares of h by tile. The one that reads the stream divides its sums by the root of their
mean: `W (g h) / rms(h)`. So no product's loop loads anything but weights and rows.

A decode pass reads every weight once, so the kernel has to keep the memory busy. Weights are on the tensor core's M
side, and rows, padded to 16, on its N side. The work, which is tiles of the output times steps along the input, is
divided evenly among a fixed number of programs, whatever the number of tiles. Programs that share a tile write partial
sums, and the one that arrives last adds them in the order of the steps. So timing does not change the order of a sum.
Nor does the number of rows, except that sums of squares follow the layout of a tile, which has 16, 32, 64 or 128
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._codes import (
    DENSE,
    INT4,
    MXFP4,
    add_step,
    coding_as_list,
    coding_constants,
    coding_of,
    scale_of,
)
from specrs.kernels.cuda._dependent_launch import options, prefetch, start_next, wait_for_previous
from specrs.kernels.cuda._heads import Heads, head_arguments, head_places, store_head
from specrs.kernels.cuda.activation import activation
from specrs.kernels.cuda.configs import LinearConfig
from specrs.kernels.cuda.linear_product import Added, Next, Product, block_m, check_product
from torch import Tensor


@triton.jit
def _segment(p, TOTAL: tl.constexpr, PROGRAMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first of the steps that program p computes. Steps are counted over all tiles."""
    return p * (TOTAL // PROGRAMS) + p * (TOTAL % PROGRAMS) // PROGRAMS


@triton.jit
def _owner(step, TOTAL: tl.constexpr, PROGRAMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the program that has `step`: the largest p whose first step is not after it."""
    return ((step + 1) * PROGRAMS - 1) // TOTAL


@triton.jit
def _weight_rows(tile, feature, N: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rows of the weight for a tile's first side. Past the end, the last row is repeated."""
    if HEADS > 0:
        return tile * (2 * BLOCK_N) + feature
    return tl.minimum(tile * BLOCK_N + feature, N - 1)


@triton.jit(do_not_specialize=["rows"])
def skinny_linear_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    scales,
    bias,
    squares,
    added,
    added_slots,
    out,
    next_norm,
    next_x,
    next_squares,
    qk_norm,
    cos,
    sin,
    slots,
    cache,
    tile_top,
    tile_id,
    partials,
    counters,
    rows,
    x_stride,
    out_stride,
    eps,
    head_eps,
    k_scale,
    v_scale,
    N: tl.constexpr,
    K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SQUARES: tl.constexpr,
    SQUARES_BLOCK: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FRACTION: tl.constexpr,
    PREFETCH: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ZEROS: tl.constexpr,
    MINIMA: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # Attention asks which rows there are before it waits, so the product ahead of it lets it start only when all that
    # is ahead of itself is finished (see `_dependent_launch`).
    if HEADS == 0:
        start_next(DEPENDENT)
    # Where a tile has two sides they are gates and values, N rows of the weight apart, or the halves of a head.
    SIDES: tl.constexpr = 2 if GATED or HEADS > 0 else 1
    APART: tl.constexpr = N if GATED else BLOCK_N
    EACH: tl.constexpr = 1 if CODE == DENSE else 4 if (CODE == INT4) | (CODE == MXFP4) else 2
    ROW: tl.constexpr = K // EACH
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    K_STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TOTAL: tl.constexpr = TILES * K_STEPS
    SUMS: tl.constexpr = BLOCK_N * BLOCK_M
    SLOT: tl.constexpr = SIDES * SUMS
    EVEN: tl.constexpr = K % BLOCK_K == 0

    pid = tl.program_id(0)
    token = tl.arange(0, BLOCK_M)
    feature = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    local = feature[:, None] * BLOCK_M + token[None, :]
    begin = _segment(pid, TOTAL, PROGRAMS)
    end = _segment(pid + 1, TOTAL, PROGRAMS)
    first_tile = begin // K_STEPS
    if DEPENDENT and PREFETCH > 0:
        # Weights are no kernel's output, so the first of them come while the kernel before this one ends.
        STEP: tl.constexpr = BLOCK_K // EACH
        BITS: tl.constexpr = PREFETCH * STEP * weight.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = BITS // 1024 if BITS > 1024 else 1
        ahead_n = _weight_rows(first_tile, feature, N, BLOCK_N, HEADS).to(tl.int64)
        ahead_k = (begin - first_tile * K_STEPS) * STEP + tl.arange(0, LINES) * (STEP * PREFETCH // LINES)
        ahead_w = weight + ahead_n[:, None] * ROW + tl.minimum(ahead_k, ROW - 1)[None, :]
        prefetch(ahead_w)
        if SIDES == 2:
            prefetch(ahead_w + APART * ROW)
    wait_for_previous(DEPENDENT)
    if HEADS > 0:
        start_next(DEPENDENT)
    # Features past the end repeat the last one and are not stored: no mask on weights.
    there = token < rows
    x_rows = x + tl.minimum(token, rows - 1).to(tl.int64) * x_stride

    if SQUARES > 0:
        # On their way while the loop runs; added up where they are needed.
        part = tl.arange(0, SQUARES_BLOCK)
        square = tl.load(
            squares + part[:, None] * MAX_ROWS + token[None, :],
            mask=(part < SQUARES)[:, None] & there[None, :],
            other=0,
        )
    if HEADS > 0:
        slot_of, c, s = head_places(slots, cos, sin, token, there, BLOCK_N)
    for tile in range(first_tile, (end - 1) // K_STEPS + 1):
        k_begin = tl.maximum(begin - tile * K_STEPS, 0)
        k_end = tl.minimum(end - tile * K_STEPS, K_STEPS)
        n = tile * BLOCK_N + feature
        rows_n = _weight_rows(tile, feature, N, BLOCK_N, HEADS)
        w_rows = weight + rows_n.to(tl.int64) * K
        stored = (n < N)[:, None] & there[None, :]
        place = token.to(tl.int64)[None, :] * out_stride + n[:, None]
        if ACCUMULATE:
            before = tl.load(out + place, mask=stored, other=0).to(tl.float32)
        if next_norm is not None:
            g = tl.load(next_norm + n, mask=n < N, other=0).to(tl.float32)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for k in range(k_begin, k_end):
            if CODE != DENSE:
                acc, up = add_step(
                    acc, up, weight, scales, x_rows, rows_n, APART, k, there, K, BLOCK_K, CODE, GROUP, UNIT, OUTPUTS,
                    ZEROS, MINIMA, SIDES == 2,
                )  # fmt: skip
            else:
                at = k * BLOCK_K + column
                if EVEN:
                    w = tl.load(w_rows[:, None] + at[None, :])
                    v = tl.load(x_rows[None, :] + at[:, None], mask=there[None, :], other=0)
                else:
                    w = tl.load(w_rows[:, None] + at[None, :], mask=(at < K)[None, :], other=0)
                    v = tl.load(x_rows[None, :] + at[:, None], mask=(at < K)[:, None] & there[None, :], other=0)
                acc = tl.dot(w, v, acc, input_precision="ieee")
                if SIDES == 2:
                    second = w_rows + APART * K
                    if EVEN:
                        w = tl.load(second[:, None] + at[None, :])
                    else:
                        w = tl.load(second[:, None] + at[None, :], mask=(at < K)[None, :], other=0)
                    up = tl.dot(w, v, up, input_precision="ieee")

        complete = k_end - k_begin == K_STEPS
        if not complete:
            slot = partials + (2 * pid + tl.minimum(tile - first_tile, 1)) * SLOT
            tl.store(slot + local, acc)
            if SIDES == 2:
                tl.store(slot + SUMS + local, up)
            low = _owner(tile * K_STEPS, TOTAL, PROGRAMS)
            high = _owner(tile * K_STEPS + K_STEPS - 1, TOTAL, PROGRAMS)
            # All threads' sums before the one thread's count, which releases them to those that count after.
            tl.debug_barrier()
            complete = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == high - low
            if complete:
                acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                # Unrolled, so that several loads are on their way: one after the other costs half a microsecond each.
                for p in tl.range(low, high + 1, loop_unroll_factor=4):
                    slot = partials + (2 * p + tl.minimum(tile - _segment(p, TOTAL, PROGRAMS) // K_STEPS, 1)) * SLOT
                    acc += tl.load(slot + local, cache_modifier=".cg")
                    if SIDES == 2:
                        up += tl.load(slot + SUMS + local, cache_modifier=".cg")
                tl.store(counters + tile, 0)

        if complete:
            if SQUARES > 0:
                scale = tl.rsqrt(tl.sum(square, 0) / K + eps)
                acc = acc * scale[None, :]
                up = up * scale[None, :]
            if CODE != DENSE and GROUP >= K:
                acc *= scale_of(tl.load(scales + rows_n // OUTPUTS), ZEROS)[:, None]
                if SIDES == 2:
                    up *= scale_of(tl.load(scales + (APART + rows_n) // OUTPUTS), ZEROS)[:, None]
            if bias is not None:
                acc += tl.load(bias + rows_n).to(tl.float32)[:, None]
                if SIDES == 2:
                    up += tl.load(bias + APART + rows_n).to(tl.float32)[:, None]
            if added is not None:
                # Other rows have what an earlier pass left.
                has_added = (tl.load(added_slots + token, mask=there, other=-1) >= 0)[None, :]
                added_at = added + token[None, :] * (SIDES * N) + rows_n[:, None]
                acc += tl.load(added_at, mask=has_added, other=0)
                if SIDES == 2:
                    up += tl.load(added_at + APART, mask=has_added, other=0)
            if HEADS > 0:
                store_head(
                    acc, up, tile, token, there, slot_of, c, s, out, out_stride, qk_norm, cos, cache, head_eps, k_scale,
                    v_scale, HEADS, KV_HEADS, BLOCK_N, BLOCK_SIZE, FRACTION,
                )  # fmt: skip
            if GATED:
                acc = activation(acc, GELU) * up
            if tile_top is not None:
                invalid = acc != acc
                score = tl.where(invalid, float("inf"), acc)
                score = tl.where((n < N)[:, None], score, float("-inf"))
                top = tl.max(score, 0)
                best = tl.min(tl.where((score == top[None, :]) & (n < N)[:, None], n[:, None], N), 0)
                spoiled = tl.max((invalid & (n < N)[:, None]).to(tl.int32), 0) > 0
                at = token * TILES + tile
                tl.store(tile_top + at, tl.where(spoiled, float("nan"), top), mask=token < rows)
                tl.store(tile_id + at, best, mask=token < rows)
            if (out is not None) & (HEADS == 0):
                if MULTIPLIER != 1:
                    acc *= MULTIPLIER
                if ACCUMULATE:
                    acc += before
                rounded = acc.to(out.dtype.element_ty)
                tl.store(out + place, rounded, mask=stored)
                if next_norm is not None:
                    f = tl.where(stored, rounded.to(tl.float32), 0)
                    tl.store(next_x + place, (f * g[:, None]).to(next_x.dtype.element_ty), mask=stored)
                    tl.store(next_squares + tile * MAX_ROWS + token, tl.sum(f * f, 0), mask=there)


def launch(
    x: Tensor,
    product: Product,
    out: Tensor | None,
    tiles: tuple[Tensor, Tensor] | None,
    scratch: Sequence[Tensor],
    config: LinearConfig,
    dependent: bool,
    *,
    compile_only: bool = False,
) -> None:
    """Launch the kernel, or only compile it. The arguments are those of `skinny_linear` and `lm_head.linear_argmax`,
    which check them."""
    (rows, k), n, squares = x.shape, product.n, product.squares
    coding = product.coding
    following: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    if product.next is not None:
        following = (product.next.norm_weight, product.next.x, product.next.squares)
    of_heads, numbers, head_constants = head_arguments(product.heads)
    sums = 0 if squares is None else squares.shape[0]
    width = block_m(rows)
    # A configuration of the whole LM head may serve its first ids only, which have fewer steps.
    programs = min(config.programs, -(-n // config.block_n) * -(-k // config.block_k))
    call = partial(skinny_linear_kernel.warmup, grid=(programs,)) if compile_only else skinny_linear_kernel[(programs,)]
    call(
        x,
        product.weight,
        product.scales,
        product.bias,
        squares,
        None if product.added is None else product.added.values,
        None if product.added is None else product.added.slots,
        out,
        *following,
        *of_heads,
        *(tiles or (None, None)),
        *scratch,
        rows,
        x.stride(0),
        0 if out is None else out.stride(0),
        product.eps,
        *numbers,
        N=n,
        K=k,
        PROGRAMS=programs,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        BLOCK_M=width,
        SQUARES=sums,
        SQUARES_BLOCK=triton.next_power_of_2(sums),
        MAX_ROWS=product.squares_width,
        GATED=product.gated,
        GELU=product.gelu,
        ACCUMULATE=product.accumulate,
        MULTIPLIER=product.multiplier,
        PREFETCH=config.prefetch,
        **head_constants,
        **coding_constants(coding, k),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **options(dependent),
    )


def skinny_linear(
    x: Tensor, product: Product, out: Tensor, scratch: Sequence[Tensor], config: list[int], dependent: bool
) -> None:
    """Write a product of few rows into `out`, or add it to `out`.

    Args:
        x: `[M, K]`, 1 <= M <= 128, contiguous rows of any stride.
        product: weight, bias and operations before and after the product.
        out: `[M, N]` of any floating dtype, contiguous rows of any stride. Sums are fp32 and rounded once. The buffers
            of `product.next` are written, too.
        scratch: `(partials, counters)` of at least `scratch_sizes`. Counters are zero before and after.
        config: the fields of a LinearConfig in order.
        dependent: launch dependently (see `_dependent_launch`).
    """
    p = product
    added = (None, None) if p.added is None else (p.added.values, p.added.slots)
    operands = [p.weight, p.bias, p.squares, p.scales, *added]
    flags = [int(p.gated), int(p.gelu), int(p.accumulate)]
    if p.coding is not None:
        flags += coding_as_list(p.coding)
    outs, numbers = [out], [p.eps, p.multiplier]
    if p.next is not None:
        operands.append(p.next.norm_weight)
        outs += [p.next.x, p.next.squares]
    if p.heads is not None:
        operands += [p.heads.qk_norm, *(p.heads.angles or (None, None)), p.heads.slots]
        outs.append(p.heads.cache)
        numbers += [p.heads.eps, *p.heads.kv_scales]
        flags.insert(0, p.heads.num_heads)
    torch.ops.specrs.skinny_linear(x, operands, outs, list(scratch), numbers, flags, config, dependent)


@torch.library.custom_op("specrs::skinny_linear", mutates_args=("outs", "scratch"))
def _skinny_linear(
    x: Tensor,
    operands: list[Tensor | None],
    outs: list[Tensor],
    scratch: list[Tensor],
    numbers: list[float],
    flags: list[int],
    config: list[int],
    dependent: bool,
) -> None:
    product = _product(operands, outs[1:], numbers, flags)
    check_product(x, product, outs[0], scratch, config)
    launch(x, product, outs[0], None, scratch, LinearConfig(*config), dependent)


@_skinny_linear.register_fake
def _(
    x: Tensor,
    operands: list[Tensor | None],
    outs: list[Tensor],
    scratch: list[Tensor],
    numbers: list[float],
    flags: list[int],
    config: list[int],
    dependent: bool,
) -> None:
    check_product(x, _product(operands, outs[1:], numbers, flags), outs[0], scratch, config)


def _product(
    operands: Sequence[Tensor | None], following: Sequence[Tensor], numbers: Sequence[float], flags: Sequence[int]
) -> Product:
    (weight, bias, squares, scales, values, slots_of, *more), (eps, multiplier, *of_heads) = operands, numbers
    following_norm, heads = None, None
    if of_heads:
        (qk_norm, cos, sin, slots), (num_heads, *flags) = more, flags
        angles = [] if cos is None or sin is None else [cos, sin]
        assert slots is not None
        head_eps, k_scale, v_scale = of_heads
        heads = Heads(qk_norm, angles, slots, following[0], num_heads, head_eps, (k_scale, v_scale))
    elif more and more[0] is not None:
        following_norm = Next(more[0], *following)
    gated, gelu, accumulate, *coding = flags
    assert weight is not None
    return Product(
        weight,
        bias,
        squares,
        eps,
        bool(gated),
        bool(gelu),
        bool(accumulate),
        multiplier,
        following_norm,
        coding_of(coding) if coding else None,
        scales,
        heads,
        None if values is None or slots_of is None else Added(values, slots_of),
    )
