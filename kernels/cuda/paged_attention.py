"""Causal attention of flat rows over the paged cache: decode, verification and prefill. Writes no K and V.

There is one kernel, and three ways to divide the work. A tile is the query heads that share a KV head, times some rows
of one request. If there are few tiles, the context is split: split s of S takes the blocks s, s + S, s + 2 S, ... of
BLOCK_N positions. The partial results are combined in the order of the splits: by the program that arrives last if
there is little to combine, otherwise by a second kernel. Blocks are counted from position 0. So what a row sums, and in
which order, depends only on its own position and on S, and not on the contexts of other rows.

With many tiles, this would leave a long context among short ones to few programs. Then a split takes PER_SPLIT blocks
at a time. A context of no more blocks belongs to one program, which writes its output. A longer one has a split for
each such run of blocks, and the programs of splits that it does not have exit immediately. The split that a block
belongs to is fixed here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import options, start_next, wait_for_previous
from specrs.kernels.cuda._kv_codes import numbers
from specrs.kernels.cuda.attention_config import AttentionConfig, block_d
from specrs.kernels.kv_codes import FRACTIONS, fraction_of
from specrs.kernels.kv_scales import UNSCALED, KVScales
from torch import Tensor

_LOG2E = 1.4426950408889634


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    partial_out, partial_stat, tile, first, live, SPLITS, BLOCK_M, BLOCK_D, SPLIT_BLOCK, M: tl.constexpr
):
    """Return rows first .. first + M of a tile, `[M, BLOCK_D]`, added from its first `live` splits in a fixed order."""
    s = tl.arange(0, SPLIT_BLOCK)
    m = first + tl.arange(0, M)
    d = tl.arange(0, BLOCK_D)
    at = tile * SPLITS + s
    there = s < live
    stat = partial_stat + at[:, None] * 2 * BLOCK_M + m[None, :]
    top = tl.load(stat, mask=there[:, None], other=float("-inf"), cache_modifier=".cg")
    total = tl.load(stat + BLOCK_M, mask=there[:, None], other=0, cache_modifier=".cg")
    highest = tl.max(top, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(top - highest[None, :])
    place = partial_out + (at[:, None, None] * BLOCK_M + m[None, :, None]) * BLOCK_D + d[None, None, :]
    part = tl.load(place, mask=there[:, None, None], other=0, cache_modifier=".cg")
    total = tl.sum(total * weight, 0)
    return tl.sum(part * weight[:, :, None], 0) / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def _context(positions, row, valid, capacity):  # type: ignore[no-untyped-def]
    """Return the positions of a tile's rows, -1 for rows that do not exist, and the number of positions up to the last
    of them."""
    position = tl.load(positions + row, mask=valid, other=-1)
    return position, tl.minimum(tl.max(position, 0) + 1, capacity)


@triton.jit
def _taken(blocks, split, SPLITS: tl.constexpr, PER_SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return how many of a context's first `blocks` blocks belong to split number `split`."""
    rest = blocks % (SPLITS * PER_SPLIT) - split * PER_SPLIT
    return blocks // (SPLITS * PER_SPLIT) * PER_SPLIT + tl.minimum(tl.maximum(rest, 0), PER_SPLIT)


@triton.jit(do_not_specialize=["table_width"])
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    q,
    cache,
    positions,
    q_start,
    block_table,
    k_start,
    sinks,
    out,
    partial_out,
    partial_stat,
    counters,
    q_stride,
    out_stride,
    table_stride,
    table_width,
    scale_log2,
    v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FRACTION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    FUSED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    request = tl.program_id(0)
    kv_head = tl.program_id(1) % KV_HEADS
    row_block = tl.program_id(1) // KV_HEADS
    split = tl.program_id(2)
    start = tl.load(q_start + request) + row_block * ROWS
    end = tl.load(q_start + request + 1)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row = start + m // GROUP
    head = kv_head * GROUP + m % GROUP
    valid = (m < ROWS * GROUP) & (row < end)
    place = row[:, None] * out_stride + head[:, None] * D + d[None, :]

    position, context = _context(positions, row, valid, table_width * BLOCK_SIZE)
    blocks = (context + BLOCK_N - 1) // BLOCK_N
    live = tl.maximum(tl.minimum((blocks + PER_SPLIT - 1) // PER_SPLIT, SPLITS), 1)
    begin, stop, lowest = split, blocks, 0
    if k_start is not None:
        lowest = tl.load(k_start + request)
    if WINDOW > 0:
        # Of the window of the tile's first row; rows after it see less of that.
        first = tl.min(tl.where(position < 0, context, position), 0)
        lowest = tl.maximum(lowest, first - (first % WINDOW if CHUNKED else WINDOW - 1))
    if (k_start is not None) | (WINDOW > 0):
        # Blocks keep their splits: what lies wholly below is passed over.
        begin = split + tl.cdiv(tl.maximum(lowest // BLOCK_N - split, 0), SPLITS) * SPLITS
    if PER_SPLIT > 1:
        begin = _taken(lowest // BLOCK_N, split, SPLITS, PER_SPLIT)
        stop = _taken(blocks, split, SPLITS, PER_SPLIT)
    # Which rows and positions there are was written before the kernel ahead of this one, which lets this one start
    # when that is finished (see `qk_norm_rope` and the product of heads). What it writes itself, q, K and V, is read
    # after this line.
    wait_for_previous(DEPENDENT)
    if (start < end) & (split < live):
        inside_d = d < D
        loaded = valid[:, None] & inside_d[None, :]
        query = tl.load(q + row[:, None] * q_stride + head[:, None] * D + d[None, :], mask=loaded, other=0)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks is not None:
            # As if one score more had been seen, of no value: by the first split, which always is.
            sink = tl.load(sinks + head, mask=valid, other=float("-inf")).to(tl.float32)
            top = tl.where(split + 0 * m == 0, sink * 1.4426950408889634, float("-inf"))
            total = tl.where(top == float("-inf"), 0.0, 1.0)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        table = block_table + request.to(tl.int64) * table_stride
        column = tl.arange(0, BLOCK_N)
        for t in range(begin, stop, SPLITS if PER_SPLIT == 1 else 1):
            n = t * BLOCK_N + column
            if PER_SPLIT > 1:
                n = ((t // PER_SPLIT * SPLITS + split) * PER_SPLIT + t % PER_SPLIT) * BLOCK_N + column
            inside = n < context
            if (k_start is not None) | (WINDOW > 0):
                inside = inside & (n >= lowest)
            # K and V outside of them may be NaN, and table entries anything: neither is loaded.
            block = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0)
            base = ((block * (2 * KV_HEADS) + kv_head) * BLOCK_SIZE + n % BLOCK_SIZE) * D
            k = tl.load(cache + base[None, :] + d[:, None], mask=inside[None, :] & inside_d[:, None], other=0)
            if FRACTION > 0:
                k = numbers(k, FRACTION, query.dtype)
            scores = tl.dot(query, k, input_precision="ieee") * scale_log2
            seen = (n[None, :] <= position[:, None]) & inside[None, :]
            if CHUNKED:
                seen = seen & (n[None, :] >= (position - position % WINDOW)[:, None])
            elif WINDOW > 0:
                seen = seen & (n[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            # A row that has seen nothing yet stays at -inf, and -inf - -inf is NaN.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(scores - shift[:, None])
            decay = tl.exp2(top - shift)
            total = total * decay + tl.sum(p, 1)
            v = tl.load(
                cache + (KV_HEADS * BLOCK_SIZE * D) + base[:, None] + d[None, :],
                mask=inside[:, None] & inside_d[None, :],
                other=0,
            )
            if FRACTION > 0:
                v = numbers(v, FRACTION, query.dtype)
            acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
            top = higher

        if FRACTION > 0:
            acc *= v_scale
        whole, parted = loaded, valid
        if PER_SPLIT > 1:
            lone = tl.where(live > 1, 0, BLOCK_M)
            whole, parted = loaded & (m < lone)[:, None], valid & (m >= lone)
        if (SPLITS == 1) | (PER_SPLIT > 1):
            result = acc / tl.where(total == 0, 1.0, total)[:, None]
            tl.store(out + place, result.to(out.dtype.element_ty), mask=whole)
        if SPLITS > 1:
            tile = request * tl.num_programs(1) + tl.program_id(1)
            at = tile * SPLITS + split
            tl.store(partial_out + (at * BLOCK_M + m[:, None]) * BLOCK_D + d[None, :], acc, mask=parted[:, None])
            tl.store(partial_stat + at * 2 * BLOCK_M + m, top)
            tl.store(partial_stat + at * 2 * BLOCK_M + BLOCK_M + m, total)
            if FUSED > 0:
                # All threads' results before the one thread's count, which releases them to those that count after.
                tl.debug_barrier()
                if tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == live - 1:
                    lines = ROWS * GROUP
                    if PER_SPLIT > 1:
                        lines = tl.where(live > 1, lines, 0)
                    for first in range(0, lines, FUSED):
                        combined = _combine(
                            partial_out, partial_stat, tile, first, live, SPLITS, BLOCK_M, BLOCK_D, SPLIT_BLOCK, FUSED
                        )
                        few = first + tl.arange(0, FUSED)
                        row_f = start + few // GROUP
                        place_f = (
                            row_f[:, None] * out_stride + (kv_head * GROUP + few % GROUP)[:, None] * D + d[None, :]
                        )
                        kept = ((few < ROWS * GROUP) & (row_f < end))[:, None] & inside_d[None, :]
                        tl.store(out + place_f, combined.to(out.dtype.element_ty), mask=kept)
                    tl.store(counters + tile, 0)


@triton.jit(do_not_specialize=["table_width"])
def combine_kernel(  # type: ignore[no-untyped-def]
    positions,
    q_start,
    out,
    partial_out,
    partial_stat,
    out_stride,
    table_width,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Combine the splits of one row and head of a tile."""
    start_next(DEPENDENT)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    request, tile_of_request, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = tile_of_request % KV_HEADS
    start = tl.load(q_start + request) + tile_of_request // KV_HEADS * ROWS
    end = tl.load(q_start + request + 1)
    row = start + m // GROUP
    if row < end:
        others = tl.arange(0, BLOCK_ROWS)
        valid = (others < ROWS) & (start + others < end)
        _, context = _context(positions, start + others, valid, table_width * BLOCK_SIZE)
        live = tl.maximum(tl.minimum((context + BLOCK_N - 1) // BLOCK_N, SPLITS), 1)
        tile = request * tl.num_programs(1) + tile_of_request
        wait_for_previous(DEPENDENT)
        result = _combine(partial_out, partial_stat, tile, m, live, SPLITS, BLOCK_M, BLOCK_D, SPLIT_BLOCK, 1)
        d = tl.arange(0, BLOCK_D)
        place = row * out_stride + (kv_head * GROUP + m % GROUP) * D + d
        tl.store(out + place[None, :], result.to(out.dtype.element_ty), mask=(d < D)[None, :])
    else:
        wait_for_previous(DEPENDENT)


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Requests and positions of the rows of q."""

    positions: Tensor
    """[N] int64, position of each row."""
    q_start: Tensor
    """[B + 1] int64, ascending, first 0: first row of each request."""
    block_table: Tensor
    """[B, max_blocks] int64, block ids; dense rows of any stride."""
    max_q_len: int
    """Upper bound, known on the host, of the rows per request. Rows past it would get no output."""
    k_start: Tensor | None = None
    """[B] int64, first position that a request's rows attend to; None: 0."""


@dataclass(frozen=True, slots=True)
class MaskParams:
    """Scale, window or chunks, sinks and cache scales of a layer's attention."""

    scale: float
    """Factor on the scores, usually D^-0.5."""
    window: int | None = None
    """Number of last positions that a row attends to, including its own; None: all."""
    sinks: Tensor | None = None
    """[heads], a score of each head that takes its share of the softmax and adds nothing (Xiao et al. 2024, as in
    gpt-oss). None: there are none."""
    kv_scales: KVScales = UNSCALED
    """Scales of K and V in a quantized cache; ignored otherwise."""
    chunked: bool = False
    """True if a window ends where the row's chunk begins: positions are divided into chunks as long as the window."""


def paged_attention(
    q: Tensor,
    cache: Tensor,
    rows: AttentionRows,
    out: Tensor,
    scratch: Sequence[Tensor],
    mask_params: MaskParams,
    config: list[int],
    dependent: bool,
) -> None:
    """Write `softmax(scale q K^T + M) V` for every row and head into `out` (Vaswani et al. 2017, eq. 1).

    Row i attends positions 0..positions[i] of its request, or from its `k_start` on. With a window it attends the last
    `mask_params.window` of them, or those of its own chunk. Query head h uses KV head `h // (heads / kv_heads)`
    (Ainslie et al. 2023). Rows at position -1 give zeros, rows after `q_start[B]` are left as they were. Nothing after
    a tile's context, before `k_start` or before all windows of a tile is loaded, no table entry either, so NaN left
    there by earlier owners stays there.

    Args:
        q: `[N, heads * D]`, contiguous rows of any stride.
        cache: one layer, `[num_blocks + 1, 2, kv_heads, block_size, D]` contiguous, of q's dtype or of codes (see
            `kv_codes`), of which each is a number of q's dtype without its scale: K's scale is the scores', V's the
            output's.
        out: `[N, heads * D]`, contiguous rows of any stride.
        scratch: `(partial_out, partial_stat, counters)` of at least `AttentionConfig.scratch_sizes`. Counters are zero
            before and after.
        mask_params: scale, window, sinks and cache scales of the layer.
        config: the fields of an AttentionConfig in order.
        dependent: launch dependently (see `_dependent_launch`), after `qk_norm_rope`, a product of heads or an
            ordinary launch.

    Sums are fp32; the weights are rounded to q's dtype before they meet V.
    """
    where = [rows.positions, rows.q_start, rows.block_table, rows.k_start, mask_params.sinks]
    sizes = [rows.max_q_len, mask_params.window or 0, int(mask_params.chunked), *config]
    scales = list(mask_params.kv_scales) if cache.dtype in FRACTIONS else [1.0, 1.0]
    scales[0] *= mask_params.scale
    torch.ops.specrs.paged_attention(q, cache, where, out, list(scratch), scales, sizes, dependent)


@torch.library.custom_op("specrs::paged_attention", mutates_args=("out", "scratch"))
def _paged_attention(
    q: Tensor,
    cache: Tensor,
    rows: list[Tensor | None],
    out: Tensor,
    scratch: list[Tensor],
    scales: list[float],
    sizes: list[int],
    dependent: bool,
) -> None:
    _check(q, cache, rows, out, scratch, sizes)
    (where, k_start, sinks), (max_q_len, window, chunked, *config) = _named(rows), sizes
    positions, q_start, block_table = where
    partial_out, partial_stat, counters = scratch
    c = AttentionConfig(*config)
    batch = q_start.shape[0] - 1
    kv_heads, block_size, dim = cache.shape[2:]
    heads = q.shape[1] // dim
    tiles = kv_heads * triton.cdiv(max_q_len, c.rows)
    fused = c.fused_lines(heads // kv_heads)
    shape = shape_constants(c, heads, kv_heads, dim) | {"BLOCK_SIZE": block_size}
    (scale, v_scale), fraction = scales, fraction_of(cache.dtype)
    paged_attention_kernel[(batch, tiles, c.splits)](
        q,
        cache.view(torch.uint8) if fraction else cache,
        positions,
        q_start,
        block_table,
        k_start,
        sinks,
        out,
        partial_out,
        partial_stat,
        counters,
        q.stride(0),
        out.stride(0),
        block_table.stride(0),
        block_table.shape[1],
        scale * _LOG2E,
        v_scale if fraction else None,
        **shape,
        PER_SPLIT=c.blocks_per_split,
        FRACTION=fraction,
        WINDOW=window,
        CHUNKED=bool(chunked),
        FUSED=fused,
        num_warps=c.num_warps,
        num_stages=c.num_stages,
        **options(dependent),
    )
    if c.splits > 1 and not fused:
        assert c.blocks_per_split == 1, "long contexts alone are combined by the last program"
        combine_kernel[(batch, tiles, c.rows * heads // kv_heads)](
            positions,
            q_start,
            out,
            partial_out,
            partial_stat,
            out.stride(0),
            block_table.shape[1],
            **shape,
            BLOCK_ROWS=triton.next_power_of_2(c.rows),
            **options(dependent),
        )


@_paged_attention.register_fake
def _(
    q: Tensor,
    cache: Tensor,
    rows: list[Tensor | None],
    out: Tensor,
    scratch: list[Tensor],
    scales: list[float],
    sizes: list[int],
    dependent: bool,
) -> None:
    _check(q, cache, rows, out, scratch, sizes)


def _named(rows: Sequence[Tensor | None]) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor | None]:
    """Split the optional tensors of a call: return (positions, q_start, block table), k_start, and sinks."""
    positions, q_start, block_table, k_start, sinks = rows
    assert positions is not None
    assert q_start is not None
    assert block_table is not None
    return (positions, q_start, block_table), k_start, sinks


def _check(
    q: Tensor, cache: Tensor, rows: list[Tensor | None], out: Tensor, scratch: list[Tensor], sizes: list[int]
) -> None:
    ((positions, q_start, block_table), k_start, sinks), (max_q_len, window, chunked, *config) = _named(rows), sizes
    batch = q_start.shape[0] - 1
    assert window >= chunked
    assert k_start is None or k_start.shape == (batch,)
    assert sinks is None or (sinks.shape == (q.shape[1] // cache.shape[4],) and sinks.is_contiguous())
    kv_heads, dim = cache.shape[2], cache.shape[4]
    assert cache.is_contiguous()
    assert cache.dtype == q.dtype or cache.dtype in FRACTIONS
    assert out.shape == q.shape
    assert q.shape[1] % (kv_heads * dim) == 0
    assert q.stride(1) == out.stride(1) == block_table.stride(1) == 1
    assert positions.shape == q.shape[:1]
    assert block_table.shape[0] == batch
    c = AttentionConfig(*config)
    assert c.rows * q.shape[1] // (kv_heads * dim) <= c.block_m
    needed = c.scratch_sizes(batch=batch, max_q_len=max_q_len, num_kv_heads=kv_heads, head_dim=dim)
    for name, tensor, count in zip(("partial_out", "partial_stat", "counters"), scratch, needed, strict=True):
        assert tensor.numel() >= count, f"{name} has {tensor.numel()} elements and needs {count}"


def shape_constants(config: AttentionConfig, heads: int, kv_heads: int, dim: int) -> dict[str, int]:
    """Return the compile-time constants that both kernels of attention have: the one over splits and the one that
    combines them."""
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": dim,
        "BLOCK_D": block_d(dim),
        "ROWS": config.rows,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SPLITS": config.splits,
        "SPLIT_BLOCK": triton.next_power_of_2(config.splits),
    }


def paged_attention_reference(
    q: Tensor,
    cache: Tensor,
    positions: Tensor,
    q_start: Tensor,
    block_table: Tensor,
    out: Tensor,
    mask_params: MaskParams,
    k_start: Tensor | None = None,
) -> None:
    """Do what `paged_attention` does, row by row in float64."""
    kv_heads, block_size, dim = cache.shape[2:]
    heads = q.shape[1] // dim
    starts = q_start.tolist()
    out[: starts[-1]] = 0
    for b in range(len(starts) - 1):
        for row in range(starts[b], starts[b + 1]):
            context = min(int(positions[row]) + 1, block_table.shape[1] * block_size)
            first = 0 if k_start is None else int(k_start[b])
            if mask_params.window is not None:
                position, window = int(positions[row]), mask_params.window
                first = max(first, position - position % window if mask_params.chunked else position + 1 - window)
            if context <= first:
                continue
            at = torch.arange(first, context, device=q.device)
            kv = cache[block_table[b, at // block_size], :, :, at % block_size].double()  # [context, 2, kv_heads, D]
            if cache.dtype in FRACTIONS:
                kv = kv * torch.tensor(mask_params.kv_scales, dtype=torch.float64, device=q.device)[:, None, None]
            k, v = kv.repeat_interleave(heads // kv_heads, dim=2).unbind(1)
            scores = torch.einsum("hd,chd->hc", q[row].double().view(heads, dim), k) * mask_params.scale
            if mask_params.sinks is not None:
                scores = torch.cat((scores, mask_params.sinks.double()[:, None]), dim=1)
            weights = scores.softmax(-1)[:, : len(at)]
            out[row] = torch.einsum("hc,chd->hd", weights, v).reshape(-1).to(out.dtype)
