"""Coarse threshold for drafting: both histograms of a row in one step, and the threshold from them. Launches nothing.

Cells are 1/32 nat below the largest logit, as in step 0 of the exact search. Weights and counts of a row are added up
in the same step, so top_k and top_p take one pass over the logits, whichever of them a row has. A row with neither
needs no histogram, and adds the weights of each tile to cell 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
from specrs.kernels.cuda._distribution import (
    GREEDY,
    LAST_KEY,
    PARAMS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    combine_tiles,
    gap_limit,
    is_finite,
    scaled,
    store_cut,
    store_no_cut,
)
from specrs.kernels.cuda._search import TOTAL, UNIT, add_tile, add_to_cells, cell_of, last_key, place_of

_CELLS = tl.constexpr(1024)


@triton.jit
def _add_tile(  # type: ignore[no-untyped-def]
    row_ptr, cells, m, temperature, farthest, counted, first, end, BLOCK: tl.constexpr
):
    """Add tokens first .. end to the histograms: their weights to cells 0 .. 1023 and, with `counted`, their numbers to
    cells 1024 .. 2047."""
    for start in range(first, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = scaled(row_ptr, token, token < end, temperature)
        chosen = (token < end) & (x <= m)
        gap = m - x
        cell = cell_of(gap, chosen)
        weight = tl.where(chosen & (gap <= farthest), tl.exp(-tl.maximum(gap, 0.0)), 0.0)
        amount = (weight * UNIT).to(tl.int64)
        add_to_cells(cells, cell, amount, amount > 0, 32)
        if counted:
            add_to_cells(cells + _CELLS, cell, tl.full([BLOCK], 1, tl.int64), chosen, 32)


@triton.jit
def _threshold(cells, params, m):  # type: ignore[no-untyped-def]
    """Return `(key, kept)`: the last key that is kept, and the total weight of the tokens that are kept."""
    cell = tl.arange(0, _CELLS)
    top_k = tl.minimum(tl.load(params + TOP_K), 1073741824.0).to(tl.int64)
    place = place_of(cell, 32)
    counts = tl.cumsum(tl.load(cells + _CELLS + place), axis=0)
    last = tl.sum((counts < top_k).to(tl.int32), axis=0)
    weights = tl.load(cells + place)
    sums = tl.cumsum(tl.where(cell <= last, weights, 0), axis=0)
    total = tl.max(sums, axis=0)
    wanted = tl.minimum(tl.load(params + TOP_P), 2.0).to(tl.float64) * total.to(tl.float64)
    last = tl.minimum(last, tl.sum((sums.to(tl.float64) < wanted).to(tl.int32), axis=0))
    kept = tl.sum(tl.where(cell <= last, weights, 0), axis=0)
    # gap * 32 < last + 1, as the largest gap that fulfils it.
    edge = ((last + 1).to(tl.float32) / 32).to(tl.int32, bitcast=True) - 1
    bound = tl.where(last >= _CELLS - 1, float("inf"), edge.to(tl.float32, bitcast=True))
    return tl.where(last >= _CELLS - 1, LAST_KEY, last_key(m, bound)), kept


@triton.jit(do_not_specialize=["tile"])
def coarse_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_of,
    values,
    tile_value,
    tile_id,
    cells,
    out_top,
    out_ids,
    stride,
    V,
    tile,
    tile_stride,
    TILES: tl.constexpr,
    CELLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add one tile of a row to the row's histograms."""
    t, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    params = values + tl.load(row_of + row) * PARAMS
    at = row * 2 * tile_stride
    top, token = combine_tiles(tile_value + at, tile_id + at, tl.num_programs(0), TILES)
    if t == 0:
        tl.store(out_top + row, top)
        tl.store(out_ids + row, token.to(tl.int64))
    if (tl.load(params + GREEDY) == 0.0) & is_finite(top):
        temperature = tl.load(params + TEMPERATURE)
        m, row_ptr, own = tl.div_rn(top, temperature), logits + row * stride, cells + row * CELLS
        first, end = t * tile, tl.minimum(t * tile + tile, V)
        counted = tl.load(params + TOP_K) < float("inf")
        if counted | (tl.load(params + TOP_P) < float("inf")):
            _add_tile(row_ptr, own, m, temperature, gap_limit(params), counted, first, end, BLOCK)
        else:
            none = tl.full([], 0, tl.int64)
            total = add_tile(
                row_ptr,
                own,
                m,
                temperature,
                gap_limit(params),
                none,
                none,
                none,
                none + LAST_KEY,
                first,
                end,
                TOTAL,
                True,
                BLOCK,
            )
            tl.atomic_add(own, total, sem="relaxed")


@triton.jit
def finish_coarse_kernel(row_of, values, cells, out_cut, out_lse, out_top, CELLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write threshold and lse of a row from its histograms."""
    row = tl.program_id(0).to(tl.int64)
    params = values + tl.load(row_of + row) * PARAMS
    top = tl.load(out_top + row)
    greedy = tl.load(params + GREEDY) != 0.0
    if is_finite(top) & (greedy == 0):
        m = tl.div_rn(top, tl.load(params + TEMPERATURE))
        key, kept = _threshold(cells + row * CELLS, params, m)
        key = tl.minimum(key, last_key(m, gap_limit(params)))
        store_cut(out_cut + row, out_lse + row, key, kept, m)
    else:
        store_no_cut(out_cut + row, out_lse + row, greedy)
