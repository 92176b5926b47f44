"""Norm and gate of a delta net's outputs, head by head, and the order in which its output projection reads them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._delta_layout import Sizes, conv_dim, gate_column, outputs, sizes_of
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda.activation import activation
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_HEADS = 8
"""Value heads per program."""


@triton.jit(do_not_specialize=["first"])
def gated_norm_kernel(  # type: ignore[no-untyped-def]
    x,
    mixed,
    norm,
    positions,
    out,
    x_stride,
    out_stride,
    eps,
    first,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    BY_KEY_HEAD: tl.constexpr,
    TURNED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    at = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    j = tl.arange(0, BLOCK)
    inside = (head < VALUE_HEADS)[:, None] & (j < VALUE_DIM)[None, :]
    is_fed = tl.load(positions + first + at) >= 0
    live = inside & (j < tl.where(is_fed, VALUE_DIM, 0))[None, :]
    y = tl.load(mixed + at * CHANNELS + 2 * KEYS + head[:, None] * VALUE_DIM + j[None, :], mask=live, other=0)
    column = gate_column(head, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, BY_KEY_HEAD)
    z = tl.load(x + (first + at) * x_stride + column[:, None] + j[None, :], mask=live, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(y * y, 1) / VALUE_DIM + eps)[:, None]
    made = y * scale * tl.load(norm + j, mask=j < VALUE_DIM, other=0)[None, :] * activation(z, False)
    place = head
    if TURNED:
        place = head % SHARED * KEY_HEADS + head // SHARED
    target = out + (first + at) * out_stride + place[:, None] * VALUE_DIM + j[None, :]
    tl.store(target, made.to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("specrs::gated_norm", mutates_args=("out",))
def gated_norm(
    operands: list[Tensor],
    out: Tensor,
    sizes: list[int],
    turned: bool,
    piece: list[int],
    eps: float,
    dependent: bool,
) -> None:
    """Write `y / sqrt(mean(y^2) + eps) * norm * silu(z)` of each value head into `out`, for rows `piece[0]` to
    `piece[1]` - 1 of a pass.

    Args:
        operands: what the input projection gives, z among it, `[N, outputs]`, rows of any stride; `mixed` `[>= rows of
            the piece, conv_dim]` fp32 contiguous, with the outputs y of `delta_rule`; the norm's weight `[value_dim]`
            fp32; and positions `[N]` int64, of which rows at -1 get zeros.
        out: `[N, value_heads * value_dim]` of x's dtype, rows of any stride.
        sizes: see `_delta_layout.Sizes`.
        turned: True if `out` has the first value head of every key head, then the second of every key head, and so on.
        piece: first row of the piece, and the one after its last.
        dependent: launch dependently (see `_dependent_launch`).

    Everything is computed in fp32 and rounded once.
    """
    _check(operands, out, sizes, piece)
    x, mixed, norm, positions = operands
    value_heads, value_dim = sizes[1], sizes[3]
    gated_norm_kernel[(piece[1] - piece[0], triton.cdiv(value_heads, _HEADS))](
        x,
        mixed,
        norm,
        positions,
        out,
        x.stride(0),
        out.stride(0),
        eps,
        piece[0],
        TURNED=turned,
        HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(value_dim),
        num_warps=4,
        **sizes_of(sizes),
        **options(dependent),
    )


@gated_norm.register_fake
def _(
    operands: list[Tensor],
    out: Tensor,
    sizes: list[int],
    turned: bool,
    piece: list[int],
    eps: float,
    dependent: bool,
) -> None:
    _check(operands, out, sizes, piece)


def _check(operands: list[Tensor], out: Tensor, sizes: Sizes, piece: list[int]) -> None:
    x, mixed, norm, positions = operands
    assert x.shape == (positions.shape[0], outputs(sizes))
    assert out.shape == (positions.shape[0], sizes[1] * sizes[3])
    assert x.stride(1) == out.stride(1) == 1
    assert out.dtype == x.dtype
    assert norm.shape == (sizes[3],)
    assert mixed.shape[0] >= piece[1] - piece[0]
    assert mixed.shape[1:] == (conv_dim(sizes),)
    assert mixed.is_contiguous()


def _variant(name: str, dtype: str, sizes: Sizes, *, turned: bool = False, aligned: bool = True) -> Variant:
    """Return a variant of the gated norm kernel to compile for delta nets of `sizes`. `aligned`: rows of x begin at
    multiples of 16 elements."""
    return Variant(
        name,
        gated_norm_kernel,
        {
            **dict.fromkeys(("x", "out"), f"*{dtype}"),
            **dict.fromkeys(("mixed", "norm"), "*fp32"),
            **dict.fromkeys(("x_stride", "out_stride", "first"), "i32"),
            "positions": "*i64",
            "eps": "fp32",
        },
        sizes_of(sizes) | {"TURNED": turned, "HEADS": _HEADS, "BLOCK": 128, "DEPENDENT": False},
        aligned=("x_stride", "out_stride") if aligned else ("out_stride",),
    )


VARIANTS = (
    _variant("gated_norm_bf16_k16_v32", "bf16", (16, 32, 128, 128, 4, 0)),
    _variant("gated_norm_bf16_k16_v32_turned", "bf16", (16, 32, 128, 128, 4, 0), turned=True),
    _variant("gated_norm_fp32_k16_v48", "fp32", (16, 48, 128, 128, 4, 0)),
    # One of eight ranks.
    _variant("gated_norm_bf16_k2_v6", "bf16", (2, 6, 128, 128, 4, 0), aligned=False),
)
