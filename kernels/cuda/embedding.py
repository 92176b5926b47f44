"""Start of a pass: rows of the embedding, and the RoPE angles of the positions. Norms and projects nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda.variants import Variant
from torch import Tensor


@triton.jit
def embed_kernel(  # type: ignore[no-untyped-def]
    input_ids,
    positions,
    embedding,
    rotary,
    magnitudes,
    hidden,
    cos,
    sin,
    next_norm,
    next_x,
    next_squares,
    angle_stride,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    ROTATIONS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(input_ids + row)
    token = tl.minimum(tl.maximum(token, 0), VOCAB - 1)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        h = tl.load(embedding + token * WIDTH + column, mask=inside, other=0)
        if MULTIPLIER != 1:
            h = (h.to(tl.float32) * MULTIPLIER).to(h.dtype)
        tl.store(hidden + row * WIDTH + column, h, mask=inside)
        if next_norm is not None:
            f = h.to(tl.float32)
            squares += f * f
            g = tl.load(next_norm + column, mask=inside, other=0).to(tl.float32)
            tl.store(next_x + row * WIDTH + column, (f * g).to(h.dtype), mask=inside)
    if next_norm is not None:
        tl.store(next_squares + row, tl.sum(squares, 0))
    i = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions + row).to(tl.float32)
    for r in tl.static_range(ROTATIONS):
        angle = position * tl.load(rotary + (2 * r + 1) * HALF + i, mask=i < HALF, other=0)
        c, s = tl.cos(angle), tl.sin(angle)
        if magnitudes is not None:
            magnitude = tl.load(magnitudes + r)
            c *= magnitude
            s *= magnitude
        at = r * angle_stride + row * HALF + i
        tl.store(cos + at, c, mask=i < HALF)
        tl.store(sin + at, s, mask=i < HALF)


@torch.library.custom_op("specrs::embed", mutates_args=("hidden", "angles", "following"))
def embed(
    input_ids: Tensor,
    positions: Tensor,
    tables: list[Tensor | None],
    hidden: Tensor,
    angles: list[Tensor],
    following: list[Tensor],
    dependent: bool,
    multiplier: float = 1.0,
) -> None:
    """Write the embedding of every row times `multiplier`, and cos and sin of `position * f_i` for each of R rotations
    (see `kernels.rotary`). Products are in fp32.

    Args:
        input_ids: `[N]` int64. Ids outside the vocabulary are clamped, because a draft model may have fewer tokens.
        positions: `[N]` int64.
        tables: the embedding `[vocab, hidden]` contiguous; signed frequencies `[R, D]` fp32, for D features of a head;
            factors of cos and sin, `[R]` fp32, or None; the weight `[hidden]` of the norm that follows, or None.
        hidden: `[N, hidden]` contiguous, of the embedding's dtype.
        angles: cos and sin, `[R, N, D / 2]` fp32, contiguous for each rotation; the sine is that of the second half.
        following: with a norm's weight, `x` and `squares` of a `linear_product.Next`, for at most 64 rows; otherwise
            empty.
        dependent: launch dependently (see `_dependent_launch`).
    """
    _check(input_ids, positions, tables, hidden, angles, following)
    embedding, rotary, magnitudes, next_norm = tables
    assert embedding is not None
    assert rotary is not None
    width, half = embedding.shape[1], rotary.shape[1] // 2
    embed_kernel[(input_ids.shape[0],)](
        input_ids,
        positions,
        embedding,
        rotary,
        magnitudes,
        hidden,
        *angles,
        next_norm,
        *(following or (None, None)),
        angles[0].stride(0),
        VOCAB=embedding.shape[0],
        WIDTH=width,
        HALF=half,
        ROTATIONS=rotary.shape[0],
        MULTIPLIER=multiplier,
        BLOCK=min(2048, triton.next_power_of_2(width)),
        BLOCK_HALF=triton.next_power_of_2(half),
        **options(dependent),
    )


@embed.register_fake
def _(
    input_ids: Tensor,
    positions: Tensor,
    tables: list[Tensor | None],
    hidden: Tensor,
    angles: list[Tensor],
    following: list[Tensor],
    dependent: bool,
    multiplier: float = 1.0,
) -> None:
    _check(input_ids, positions, tables, hidden, angles, following)


def _check(
    input_ids: Tensor,
    positions: Tensor,
    tables: Sequence[Tensor | None],
    hidden: Tensor,
    angles: Sequence[Tensor],
    following: Sequence[Tensor],
) -> None:
    embedding, rotary, magnitudes, next_norm = tables
    assert embedding is not None
    assert rotary is not None
    rows, (rotations, dim) = input_ids.shape[0], rotary.shape
    cos, sin = angles
    assert positions.shape == (rows,)
    assert hidden.shape == (rows, embedding.shape[1])
    assert cos.shape == sin.shape == (rotations, rows, dim // 2)
    assert cos.stride() == sin.stride()
    assert magnitudes is None or magnitudes.shape == (rotations,)
    assert all(tensor.is_contiguous() for tensor in (embedding, rotary, hidden, cos[0], *following))
    assert (next_norm is None) == (not following)
    if next_norm is not None:
        next_x, squares = following
        assert next_norm.shape == hidden.shape[1:]
        assert next_x.shape == hidden.shape
        assert squares.shape[0] >= 1
        assert rows <= squares.shape[1]


def embed_reference(
    input_ids: Tensor,
    positions: Tensor,
    tables: Sequence[Tensor | None],
    hidden: Tensor,
    angles: Sequence[Tensor],
    following: Sequence[Tensor] = (),
    multiplier: float = 1.0,
) -> None:
    """Reference for `embed`, in plain torch."""
    embedding, rotary, magnitudes, next_norm = tables
    assert embedding is not None
    assert rotary is not None
    hidden.copy_(embedding[input_ids.clamp(0, embedding.shape[0] - 1)].double() * multiplier)
    if next_norm is not None:
        next_x, squares = following
        next_x.copy_(hidden.double() * next_norm.double())
        squares[0, : len(hidden)] = hidden.double().square().sum(1)
    exact = (positions.float()[:, None] * rotary[:, None, rotary.shape[1] // 2 :]).double()
    for out, values in zip(angles, (exact.cos(), exact.sin()), strict=True):
        out.copy_(values if magnitudes is None else values * magnitudes.double()[:, None, None])


_POINTERS = {
    "input_ids": "*i64",
    "positions": "*i64",
    "embedding": "*bf16",
    "rotary": "*fp32",
    "hidden": "*bf16",
    "cos": "*fp32",
    "sin": "*fp32",
    "angle_stride": "i32",
}
_NEXT = {"next_norm": "*bf16", "next_x": "*bf16", "next_squares": "*fp32"}
_CONSTANTS = {"VOCAB": 151936, "WIDTH": 5120, "HALF": 64, "BLOCK": 2048, "BLOCK_HALF": 64, "DEPENDENT": False}
VARIANTS = (
    Variant(
        "embed_bf16",
        embed_kernel,
        _POINTERS | _NEXT,
        _CONSTANTS | {"ROTATIONS": 1, "MULTIPLIER": 1.0, "magnitudes": None},
    ),
    Variant(
        "embed_bf16_scaled_two_rotations",
        embed_kernel,
        _POINTERS | {"magnitudes": "*fp32"},
        _CONSTANTS | {"ROTATIONS": 2, "MULTIPLIER": 62.0, **dict.fromkeys(_NEXT)},
    ),
)
