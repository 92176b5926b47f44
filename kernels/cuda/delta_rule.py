"""Gated delta rule of a pass (Yang et al. 2025, eq. 10): replays accepted drafts, and goes on row by row.

A state row is changed in place and never copied. A request's first row of a verification is always committed, so
its update goes into the base. Updates of the rows after it are logged, and replayed by the request's next pass if they
were accepted. Rows and replays share `_advance`, so a state has the same bits either way. Prompts take the same loop.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._delta_layout import COLUMNS, Sizes, channel_column, conv_dim, outputs, sizes_of, slices
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda._state_rows import keep_inputs, next_snapshot
from specrs.kernels.cuda.variants import Variant
from torch import Tensor


@triton.jit
def _advance(state, key, delta, decay):  # type: ignore[no-untyped-def]
    """Return `decay state + key delta^T`. The sum is one explicit `fma`, which no compiler can round in another way at
    one of the two places that call this function."""
    return tl.fma(key[:, None], delta[None, :], decay * state)


@triton.jit(
    do_not_specialize=["first", "low", "high", "stride", "entries", "most"],
    # Views of the record.
    do_not_specialize_on_alignment=["snapshot_count", "snapshot_rows", "snapshot_lengths", "snapshot_slots"],
)
def delta_rule_kernel(  # type: ignore[no-untyped-def]
    x,
    rows,
    q_start,
    runs,
    gates,
    replayed,
    inputs,
    bases,
    deltas,
    decays,
    mixed,
    kept_inputs,
    kept_bases,
    snapshot_count,
    snapshot_rows,
    snapshot_lengths,
    snapshot_slots,
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
    SNAPSHOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_SNAPSHOTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    s, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, start = tl.load(rows + s), tl.load(q_start + s)
    count, replay = tl.load(runs + s), tl.load(runs + stride + s)
    begins, commit = tl.load(runs + 2 * stride + s), tl.load(runs + 3 * stride + s)
    begin, end = tl.maximum(low - start, 0), tl.minimum(high - start, count)
    if begin >= end:
        return

    k = tl.arange(0, BLOCK_KEY)
    in_key = k < KEY_DIM
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    in_value = column < VALUE_DIM
    inside = in_key[:, None] & in_value[None, :]
    HEAD: tl.constexpr = KEY_DIM * VALUE_DIM
    of_state = head * HEAD + k[:, None] * VALUE_DIM + column[None, :]
    base = bases + row * (VALUE_HEADS * HEAD) + of_state
    # A later piece of the pass goes on from the base, which the piece before it has written.
    is_first = begin == 0
    held = (k < tl.where((begins == 0) | (begin > 0), KEY_DIM, 0))[:, None] & in_value[None, :]
    state = tl.load(base, mask=held, other=0)
    state = tl.where(is_first & (begins == 2), float("nan"), state)

    # Positions that the state covers, and the first snapshot after them.
    length = tl.load(runs + 4 * stride + s)
    before, snapshots = length, 0
    if SNAPSHOTS > 0:
        snapshots = tl.load(snapshot_count)
        length += tl.where(is_first, 0, replay + begin)
        wanted, slot = next_snapshot(
            snapshot_rows, snapshot_lengths, snapshot_slots, snapshots, row, length, BLOCK_SNAPSHOTS
        )

    key_head = head // (VALUE_HEADS // KEY_HEADS)
    delta_log = deltas + row * most * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + column
    decay_log = decays + (row * most * VALUE_HEADS + head) * tl.num_programs(2) + part
    for i in range(0, tl.where(is_first, replay, 0)):
        key = tl.load(replayed + (s * most + i) * KEYS + key_head * KEY_DIM + k, mask=in_key, other=0)
        delta = tl.load(delta_log + i * (VALUE_HEADS * VALUE_DIM), mask=in_value, other=0)
        state = _advance(state, key, delta, tl.load(decay_log + i * (VALUE_HEADS * tl.num_programs(2))))
        if SNAPSHOTS > 0:
            length += 1
            if length == wanted:
                tl.store(kept_bases + slot * (VALUE_HEADS * HEAD) + of_state, state, mask=inside)
                wanted, slot = next_snapshot(
                    snapshot_rows, snapshot_lengths, snapshot_slots, snapshots, row, length, BLOCK_SNAPSHOTS
                )

    last = tl.minimum(commit, end) - 1
    for i in range(begin, end):
        at = start - low + i
        query_and_key = mixed + at * CHANNELS + key_head * KEY_DIM + k
        query = tl.load(query_and_key, mask=in_key, other=0)
        key = tl.load(query_and_key + KEYS, mask=in_key, other=0)
        out = mixed + at * CHANNELS + 2 * KEYS + head * VALUE_DIM + column
        value = tl.load(out, mask=in_value, other=0)
        gate = gates + at * (2 * VALUE_HEADS) + head
        beta, decay = tl.load(gate), tl.load(gate + VALUE_HEADS)
        known = tl.sum(key[:, None] * state, 0)
        delta = beta * (value - decay * known)
        state = _advance(state, key, delta, decay)
        tl.store(out, tl.sum(query[:, None] * state, 0), mask=in_value)
        if i == last:
            tl.store(base, state, mask=inside)
        if SNAPSHOTS > 0:
            length += 1
            if (length == wanted) & (i < commit):
                tl.store(kept_bases + slot * (VALUE_HEADS * HEAD) + of_state, state, mask=inside)
                wanted, slot = next_snapshot(
                    snapshot_rows, snapshot_lengths, snapshot_slots, snapshots, row, length, BLOCK_SNAPSHOTS
                )
        # Programs log what they alone read, so that none overwrites what another one still has to replay.
        logged = i - commit
        is_logged = column < tl.where(logged >= 0, VALUE_DIM, 0)
        tl.store(delta_log + logged * (VALUE_HEADS * VALUE_DIM), delta, mask=is_logged)
        tl.store(decay_log + logged * (VALUE_HEADS * tl.num_programs(2)), decay, mask=logged >= 0)

    # Inputs of the convolution for the next pass. All programs together have all channels.
    if end == count:
        channel = (head * tl.num_programs(2) + part) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
        kept = inputs + row * entries * CHANNELS + channel
        source = x + (first + start) * x_stride
        source += channel_column(channel, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, BY_KEY_HEAD)
        keep_inputs(
            source,
            kept,
            kept_inputs,
            channel,
            row,
            before,
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
            0,
            SNAPSHOTS,
            BLOCK_SNAPSHOTS,
        )


@torch.library.custom_op("specrs::delta_rule", mutates_args=("memory",))
def delta_rule(
    x: Tensor,
    where: list[Tensor],
    prepared: list[Tensor],
    memory: list[Tensor],
    snapshots: list[Tensor],
    sizes: list[int],
    piece: list[int],
    dependent: bool,
) -> None:
    """Run the gated delta rule over the rows of S requests that `delta_conv` has prepared. Mutates `memory`.

    Args:
        x, where, sizes, piece: as for `delta_conv`.
        prepared: `gates` and `replayed` of `delta_conv`.
        memory: inputs of the convolution, as for `delta_conv`; states `[R, value_heads, key_dim, value_dim]`; logged
            deltas `[R, K, value_heads * value_dim]`; and logged decays `[R, K, value_heads, slices]`. All but the
            inputs are fp32, all are contiguous. No two requests may have the same state row. Then `mixed` of
            `delta_conv`, whose values become outputs; and snapshots in N slots: inputs of the convolution `[N,
            kernel - 1, conv_dim]` of x's dtype, and states `[N, value_heads, key_dim, value_dim]` fp32.
        snapshots: number of snapshots to write, `[1]`; and state row, length and slot of each, `[N]` int64. One is
            written when the base passes that length: never from drafts that may be rejected.
        dependent: launch dependently (see `_dependent_launch`).

    One compiled kernel serves prompts and verification, so that a row's sums have one order, whatever the other rows
    and requests are and however the pass is cut.
    """
    _check(x, where, prepared, memory, sizes, piece)
    rows, q_start, runs = where
    first, low, high, _ = piece
    (gates, replayed), slots = prepared, memory[5].shape[0]
    programs = sizes[1] * slices(sizes)
    delta_rule_kernel[(rows.shape[0], sizes[1], slices(sizes))](
        x,
        rows,
        q_start,
        runs,
        gates,
        replayed,
        *memory,
        *snapshots,
        x.stride(0),
        first,
        low,
        high,
        runs.stride(0),
        memory[0].shape[1],
        replayed.shape[1],
        SNAPSHOTS=int(slots > 0),
        COLUMNS=COLUMNS,
        BLOCK_KEY=triton.next_power_of_2(sizes[2]),
        BLOCK_CHANNELS=triton.next_power_of_2(triton.cdiv(conv_dim(sizes), programs)),
        BLOCK_SNAPSHOTS=triton.next_power_of_2(max(1, slots)),
        num_warps=1,
        **sizes_of(sizes),
        **options(dependent),
    )


@delta_rule.register_fake
def _(
    x: Tensor,
    where: list[Tensor],
    prepared: list[Tensor],
    memory: list[Tensor],
    snapshots: list[Tensor],
    sizes: list[int],
    piece: list[int],
    dependent: bool,
) -> None:
    _check(x, where, prepared, memory, sizes, piece)


def _check(
    x: Tensor,
    where: list[Tensor],
    prepared: list[Tensor],
    memory: list[Tensor],
    sizes: Sizes,
    piece: list[int],
) -> None:
    key_heads, value_heads, key_dim, value_dim, kernel, _ = sizes
    (inputs, bases, deltas, decays, mixed, *kept), (rows, q_start, runs) = memory, where
    gates, replayed = prepared
    drafts, held, needed = replayed.shape[1], bases.shape[0], piece[2] - piece[1]
    assert x.shape[1] == outputs(sizes)
    assert x.stride(1) == 1
    assert q_start.shape == (rows.shape[0] + 1,)
    assert runs.shape[1] >= rows.shape[0]
    assert bases.shape == (held, value_heads, key_dim, value_dim)
    assert inputs.shape == (held, kernel - 1 + drafts, conv_dim(sizes))
    assert inputs.dtype == x.dtype
    assert deltas.shape == (held, drafts, value_heads * value_dim)
    assert decays.shape == (held, drafts, value_heads, slices(sizes))
    assert mixed.shape[0] >= needed
    assert mixed.shape[1:] == (conv_dim(sizes),)
    assert gates.shape[0] >= needed
    assert gates.shape[1:] == (2, value_heads)
    assert replayed.shape[0] >= rows.shape[0]
    assert replayed.shape[2] == key_heads * key_dim
    assert kept[0].shape == (kept[1].shape[0], kernel - 1, conv_dim(sizes))
    assert kept[0].dtype == x.dtype
    assert kept[1].shape[1:] == bases.shape[1:]
    for tensor in (*memory, gates, replayed):
        assert tensor.is_contiguous()


def _variant(name: str, dtype: str, sizes: Sizes, *, slots: int = 0, aligned: bool = True) -> Variant:
    """Return a variant to compile for delta nets of `sizes`, and `slots` snapshots. `aligned`: rows of x begin at
    multiples of 16 elements."""
    floats = ("gates", "replayed", "bases", "deltas", "decays", "mixed", "kept_bases")
    snapshots = ("snapshot_count", "snapshot_rows", "snapshot_lengths", "snapshot_slots")
    channels = triton.cdiv(conv_dim(sizes), sizes[1] * slices(sizes))
    return Variant(
        name,
        delta_rule_kernel,
        {
            **dict.fromkeys(("x", "inputs", "kept_inputs"), f"*{dtype}"),
            **dict.fromkeys(floats, "*fp32"),
            **dict.fromkeys(("rows", "q_start", "runs", *snapshots), "*i64"),
            **dict.fromkeys(("x_stride", "first", "low", "high", "stride", "entries", "most"), "i32"),
        },
        sizes_of(sizes)
        | {
            "SNAPSHOTS": int(slots > 0),
            "BLOCK_SNAPSHOTS": triton.next_power_of_2(max(1, slots)),
            "COLUMNS": COLUMNS,
            "BLOCK_KEY": triton.next_power_of_2(sizes[2]),
            "BLOCK_CHANNELS": triton.next_power_of_2(channels),
            "DEPENDENT": False,
        },
        num_warps=1,
        aligned=("x_stride",) if aligned else (),
    )


VARIANTS = (
    _variant("delta_rule_bf16_k16_v32", "bf16", (16, 32, 128, 128, 4, 0)),
    _variant("delta_rule_bf16_k16_v32_snapshots", "bf16", (16, 32, 128, 128, 4, 0), slots=200),
    _variant("delta_rule_fp32_k16_v48", "fp32", (16, 48, 128, 128, 4, 0)),
    # One of eight ranks.
    _variant("delta_rule_bf16_k2_v6_snapshots", "bf16", (2, 6, 128, 128, 4, 0), slots=200, aligned=False),
)
