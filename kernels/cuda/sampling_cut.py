"""Temperature, min_p, top_k and top_p of a row as one threshold, without a sort. Writes no logits, draws nothing.

The threshold is that of `specrs.verify.thresholds`, exact to the last bit of a logit, with ties kept; `_search`
explains how it is found. p is summed in integers, with weights in units of 2^-40 of the largest, so a result depends
only on its row. If a sum comes within V * 2^-40 + 1e-6 of the target, relative to the total, the torch reference may
cut one logit earlier or later, because its exp rounds differently.

`coarse` is for drafting: it takes one step, and the threshold lies on a grid of 1/32 nat below the largest logit.

Launches:

    exact     tiles, finish     always
              count, 4 steps    with `top_k` in any row
              weigh, 4 steps    with `top_p` in any row
              total             without `top_p`
    coarse    tiles, step, finish, whatever the rows have

That is 10 launches with every filter, 6 with only `top_p`, 3 without filters, and 3 for drafting. A row without a
filter does not search: its programs exit immediately, but for one step that adds up the weights of tiles. Step 0 of a
search does an atomic addition per token, later steps only for tokens in the remaining interval.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._coarse import coarse_kernel, finish_coarse_kernel
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
    store_cut,
    store_no_cut,
)
from specrs.kernels.cuda._search import (
    BASE,
    CELL,
    COUNT,
    LIMIT,
    LO,
    SHIFT,
    TARGET,
    TOTAL,
    WEIGHT,
    add_tile,
    last_key,
    narrow,
)
from specrs.kernels.cuda.argmax import tile_argmax
from specrs.kernels.cuda.sampling_scratch import (
    BLOCK,
    CELLS,
    SEARCH_STEPS,
    STEP_WORDS,
    SamplingScratch,
    expect,
    tile_of,
)
from specrs.kernels.cuda.sampling_structs import ALL_FILTERS, Cut, Filters
from specrs.kernels.cuda.variants import Variant
from specrs.verify.params import SamplingRows, Steps
from specrs.verify.processing import filter_logits
from torch import Tensor

EVERY_STEP = Steps.of(-1)
"""All steps of sampling, as an argument of `sampling_cut_reference`."""
_LEVELS = 4
"""Number of steps of a search: the cells of step 0, then three times 11 bits of keys."""


@triton.jit(do_not_specialize=["tile", "step", "scratch_rows"])
def search_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_of,
    values,
    tile_value,
    tile_id,
    tile_sum,
    cells,
    steps,
    out_top,
    out_ids,
    stride,
    V,
    tile,
    tile_stride,
    step,
    scratch_rows,
    MODE: tl.constexpr,
    LEVEL: tl.constexpr,
    AFTER_COUNT: tl.constexpr,
    MIN_P: tl.constexpr,
    TILES: tl.constexpr,
    CELLS: tl.constexpr,
    STEP_SLOTS: tl.constexpr,
    STEP_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run one step of a search over one tile. Every program evaluates the previous step again; the first one of a row
    stores the result in `steps` for the next launch. There are three histograms: this step's, the finished one, and the
    next one's, which is zeroed here."""
    t, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first_step: tl.constexpr = LEVEL == 0 and not AFTER_COUNT
    params = values + tl.load(row_of + row) * PARAMS
    own = cells + (step % 3 * scratch_rows + row) * CELLS
    finished = cells + ((step + 2) % 3 * scratch_rows + row) * CELLS
    upcoming = cells + ((step + 1) % 3 * scratch_rows + row) * CELLS
    slot = steps + (row * STEP_SLOTS + step) * STEP_WORDS
    previous = slot - STEP_WORDS

    if first_step:
        at = row * 2 * tile_stride
        top, token = combine_tiles(tile_value + at, tile_id + at, tl.num_programs(0), TILES)
        if t == 0:
            tl.store(out_top + row, top)
            tl.store(out_ids + row, token.to(tl.int64))
    else:
        top = tl.load(out_top + row)
    if MODE != TOTAL:
        index = tl.arange(0, CELLS)
        tl.store(upcoming + index, tl.zeros([CELLS], tl.int64), mask=index % tl.num_programs(0) == t)

    has_top_k = tl.load(params + TOP_K) < float("inf")
    if MODE == COUNT:
        searches = has_top_k
    elif MODE == WEIGHT:
        searches = tl.load(params + TOP_P) < float("inf")
    else:
        searches = has_top_k & False
    if (tl.load(params + GREEDY) == 0.0) & is_finite(top):
        temperature = tl.load(params + TEMPERATURE)
        m = tl.div_rn(top, temperature)
        lo = tl.full([], 0, tl.int64)
        shift, cell = lo, lo
        limit = tl.full([], LAST_KEY, tl.int64)
        if LEVEL > 0:
            if searches:
                lo, shift, base, target, cell = narrow(previous, finished, params, m, LEVEL == 1, MODE == WEIGHT)
                if t == 0:
                    tl.store(slot + LO, lo)
                    tl.store(slot + SHIFT, shift)
                    tl.store(slot + BASE, base)
                    tl.store(slot + TARGET, target)
                    tl.store(slot + CELL, cell)
            limit = tl.load(previous + LIMIT)
        elif AFTER_COUNT:  # noqa: SIM102 (a constant)
            if has_top_k:
                limit, _, _, _, _ = narrow(previous, finished, params, m, False, False)
        if t == 0:
            tl.store(slot + LIMIT, limit)
        farthest = gap_limit(params) if MIN_P else float("inf")
        row_ptr, first, end = logits + row * stride, t * tile, tl.minimum(t * tile + tile, V)
        if MODE != COUNT and LEVEL == 0:  # noqa: SIM102 (constants)
            if searches == 0:
                # All weights of a tile are enough where no threshold is searched for.
                total = add_tile(
                    row_ptr, own, m, temperature, farthest, lo, shift, cell, limit, first, end, TOTAL, True, BLOCK
                )
                tl.store(tile_sum + row * tile_stride + t, total)
        if MODE != TOTAL:  # noqa: SIM102 (a constant)
            if searches & (shift >= 0):
                add_tile(
                    row_ptr,
                    own,
                    m,
                    temperature,
                    farthest,
                    lo,
                    shift,
                    cell,
                    limit,
                    first,
                    end,
                    MODE,
                    LEVEL == 0,
                    BLOCK,
                )


@triton.jit(do_not_specialize=["num_tiles", "step", "scratch_rows"])
def finish_kernel(  # type: ignore[no-untyped-def]
    row_of,
    values,
    tile_sum,
    cells,
    steps,
    out_cut,
    out_lse,
    out_top,
    num_tiles,
    tile_stride,
    step,
    scratch_rows,
    MODE: tl.constexpr,
    MIN_P: tl.constexpr,
    TILES: tl.constexpr,
    CELLS: tl.constexpr,
    STEP_SLOTS: tl.constexpr,
    STEP_WORDS: tl.constexpr,
):
    """Write threshold and lse of a row from the sums of the last step, whose number is `step`."""
    row = tl.program_id(0).to(tl.int64)
    params = values + tl.load(row_of + row) * PARAMS
    top = tl.load(out_top + row)
    greedy = tl.load(params + GREEDY) != 0.0
    if is_finite(top) & (greedy == 0):
        m = tl.div_rn(top, tl.load(params + TEMPERATURE))
        slot = steps + (row * STEP_SLOTS + step) * STEP_WORDS
        key = tl.load(slot + LIMIT)
        t = tl.arange(0, TILES)
        kept = tl.sum(tl.load(tile_sum + row * tile_stride + t, mask=t < num_tiles, other=0), axis=0)
        if MODE == WEIGHT:  # noqa: SIM102 (a constant)
            if tl.load(params + TOP_P) < float("inf"):
                histogram = cells + (step % 3 * scratch_rows + row) * CELLS
                lo, _, kept, _, _ = narrow(slot, histogram, params, m, False, True)
                key = tl.minimum(key, lo)
        if MIN_P:
            key = tl.minimum(key, last_key(m, gap_limit(params)))
        store_cut(out_cut + row, out_lse + row, key, kept, m)
    else:
        store_no_cut(out_cut + row, out_lse + row, greedy)


@torch.library.custom_op(
    "specrs::sampling_cut",
    mutates_args=["out", "scratch"],
)
def _sampling_cut(
    logits: Tensor,
    row_of: Tensor,
    values: Tensor,
    out: list[Tensor],
    scratch: list[Tensor],
    coarse: bool,
    filters: list[bool],
) -> None:
    """Launch the kernels of `sampling_cut`. `out`, `scratch` and `filters` are the fields of a `Cut`, of a
    `SamplingScratch` and of `Filters`."""
    rows, vocab_size = logits.shape
    if not rows:
        return
    (out_cut, out_lse, out_top), (top_k, top_p, min_p) = out, filters
    tile_value, tile_id, tile_sum, cells, steps, out_ids = scratch
    num_tiles, tile = tile_argmax(logits, tile_value, tile_id, cells), tile_of(rows, vocab_size)
    tile_stride, scratch_rows = tile_value.shape[2], cells.shape[1]
    tiles = triton.next_power_of_2(tile_stride)
    if coarse:
        coarse_kernel[(num_tiles, rows)](
            logits,
            row_of,
            values,
            tile_value,
            tile_id,
            cells,
            out_top,
            out_ids,
            logits.stride(0),
            vocab_size,
            tile,
            tile_stride,
            TILES=tiles,
            CELLS=CELLS,
            BLOCK=BLOCK,
            enable_fp_fusion=True,
        )
        finish_coarse_kernel[(rows,)](
            row_of, values, cells, out_cut, out_lse, out_top, CELLS=CELLS, enable_fp_fusion=True
        )
        return
    plan = [(COUNT.value, level) for level in range(_LEVELS if top_k else 0)]
    plan += [(WEIGHT.value, level) for level in range(_LEVELS)] if top_p else [(TOTAL.value, 0)]
    sizes = {
        "TILES": tiles,
        "CELLS": CELLS,
        "STEP_SLOTS": SEARCH_STEPS + 1,
        "STEP_WORDS": STEP_WORDS,
        "MIN_P": min_p,
        "enable_fp_fusion": True,
    }
    for step, (mode, level) in enumerate(plan):
        search_kernel[(num_tiles, rows)](
            logits,
            row_of,
            values,
            tile_value,
            tile_id,
            tile_sum,
            cells,
            steps,
            out_top,
            out_ids,
            logits.stride(0),
            vocab_size,
            tile,
            tile_stride,
            step,
            scratch_rows,
            MODE=mode,
            LEVEL=min(level, 2),
            AFTER_COUNT=level == 0 and step > 0,
            BLOCK=BLOCK,
            **sizes,
        )
    finish_kernel[(rows,)](
        row_of,
        values,
        tile_sum,
        cells,
        steps,
        out_cut,
        out_lse,
        out_top,
        num_tiles,
        tile_stride,
        len(plan) - 1,
        scratch_rows,
        MODE=plan[-1][0],
        **sizes,
    )


@_sampling_cut.register_fake
def _(
    logits: Tensor,
    row_of: Tensor,
    values: Tensor,
    out: list[Tensor],
    scratch: list[Tensor],
    coarse: bool,
    filters: list[bool],
) -> None:
    rows, (cut, lse, top) = logits.shape[:1], out
    expect("logits", logits, logits.shape, torch.float32)
    expect("row_of", row_of, rows, torch.int64)
    expect("values", values, (values.shape[0], PARAMS.value), torch.float32)
    expect("cut", cut, rows, torch.float32)
    expect("lse", lse, rows, torch.float64)
    expect("top", top, rows, torch.float32)


def sampling_cut(
    logits: Tensor,
    row_of: Tensor,
    values: Tensor,
    out: Cut,
    scratch: SamplingScratch,
    *,
    coarse: bool,
    filters: Filters = ALL_FILTERS,
) -> None:
    """Write the distribution that each row samples, as a threshold.

    Args:
        logits: `[N, V]` fp32, raw or adjusted, any row stride, dense rows.
        row_of: state row of each flat row, `[N]` int64; padded rows name a greedy one.
        values: `[R + 1, 8]` fp32 of `SamplingRows`.
        scratch: `scratch.ids` `[:N]` becomes the argmax of each row, the lowest id in a tie, which `rejection` reads.
        coarse: True for drafting; `filters` have no effect then.
    """
    torch.ops.specrs.sampling_cut(
        logits,
        row_of,
        values,
        [out.cut, out.lse, out.top],
        [scratch.tile_value, scratch.tile_id, scratch.tile_sum, scratch.cells, scratch.steps, scratch.ids],
        coarse,
        [filters.top_k, filters.top_p, filters.min_p],
    )


def sampling_cut_reference(
    logits: Tensor,
    rows: SamplingRows,
    *,
    coarse: bool,
    top_k: bool,
    top_p: bool,
    min_p: bool,
) -> tuple[Tensor, Tensor]:
    """Return `(x [N, V] with -inf for removed tokens, lse [N] float64)` of rows that sample, in torch."""
    steps = replace(EVERY_STEP, top_k=top_k, top_p=top_p, min_p=min_p)
    x = filter_logits(logits, rows, steps, coarse=coarse)
    return x, x.to(torch.float64).logsumexp(dim=1)


def _variants() -> tuple[Variant, ...]:
    types = {
        "logits": "*fp32",
        "values": "*fp32",
        "tile_value": "*fp32",
        "tile_id": "*i32",
        "out_cut": "*fp32",
        "out_lse": "*fp64",
        "out_top": "*fp32",
        **dict.fromkeys(("row_of", "tile_sum", "cells", "steps", "out_ids"), "*i64"),
    }
    sizes = {"TILES": 256, "CELLS": CELLS, "STEP_SLOTS": SEARCH_STEPS + 1, "STEP_WORDS": STEP_WORDS, "MIN_P": True}

    def variant(name: str, fn: triton.JITFunction, **constants: int) -> Variant:
        constants = {name: size for name, size in sizes.items() if name in fn.arg_names} | constants
        signature = {arg: types.get(arg, "i32") for arg in fn.arg_names if arg not in constants}
        return Variant(name, fn, signature, constants)

    names = {COUNT.value: "count", WEIGHT.value: "weigh", TOTAL.value: "total"}
    found = []
    for mode, level, after in (
        *((COUNT.value, level, False) for level in range(3)),
        *((WEIGHT.value, level, False) for level in range(3)),
        (WEIGHT.value, 0, True),
        (TOTAL.value, 0, False),
        (TOTAL.value, 0, True),
    ):
        name = f"search_{names[mode]}_{level}{'_after_count' * after}"
        found.append(variant(name, search_kernel, MODE=mode, LEVEL=level, AFTER_COUNT=after, BLOCK=BLOCK))
    found += [variant(f"finish_{names[mode]}", finish_kernel, MODE=mode) for mode in (WEIGHT.value, TOTAL.value)]
    found += [variant("coarse", coarse_kernel, BLOCK=BLOCK), variant("finish_coarse", finish_coarse_kernel)]
    return tuple(found)


VARIANTS = _variants()
