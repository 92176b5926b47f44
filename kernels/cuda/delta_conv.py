"""Causal convolution of a gated delta net, and what the delta rule reads: normed queries and keys, values, gates.

Changes no state. `delta_rule` comes after it, and keeps the inputs that the next pass reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._delta_gates import decay, sigmoid
from specrs.kernels.cuda._delta_layout import Sizes, channel_column, conv_dim, number_columns, outputs, sizes_of
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda._state_rows import convolve
from specrs.kernels.cuda.activation import activation
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_TILE = 8
"""Rows per program. A verification has hardly more."""


@triton.jit(do_not_specialize=["first", "low", "high", "stride", "entries", "most"])
def delta_conv_kernel(  # type: ignore[no-untyped-def]
    x,
    conv,
    a_log,
    dt_bias,
    rows,
    q_start,
    runs,
    inputs,
    mixed,
    gates,
    replayed,
    x_stride,
    first,
    low,
    high,
    stride,
    entries,
    most,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    BY_KEY_HEAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    s, head = tl.program_id(0), tl.program_id(1)
    is_value = head >= 2 * KEY_HEADS
    row, start = tl.load(rows + s), tl.load(q_start + s)
    count, replay = tl.load(runs + s), tl.load(runs + stride + s)
    from_base = tl.load(runs + 2 * stride + s) == 0
    # The request's rows in this piece of the pass. Its first piece computes the keys of replayed updates, too.
    begin, end = tl.maximum(low - start, 0), tl.minimum(high - start, count)
    t = tl.where(begin == 0, 0, replay + begin) + tl.program_id(2) * TILE + tl.arange(0, TILE)
    live = t < tl.where(begin < end, replay + end, 0)
    fed = live & (t >= replay)
    i = t - replay

    j = tl.arange(0, BLOCK)
    inside = (j < tl.where(is_value, VALUE_DIM, KEY_DIM))[None, :]
    channel = tl.where(is_value, 2 * KEYS + (head - 2 * KEY_HEADS) * VALUE_DIM, head * KEY_DIM) + j
    column = channel_column(channel, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, BY_KEY_HEAD)
    own = x + (first + start) * x_stride
    kept = inputs + row * entries * CHANNELS + channel
    total = convolve(
        own + column,
        kept,
        conv + channel,
        t,
        live,
        j < tl.where(is_value, VALUE_DIM, KEY_DIM),
        replay,
        from_base,
        x_stride,
        CHANNELS,
        KERNEL,
        0,
        TILE,
        BLOCK,
    )
    made = activation(total, False)
    scale = tl.rsqrt(tl.sum(made * made, 1) + 1e-6)
    scale = tl.where(head < KEY_HEADS, scale * (1.0 / KEY_DIM**0.5), scale)
    made = tl.where(is_value, made, made * scale[:, None])
    place = (start - low + i)[:, None] * CHANNELS + channel[None, :]
    tl.store(mixed + place, made, mask=fed[:, None] & inside)
    of_key = (s * most + t)[:, None] * KEYS + (channel - KEYS)[None, :]
    is_key = (head >= KEY_HEADS) & (head < 2 * KEY_HEADS)
    tl.store(replayed + of_key, made, mask=(live & (t < tl.where(is_key, replay, 0)))[:, None] & inside)

    value_head = tl.maximum(head - 2 * KEY_HEADS, 0)
    b_column, a_column = number_columns(value_head, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, BY_KEY_HEAD)
    gated = fed & (t < tl.where(is_value, replay + end, 0))
    b = tl.load(own + i * x_stride + b_column, mask=gated, other=0).to(tl.float32)
    a = tl.load(own + i * x_stride + a_column, mask=gated, other=0).to(tl.float32)
    gate = gates + (start - low + i) * (2 * VALUE_HEADS) + value_head
    tl.store(gate, sigmoid(b), mask=gated)
    rate = decay(a, tl.load(dt_bias + value_head), tl.load(a_log + value_head))
    tl.store(gate + VALUE_HEADS, rate, mask=gated)


@torch.library.custom_op("specrs::delta_conv", mutates_args=("made",))
def delta_conv(
    x: Tensor,
    weights: list[Tensor],
    where: list[Tensor],
    inputs: Tensor,
    made: list[Tensor],
    sizes: list[int],
    piece: list[int],
    dependent: bool,
) -> None:
    """Convolve the rows of S requests, and write what the delta rule reads, for rows `piece[1]` to `piece[2]` - 1.

    Args:
        x: `[N, outputs]`, rows of any stride: what the input projection gives (see `_delta_layout`).
        weights: weights of the convolution `[kernel, conv_dim]`, and a_log and dt_bias `[value_heads]`, fp32.
        where: `rows` `[S]`, `q_start` `[S + 1]` and `runs` `[5, >= S]` of `delta_runs`.
        inputs: `[R, kernel - 1 + K, conv_dim]` contiguous, of x's dtype: for each state row the inputs of the
            last `kernel - 1` positions of the base, then those of logged drafts.
        made: three fp32 tensors, contiguous, written. `mixed` `[>= rows of the piece, conv_dim]` is SiLU of the
            convolution. Queries and keys are divided by their length, and queries also by the square root of their
            number of features. `gates` `[>= rows of the piece, 2, value_heads]` are beta and decay. `replayed` `[>= S,
            K, key_heads * key_dim]` are keys of the logged updates to replay.
        sizes: see `_delta_layout.Sizes`.
        piece: index in x of the requests' first row; first row of the piece and the one after its last, counted from
            there; and an upper bound of a request's rows in the piece.
        dependent: launch dependently (see `_dependent_launch`).

    Everything is computed in fp32, gates in float64. Masked rows are not written.
    """
    _check(x, weights, where, inputs, made, sizes, piece)
    (rows, q_start, runs), (_, _, replayed) = where, made
    key_heads, value_heads, key_dim, value_dim = sizes[:4]
    first, low, high, longest = piece
    tiles = triton.cdiv(replayed.shape[1] + longest, _TILE)
    delta_conv_kernel[(rows.shape[0], 2 * key_heads + value_heads, tiles)](
        x,
        *weights,
        rows,
        q_start,
        runs,
        inputs,
        *made,
        x.stride(0),
        first,
        low,
        high,
        runs.stride(0),
        inputs.shape[1],
        replayed.shape[1],
        TILE=_TILE,
        BLOCK=triton.next_power_of_2(max(key_dim, value_dim)),
        num_warps=4,
        **sizes_of(sizes),
        **options(dependent),
    )


@delta_conv.register_fake
def _(
    x: Tensor,
    weights: list[Tensor],
    where: list[Tensor],
    inputs: Tensor,
    made: list[Tensor],
    sizes: list[int],
    piece: list[int],
    dependent: bool,
) -> None:
    _check(x, weights, where, inputs, made, sizes, piece)


def _check(
    x: Tensor,
    weights: list[Tensor],
    where: list[Tensor],
    inputs: Tensor,
    made: list[Tensor],
    sizes: Sizes,
    piece: list[int],
) -> None:
    key_heads, value_heads, key_dim, _, kernel, _ = sizes
    (conv, a_log, dt_bias), (rows, q_start, runs), (mixed, gates, replayed) = weights, where, made
    channels, drafts = conv_dim(sizes), replayed.shape[1]
    assert x.shape[1] == outputs(sizes)
    assert x.stride(1) == 1
    assert conv.shape == (kernel, channels)
    assert a_log.shape == dt_bias.shape == (value_heads,)
    assert q_start.shape == (rows.shape[0] + 1,)
    assert runs.shape[1] >= rows.shape[0]
    assert inputs.shape[1:] == (kernel - 1 + drafts, channels)
    assert inputs.dtype == x.dtype
    assert mixed.shape[0] >= piece[2] - piece[1]
    assert mixed.shape[1:] == (channels,)
    assert gates.shape[0] >= piece[2] - piece[1]
    assert gates.shape[1:] == (2, value_heads)
    assert replayed.shape[0] >= rows.shape[0]
    assert replayed.shape[2] == key_heads * key_dim
    for tensor in (*weights, inputs, mixed, gates, replayed):
        assert tensor.is_contiguous()


def _variant(name: str, dtype: str, sizes: Sizes, *, aligned: bool = True) -> Variant:
    """Return a variant of the convolution kernel to compile for delta nets of `sizes`. `aligned`: rows of x begin at
    multiples of 16 elements."""
    return Variant(
        name,
        delta_conv_kernel,
        {
            **dict.fromkeys(("x", "inputs"), f"*{dtype}"),
            **dict.fromkeys(("conv", "a_log", "dt_bias", "mixed", "gates", "replayed"), "*fp32"),
            **dict.fromkeys(("rows", "q_start", "runs"), "*i64"),
            **dict.fromkeys(("x_stride", "first", "low", "high", "stride", "entries", "most"), "i32"),
        },
        sizes_of(sizes) | {"TILE": _TILE, "BLOCK": 128, "DEPENDENT": False},
        aligned=("x_stride",) if aligned else (),
    )


VARIANTS = (
    _variant("delta_conv_bf16_k16_v32", "bf16", (16, 32, 128, 128, 4, 0)),
    _variant("delta_conv_fp32_k16_v48", "fp32", (16, 48, 128, 128, 4, 0)),
    _variant("delta_conv_bf16_k16_v32_by_key_head", "bf16", (16, 32, 128, 128, 4, 1)),
    # One of eight ranks.
    _variant("delta_conv_bf16_k2_v6", "bf16", (2, 6, 128, 128, 4, 0), aligned=False),
)
