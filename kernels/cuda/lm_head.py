"""LM head with a choice of the most probable token. For logits alone, use `skinny_linear`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda.configs import LinearConfig, LinearShape
from specrs.kernels.cuda.linear_product import Product, check_operands
from specrs.kernels.cuda.linear_variants import variant
from specrs.kernels.cuda.skinny_linear import launch
from specrs.kernels.cuda.variants import SIZES, Variant
from torch import Tensor

_BLOCK = 1024


@triton.jit
def combine_tiles_kernel(  # type: ignore[no-untyped-def]
    tile_top, tile_id, out_ids, out_top, TILES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Write the best of a row's tiles. Of equal ones it is the lowest id, which is not always in the first tile of its
    lane."""
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    spoiled = tl.zeros([BLOCK], tl.int32)
    for first in range(0, TILES, BLOCK):
        tile = first + lane
        there = tile < TILES
        top = tl.load(tile_top + row * TILES + tile, mask=there, other=float("-inf"))
        ids = tl.load(tile_id + row * TILES + tile, mask=there, other=0x7FFFFFFF)
        spoiled = spoiled | (top != top).to(tl.int32)
        top = tl.where(top != top, float("inf"), top)
        token = tl.where(top > best, ids, tl.where(top == best, tl.minimum(token, ids), token))
        best = tl.maximum(best, top)
    highest = tl.max(best, 0)
    chosen = tl.min(tl.where(best == highest, token, 0x7FFFFFFF), 0)
    tl.store(out_ids + row, chosen.to(tl.int64))
    tl.store(out_top + row, tl.where(tl.max(spoiled, 0) > 0, float("nan"), highest))


@dataclass(frozen=True, slots=True)
class ArgmaxScratch:
    """Scratch through which the kernels pass results. The counters are zero before and after."""

    tile_top: Tensor
    """fp32, at least L * ceil(V / block_n) elements: largest logit of each row's tiles."""
    tile_id: Tensor
    """int32, at least L * ceil(V / block_n) elements: id of each tile's largest logit."""
    partials: Tensor
    """Partial sums of the product, fp32, at least `scratch_sizes` elements."""
    counters: Tensor
    """Arrival counters of the product, int32, at least `scratch_sizes` elements."""


def linear_argmax(
    x: Tensor, weight: Tensor, out: Sequence[Tensor], scratch: ArgmaxScratch, config: list[int], dependent: bool
) -> None:
    """Write the token of the largest element of every row of `x W^T`, and that element.

    Args:
        x: `[L, hidden]`, 1 <= L <= 128, contiguous rows of any stride.
        weight: `[V, hidden]` contiguous, of x's dtype.
        out: `(ids, top)` or `(ids, top, logits)`. ids `[L]` int64: the lowest id in a tie, some id in a row with NaN.
            top `[L]` fp32: the largest logit, which may be infinite; NaN if the row has a NaN. logits `[L, V]` fp32,
            contiguous rows of any stride, are only written.
        config: the fields of a LinearConfig in order.
        dependent: launch dependently (see `_dependent_launch`).

    Takes two launches. Logits are compared in fp32, as they come from the accumulator.
    """
    tensors = [scratch.tile_top, scratch.tile_id, scratch.partials, scratch.counters]
    torch.ops.specrs.linear_argmax(x, weight, list(out), tensors, config, dependent)


@torch.library.custom_op("specrs::linear_argmax", mutates_args=("out", "scratch"))
def _linear_argmax(
    x: Tensor, weight: Tensor, out: list[Tensor], scratch: list[Tensor], config: list[int], dependent: bool
) -> None:
    _check(x, weight, out, scratch, config)
    c, (ids, top, *logits), (tile_top, tile_id, *partials) = LinearConfig(*config), out, scratch
    launch(x, Product(weight), logits[0] if logits else None, (tile_top, tile_id), partials, c, dependent)
    combine_tiles_kernel[(x.shape[0],)](
        tile_top,
        tile_id,
        ids,
        top,
        TILES=triton.cdiv(weight.shape[0], c.block_n),
        BLOCK=_BLOCK,
        **options(dependent),
    )


@_linear_argmax.register_fake
def _(x: Tensor, weight: Tensor, out: list[Tensor], scratch: list[Tensor], config: list[int], dependent: bool) -> None:
    _check(x, weight, out, scratch, config)


def _check(x: Tensor, weight: Tensor, out: list[Tensor], scratch: list[Tensor], config: list[int]) -> None:
    (ids, top, *logits), (tile_top, tile_id, *partials) = out, scratch
    check_operands(x, Product(weight), partials, config)
    rows, n = x.shape[0], weight.shape[0]
    tiles = -(-n // LinearConfig(*config).block_n)
    assert ids.shape == top.shape == (rows,)
    assert all(kept.shape == (rows, n) and kept.stride(1) == 1 for kept in logits)
    assert min(tile_top.numel(), tile_id.numel()) >= rows * tiles, f"{rows * tiles} tiles do not fit"


def linear_argmax_reference(x: Tensor, weight: Tensor, out_ids: Tensor, out_top: Tensor, logits: Tensor | None) -> None:
    """Do what `linear_argmax` does, in plain torch with products in float64. Ids of rows with NaN differ."""
    y = x.double() @ weight.double().t()
    top, ids = y.max(dim=1)
    out_ids.copy_(ids)
    out_top.copy_(top)
    if logits is not None:
        logits.copy_(y)


VARIANTS = (
    *(
        variant(
            f"lm_head_argmax_rows{rows}_{size.name}",
            LinearShape(151936, 2048, torch.bfloat16),
            size,
            rows=rows,
            argmax=True,
        )
        for size in SIZES
        for rows in (1, 64)
    ),
    variant(
        "lm_head_argmax_draft_rows128_large",
        LinearShape(151936, 2048, torch.bfloat16),
        SIZES[0],
        rows=128,
        argmax=True,
    ),
    *(  # the part of one of four ranks, or of a shorter draft vocabulary, with narrower tiles
        variant(
            f"lm_head_argmax_part_rows{rows}_large",
            LinearShape(37984, 2048, torch.bfloat16),
            SIZES[0],
            rows=rows,
            argmax=True,
        )
        for rows in (1, 64, 128)
    ),
    Variant(
        "lm_head_combine",
        combine_tiles_kernel,
        {"tile_top": "*fp32", "tile_id": "*i32", "out_ids": "*i64", "out_top": "*fp32"},
        {"TILES": 2374, "BLOCK": _BLOCK, "DEPENDENT": False},
    ),
)
