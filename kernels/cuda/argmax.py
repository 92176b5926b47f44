"""Argmax of rows of logits, the lowest id in a tie, and the largest logit. Scales and draws nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._distribution import NO_TOKEN, combine_tiles, first_best, keep_better
from specrs.kernels.cuda.sampling_scratch import BLOCK, CELLS, SamplingScratch, expect, tile_of
from specrs.kernels.cuda.variants import Variant
from torch import Tensor


@triton.jit(do_not_specialize=["tile"])
def tile_argmax_kernel(  # type: ignore[no-untyped-def]
    logits, tile_value, tile_id, cells, stride, V, tile, tile_stride, CELLS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the best value and token of each tile. With CELLS, also zero the first histogram of a search."""
    t, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if CELLS > 0:
        cell = tl.arange(0, CELLS)
        tl.store(cells + row * CELLS + cell, tl.zeros([CELLS], tl.int64), mask=cell % tl.num_programs(0) == t)
    value = tl.full([BLOCK], -float("inf"), tl.float32)
    best = tl.full([BLOCK], NO_TOKEN, tl.int32)
    faulty = tl.zeros([BLOCK], tl.int32)
    for first in range(t * tile, tl.minimum(t * tile + tile, V), BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + token, mask=token < V, other=-float("inf"))
        faulty = faulty | (x != x).to(tl.int32)
        value, best = keep_better(value, best, tl.where(x == x, x, -float("inf")), token, token < V)
    top, token = first_best(value, best, best < V)
    at = row * 2 * tile_stride + t
    tl.store(tile_value + at, tl.where(tl.max(faulty, axis=0) > 0, float("nan"), top))
    tl.store(tile_id + at, token)


@triton.jit(do_not_specialize=["num_tiles"])
def combine_argmax_kernel(  # type: ignore[no-untyped-def]
    tile_value, tile_id, out_ids, out_top, num_tiles, tile_stride, HAS_TOP: tl.constexpr, TILES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = row * 2 * tile_stride
    top, token = combine_tiles(tile_value + at, tile_id + at, num_tiles, TILES)
    tl.store(out_ids + row, token.to(tl.int64))
    if HAS_TOP:
        tl.store(out_top + row, top)


def tile_argmax(logits: Tensor, tile_value: Tensor, tile_id: Tensor, cells: Tensor | None) -> int:
    """Write the largest logit of each tile of each row into `tile_value`, and its id into `tile_id`. Return the number
    of tiles per row. This is the first kernel of every op that needs a row's largest logit. `cells` is zeroed if it is
    given."""
    rows, vocab_size = logits.shape
    tile = tile_of(rows, vocab_size)
    tiles: int = triton.cdiv(vocab_size, tile)
    tile_argmax_kernel[(tiles, rows)](
        logits,
        tile_value,
        tile_id,
        tile_id if cells is None else cells,
        logits.stride(0),
        vocab_size,
        tile,
        tile_value.shape[2],
        CELLS=0 if cells is None else CELLS,
        BLOCK=BLOCK,
        enable_fp_fusion=True,
    )
    return tiles


def combine_argmax(
    tile_value: Tensor, tile_id: Tensor, out_ids: Tensor, out_top: Tensor | None, num_tiles: int
) -> None:
    """Launch the second kernel: write the best id and value of each row into `out_ids` and `out_top` `[N]`, from the
    best of each of its tiles."""
    stride = tile_value.shape[2]
    combine_argmax_kernel[(len(out_ids),)](
        tile_value,
        tile_id,
        out_ids,
        tile_value if out_top is None else out_top,
        num_tiles,
        stride,
        HAS_TOP=out_top is not None,
        TILES=triton.next_power_of_2(stride),
        enable_fp_fusion=True,
    )


@torch.library.custom_op("specrs::argmax", mutates_args=["out_ids", "out_top", "tile_value", "tile_id"])
def _argmax(logits: Tensor, out_ids: Tensor, out_top: Tensor, tile_value: Tensor, tile_id: Tensor) -> None:
    if not len(logits):
        return
    combine_argmax(tile_value, tile_id, out_ids, out_top, tile_argmax(logits, tile_value, tile_id, None))


@_argmax.register_fake
def _(logits: Tensor, out_ids: Tensor, out_top: Tensor, tile_value: Tensor, tile_id: Tensor) -> None:
    expect("logits", logits, logits.shape, torch.float32)
    expect("out_ids", out_ids, logits.shape[:1], torch.int64)
    expect("out_top", out_top, logits.shape[:1], torch.float32)


def argmax(logits: Tensor, out_ids: Tensor, out_top: Tensor, scratch: SamplingScratch) -> None:
    """Write the most probable token of each row, the lowest id in a tie.

    Args:
        logits: `[N, V]` fp32, any row stride, dense rows.
        out_ids: `[N]` int64. In a row with NaN, the id of some other token.
        out_top: `[N]` fp32, the largest logit, which may be infinite; NaN if the row has a NaN.

    Takes two launches: tiles, and their combination. With one row, both are bound by latency.
    """
    torch.ops.specrs.argmax(logits, out_ids, out_top, scratch.tile_value, scratch.tile_id)


def argmax_reference(logits: Tensor, out_ids: Tensor, out_top: Tensor) -> None:
    """Do what `argmax` does, in torch. Ids of rows with NaN differ."""
    top, ids = logits.max(dim=1)
    out_top.copy_(top)
    out_ids.copy_(ids)


_POINTERS = {
    "logits": "*fp32",
    "tile_value": "*fp32",
    "tile_id": "*i32",
    "cells": "*i64",
    "out_ids": "*i64",
    "out_top": "*fp32",
}


def _types(fn: triton.JITFunction, constants: tuple[str, ...]) -> dict[str, str]:
    return {name: _POINTERS.get(name, "i32") for name in fn.arg_names if name not in constants}


VARIANTS = (
    *(
        Variant(
            f"tile_argmax_{'search' if cells else 'alone'}",
            tile_argmax_kernel,
            _types(tile_argmax_kernel, ("CELLS", "BLOCK")),
            {"CELLS": cells, "BLOCK": BLOCK},
        )
        for cells in (0, CELLS)
    ),
    *(
        Variant(
            f"combine_{name}",
            combine_argmax_kernel,
            _types(combine_argmax_kernel, ("HAS_TOP", "TILES")),
            {"HAS_TOP": has_top, "TILES": 256},
        )
        for name, has_top in (("argmax", True), ("draw", False))
    ),
)
