"""Draws one token per row from its distribution, with the noise of (seed, position, purpose). Filters nothing.

The draw is Gumbel-max over the tokens that are kept: argmax(x + g). A block without a kept token makes no noise, which
saves nearly all noise if top_p or top_k remove most tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._distribution import (
    GREEDY,
    NO_TOKEN,
    PARAMS,
    TEMPERATURE,
    first_best,
    is_kept,
    keep_better,
    scaled,
)
from specrs.kernels.cuda.argmax import combine_argmax
from specrs.kernels.cuda.philox import gumbel
from specrs.kernels.cuda.sampling_scratch import BLOCK, SamplingScratch, expect, tile_of
from specrs.kernels.cuda.sampling_structs import RowParams
from specrs.kernels.cuda.variants import Variant
from torch import Tensor


@triton.jit(do_not_specialize=["tile", "purpose"])
def tile_draw_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_of,
    values,
    cut,
    seeds,
    positions,
    tile_value,
    tile_id,
    stride,
    V,
    tile,
    tile_stride,
    purpose,
    BLOCK: tl.constexpr,
):
    """Write the best value and token of each tile. In greedy rows, that is the largest logit."""
    t, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    state_row = tl.load(row_of + row)
    params = values + state_row * PARAMS
    greedy = tl.load(params + GREEDY) != 0.0
    temperature, threshold = tl.load(params + TEMPERATURE), tl.load(cut + row)
    seed, position = tl.load(seeds + state_row), tl.load(positions + row)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    best_token = tl.full([BLOCK], NO_TOKEN, tl.int32)
    for first in range(t * tile, tl.minimum(t * tile + tile, V), BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = scaled(logits + row * stride, token, token < V, temperature)
        kept = is_kept(x, threshold) & (token < V)
        score = tl.where(x == x, x, -float("inf"))
        if greedy == 0:
            score = tl.where(kept, x, -float("inf"))
            if tl.max(kept.to(tl.int32), axis=0) > 0:
                score += gumbel(seed, position, purpose, first, BLOCK)
        best, best_token = keep_better(best, best_token, score, token, token < V)
    value, token = first_best(best, best_token, best_token < V)
    at = row * 2 * tile_stride + t
    tl.store(tile_value + at, value)
    tl.store(tile_id + at, token)


def draw(
    logits: Tensor,
    row_of: Tensor,
    params: RowParams,
    cut: Tensor,
    positions: Tensor,
    purpose: int,
    out_ids: Tensor,
    scratch: SamplingScratch,
) -> None:
    """Draw a token from each row's distribution: argmax(x + g) over x >= cut, the lowest id in a tie.

    Args:
        logits: `[N, V]` fp32, as given to `sampling_cut`.
        row_of: state row of each flat row, `[N]` int64.
        cut: `[N]` fp32, from `sampling_cut`. Greedy rows take the argmax.
        positions: position whose distribution each row gives, `[N]` int64; any value in padded rows.
        purpose: `PURPOSE_DRAFT` or `PURPOSE_GUMBEL`.
        out_ids: `[N]` int64; some token of the vocabulary in a row that keeps nothing.

    Takes two launches: tiles, and their combination. Noise is made only for kept tokens.
    """
    tiles = [scratch.tile_value, scratch.tile_id]
    torch.ops.specrs.draw(logits, row_of, [params.values, params.seeds], cut, positions, purpose, out_ids, tiles)


@torch.library.custom_op("specrs::draw", mutates_args=["out_ids", "tiles"])
def _draw(
    logits: Tensor,
    row_of: Tensor,
    params: list[Tensor],
    cut: Tensor,
    positions: Tensor,
    purpose: int,
    out_ids: Tensor,
    tiles: list[Tensor],
) -> None:
    rows, vocab_size = logits.shape
    if not rows:
        return
    (values, seeds), (tile_value, tile_id) = params, tiles
    tile = tile_of(rows, vocab_size)
    num_tiles = triton.cdiv(vocab_size, tile)
    tile_draw_kernel[(num_tiles, rows)](
        logits,
        row_of,
        values,
        cut,
        seeds,
        positions,
        tile_value,
        tile_id,
        logits.stride(0),
        vocab_size,
        tile,
        tile_value.shape[2],
        purpose,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=True,
    )
    combine_argmax(tile_value, tile_id, out_ids, None, num_tiles)


@_draw.register_fake
def _(
    logits: Tensor,
    row_of: Tensor,
    params: list[Tensor],
    cut: Tensor,
    positions: Tensor,
    purpose: int,
    out_ids: Tensor,
    tiles: list[Tensor],
) -> None:
    rows, (values, seeds) = logits.shape[:1], params
    expect("logits", logits, logits.shape, torch.float32)
    expect("values", values, (seeds.shape[0], PARAMS.value), torch.float32)
    expect("cut", cut, rows, torch.float32)
    for name, tensor in (("row_of", row_of), ("positions", positions), ("out_ids", out_ids)):
        expect(name, tensor, rows, torch.int64)


def draw_reference(x: Tensor, noise: Tensor) -> Tensor:
    """Do what `draw` does, in torch. x is `[N, V]` with -inf for removed tokens (in a greedy row, all but its argmax);
    noise is `[N, V]`."""
    return (x + noise).argmax(dim=1)


_FLOATS = ("logits", "values", "cut", "tile_value")
_IDS = ("row_of", "seeds", "positions")
VARIANTS = (
    Variant(
        "tile_draw",
        tile_draw_kernel,
        {
            **dict.fromkeys(tile_draw_kernel.arg_names[:-1], "i32"),
            **dict.fromkeys(_FLOATS, "*fp32"),
            **dict.fromkeys(_IDS, "*i64"),
            "tile_id": "*i32",
        },
        {"BLOCK": BLOCK},
        num_warps=8,
    ),
)
