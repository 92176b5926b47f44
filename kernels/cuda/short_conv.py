"""Gated short convolution of a pass: its outputs, and the inputs that the next pass reads.

The outputs change no state, so all rows are computed at once. Inputs are kept by a second kernel after it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda._state_rows import convolve, keep_inputs
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_TILE = 8
"""Rows per program. A verification has hardly more."""
_BLOCK = 128
"""Channels per program."""


@triton.jit(do_not_specialize=["first", "stride", "entries"])
def short_conv_kernel(  # type: ignore[no-untyped-def]
    x,
    conv,
    rows,
    q_start,
    runs,
    inputs,
    out,
    x_stride,
    out_stride,
    first,
    stride,
    entries,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    s = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    row, start, end = tl.load(rows + s), tl.load(q_start + s), tl.load(q_start + s + 1)
    count, replay, begins = tl.load(runs + s), tl.load(runs + stride + s), tl.load(runs + 2 * stride + s)
    i = tl.program_id(2) * TILE + tl.arange(0, TILE)
    live = i < count
    # A row has B, C and x of each channel.
    source = x + (first + start) * x_stride + 2 * CHANNELS + channel
    kept = inputs + row * entries * CHANNELS + channel
    total = convolve(
        source,
        kept,
        conv + channel,
        replay + i,
        live,
        inside,
        replay,
        begins == 0,
        x_stride,
        CHANNELS,
        KERNEL,
        2 * CHANNELS,
        TILE,
        BLOCK,
    )
    gates = source[None, :] - CHANNELS + i[:, None] * x_stride
    gate = tl.load(gates, mask=live[:, None] & inside[None, :], other=0).to(tl.float32)
    made = tl.where(live[:, None], tl.where(begins == 2, float("nan"), gate * total), 0.0)
    target = out + (first + start + i)[:, None] * out_stride + channel[None, :]
    tl.store(target, made.to(out.dtype.element_ty), mask=(i < end - start)[:, None] & inside[None, :])


@triton.jit(
    do_not_specialize=["first", "stride", "entries"],
    # Views of the record.
    do_not_specialize_on_alignment=["snapshot_count", "snapshot_rows", "snapshot_lengths", "snapshot_slots"],
)
def keep_inputs_kernel(  # type: ignore[no-untyped-def]
    x,
    rows,
    q_start,
    runs,
    inputs,
    kept_inputs,
    snapshot_count,
    snapshot_rows,
    snapshot_lengths,
    snapshot_slots,
    x_stride,
    first,
    stride,
    entries,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SNAPSHOTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    s = tl.program_id(0)
    count = tl.load(runs + s)
    if count == 0:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, start = tl.load(rows + s), tl.load(q_start + s)
    replay, begins = tl.load(runs + stride + s), tl.load(runs + 2 * stride + s)
    commit, length = tl.load(runs + 3 * stride + s), tl.load(runs + 4 * stride + s)
    snapshots = 0
    if SNAPSHOTS > 0:
        snapshots = tl.load(snapshot_count)
    keep_inputs(
        x + (first + start) * x_stride + 2 * CHANNELS + channel,
        inputs + row * entries * CHANNELS + channel,
        kept_inputs,
        channel,
        row,
        length,
        count,
        replay,
        begins == 0,
        commit,
        x_stride,
        snapshots,
        snapshot_rows,
        snapshot_lengths,
        snapshot_slots,
        CHANNELS,
        KERNEL,
        2 * CHANNELS,
        SNAPSHOTS,
        BLOCK_SNAPSHOTS,
    )


@torch.library.custom_op("specrs::short_conv", mutates_args=("out",))
def short_conv(
    x: Tensor,
    conv: Tensor,
    where: list[Tensor],
    inputs: Tensor,
    out: Tensor,
    first: int,
    longest: int,
    dependent: bool,
) -> None:
    """Write `C * (causal convolution of B * x)` for the rows of S requests (transformers' `models/lfm2`).

    Args:
        x: `[N, 3 * channels]`, rows of any stride: B, C and x of each row, what the input projection gives.
        conv: weights `[kernel, channels]` fp32; the last row is for a row's own input.
        where: `rows` `[S]`, `q_start` `[S + 1]` and `runs` `[5, >= S]` of `delta_runs`.
        inputs: `[R, kernel - 1 + K, channels]` fp32 contiguous: for each state row `B * x` of the last `kernel - 1`
            positions of the base, then those of logged drafts.
        out: `[N, channels]` of x's dtype, rows of any stride, written: zeros in masked rows of requests.
        first: index in x of the requests' first row.
        longest: upper bound of a request's rows.
        dependent: launch dependently (see `_dependent_launch`).

    Everything is computed in fp32 and rounded once. A row's sum has one order, whatever the other rows are. Requests
    whose position no state reaches get NaN.
    """
    _check(x, where, inputs, conv.shape[0])
    channels = _check_rows(x, conv, out)
    rows, q_start, runs = where
    short_conv_kernel[(rows.shape[0], triton.cdiv(channels, _BLOCK), triton.cdiv(longest, _TILE))](
        x,
        conv,
        rows,
        q_start,
        runs,
        inputs,
        out,
        x.stride(0),
        out.stride(0),
        first,
        runs.stride(0),
        inputs.shape[1],
        CHANNELS=channels,
        KERNEL=conv.shape[0],
        TILE=_TILE,
        BLOCK=_BLOCK,
        **options(dependent),
    )


@short_conv.register_fake
def _(
    x: Tensor,
    conv: Tensor,
    where: list[Tensor],
    inputs: Tensor,
    out: Tensor,
    first: int,
    longest: int,
    dependent: bool,
) -> None:
    _check(x, where, inputs, conv.shape[0])
    _check_rows(x, conv, out)


@torch.library.custom_op("specrs::keep_conv_inputs", mutates_args=("memory",))
def keep_conv_inputs(
    x: Tensor, where: list[Tensor], memory: list[Tensor], snapshots: list[Tensor], first: int, dependent: bool
) -> None:
    """Write the inputs of a short convolution that the next pass of S requests reads, after `short_conv` of their rows.
    Mutates `memory`.

    Args:
        x, where, first, dependent: as for `short_conv`.
        memory: `inputs` of `short_conv`; and those of snapshots in N slots, `[N, kernel - 1, channels]` fp32
            contiguous. No two requests may have the same state row.
        snapshots: as for `delta_rule`.
    """
    inputs, kept_inputs = memory
    before = kept_inputs.shape[1]
    _check(x, where, inputs, before + 1)
    _check_kept(inputs, kept_inputs)
    (rows, q_start, runs), channels, slots = where, inputs.shape[2], kept_inputs.shape[0]
    keep_inputs_kernel[(rows.shape[0], triton.cdiv(channels, _BLOCK))](
        x,
        rows,
        q_start,
        runs,
        *memory,
        *snapshots,
        x.stride(0),
        first,
        runs.stride(0),
        inputs.shape[1],
        CHANNELS=channels,
        KERNEL=before + 1,
        SNAPSHOTS=int(slots > 0),
        BLOCK=_BLOCK,
        BLOCK_SNAPSHOTS=triton.next_power_of_2(max(1, slots)),
        num_warps=1,
        **options(dependent),
    )


@keep_conv_inputs.register_fake
def _(
    x: Tensor, where: list[Tensor], memory: list[Tensor], snapshots: list[Tensor], first: int, dependent: bool
) -> None:
    inputs, kept_inputs = memory
    _check(x, where, inputs, kept_inputs.shape[1] + 1)
    _check_kept(inputs, kept_inputs)


def _check(x: Tensor, where: list[Tensor], inputs: Tensor, kernel: int) -> None:
    rows, q_start, runs = where
    assert x.shape[1] == 3 * inputs.shape[2]
    assert x.stride(1) == 1
    assert q_start.shape == (rows.shape[0] + 1,)
    assert runs.shape[1] >= rows.shape[0]
    assert inputs.shape[1] >= kernel - 1
    assert inputs.dtype == torch.float32
    assert inputs.is_contiguous()


def _check_rows(x: Tensor, conv: Tensor, out: Tensor) -> int:
    """Check operands of `short_conv`, and return the number of channels."""
    channels = conv.shape[1]
    assert x.shape == (out.shape[0], 3 * channels)
    assert out.shape[1] == channels
    assert out.stride(1) == 1
    assert out.dtype == x.dtype
    assert conv.dtype == torch.float32
    assert conv.is_contiguous()
    return channels


def _check_kept(inputs: Tensor, kept_inputs: Tensor) -> None:
    assert kept_inputs.shape[2] == inputs.shape[2]
    assert kept_inputs.dtype == inputs.dtype
    assert kept_inputs.is_contiguous()


_INTEGERS = dict.fromkeys(("rows", "q_start", "runs"), "*i64") | dict.fromkeys(
    ("x_stride", "first", "stride", "entries"), "i32"
)


def _conv_variant(dtype: str, channels: int) -> Variant:
    """Return a variant of the convolution to compile for `channels` channels."""
    return Variant(
        f"short_conv_{dtype}_c{channels}",
        short_conv_kernel,
        _INTEGERS
        | dict.fromkeys(("x", "out"), f"*{dtype}")
        | dict.fromkeys(("conv", "inputs"), "*fp32")
        | {"out_stride": "i32"},
        {"CHANNELS": channels, "KERNEL": 3, "TILE": _TILE, "BLOCK": _BLOCK, "DEPENDENT": False},
        aligned=("x_stride", "out_stride"),
    )


def _keep_variant(dtype: str, channels: int, slots: int) -> Variant:
    """Return a variant of the kernel that keeps inputs, for `slots` snapshots."""
    snapshots = ("snapshot_count", "snapshot_rows", "snapshot_lengths", "snapshot_slots")
    return Variant(
        f"keep_conv_inputs_{dtype}_c{channels}{'_snapshots' * bool(slots)}",
        keep_inputs_kernel,
        _INTEGERS
        | {"x": f"*{dtype}"}
        | dict.fromkeys(("inputs", "kept_inputs"), "*fp32")
        | dict.fromkeys(snapshots, "*i64"),
        {
            "CHANNELS": channels,
            "KERNEL": 3,
            "SNAPSHOTS": int(slots > 0),
            "BLOCK": _BLOCK,
            "BLOCK_SNAPSHOTS": triton.next_power_of_2(max(1, slots)),
            "DEPENDENT": False,
        },
        num_warps=1,
        aligned=("x_stride",),
    )


VARIANTS = (
    _conv_variant("bf16", 2048),
    _conv_variant("fp32", 1024),
    _keep_variant("bf16", 2048, 0),
    _keep_variant("bf16", 2048, 200),
    _keep_variant("fp32", 1024, 0),
)
