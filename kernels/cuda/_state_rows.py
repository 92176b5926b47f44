"""Parts of kernels of layers with states: the causal convolution of a request's rows, the inputs that its state row
keeps, and which snapshots to write. Launches nothing.

A state row keeps the convolution's inputs of the last `KERNEL - 1` positions of its base, then those of logged drafts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def next_snapshot(rows, lengths, slots, count, row, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return length and slot of the row's first snapshot of more than `length` positions. Without one, the length is
    2^62."""
    FAR: tl.constexpr = 1 << 62
    i = tl.arange(0, BLOCK)
    own = (i < count) & (tl.load(rows + i, mask=i < count, other=-1) == row)
    found = tl.load(lengths + i, mask=own, other=FAR)
    best = tl.min(tl.where(found > length, found, FAR), 0)
    slot = tl.load(slots + i, mask=own & (found == best), other=0)
    return best, tl.max(slot, 0)


@triton.jit
def _new_inputs(source, mask, GATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load inputs of the convolution from a pass's rows. With `GATE` they are fp32: the numbers at `source`, times
    those `GATE` columns before them."""
    value = tl.load(source, mask=mask, other=0)
    if GATE > 0:
        value = value.to(tl.float32) * tl.load(source - GATE, mask=mask, other=0).to(tl.float32)
    return value


@triton.jit
def convolve(  # type: ignore[no-untyped-def]
    source,
    kept,
    weights,
    t,
    live,
    inside,
    replay,
    from_base,
    x_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    GATE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the convolution of rows `t` `[TILE]` of a request, fp32 `[TILE, BLOCK]`. Its `replay` accepted drafts come
    first, then the rows of the pass.

    `source`, `kept` and `weights` point to BLOCK channels, of which those `inside` exist: in the request's first row of
    the pass, in its state row, and in the first row of the weights. Rows that are not `live` have any result.
    """
    BEFORE: tl.constexpr = KERNEL - 1
    total = tl.zeros((TILE, BLOCK), tl.float32)
    for tap in tl.static_range(KERNEL):
        # Inputs before the request's first row of this pass are kept: those before the base's end, then of drafts.
        at = t + tap
        is_kept = at < BEFORE + replay
        before = tl.load(
            kept[None, :] + at[:, None] * CHANNELS,
            mask=(live & (at < tl.where(from_base, BEFORE + replay, 0)))[:, None] & inside[None, :],
            other=0,
        ).to(tl.float32)
        is_new = (live & (at >= BEFORE + replay))[:, None] & inside[None, :]
        new = _new_inputs(source[None, :] + (at - BEFORE - replay)[:, None] * x_stride, is_new, GATE).to(tl.float32)
        weight = tl.load(weights + tap * CHANNELS, mask=inside, other=0)
        total = tl.fma(tl.where(is_kept[:, None], before, new), weight[None, :], total)
    return total


@triton.jit
def keep_inputs(  # type: ignore[no-untyped-def]
    source,
    kept,
    kept_inputs,
    channel,
    row,
    length,
    count,
    replay,
    from_base,
    commit,
    x_stride,
    snapshots,
    snapshot_rows,
    snapshot_lengths,
    snapshot_slots,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    GATE: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    BLOCK_SNAPSHOTS: tl.constexpr,
):
    """Write the inputs of the convolution that a request's next pass reads, and those of snapshots. All rows of this
    pass must have been convolved.

    `source` and `kept` are as for `convolve`, of the channels `channel`. The base covers `length` positions before the
    pass, and `replay + commit` more after it. The pass has `count` rows of the request.
    """
    BEFORE: tl.constexpr = KERNEL - 1
    if SNAPSHOTS > 0:
        wanted, slot = next_snapshot(
            snapshot_rows, snapshot_lengths, snapshot_slots, snapshots, row, length, BLOCK_SNAPSHOTS
        )
        while wanted <= length + replay + commit:
            for j in tl.static_range(BEFORE):
                at = wanted - length + j
                is_kept = at < BEFORE + replay
                old = tl.load(kept + at * CHANNELS, mask=channel < tl.where(is_kept & from_base, CHANNELS, 0), other=0)
                new = _new_inputs(
                    source + (at - BEFORE - replay) * x_stride, channel < tl.where(is_kept, 0, CHANNELS), GATE
                )
                target = kept_inputs + (slot * BEFORE + j) * CHANNELS + channel
                tl.store(target, tl.where(is_kept, old, new), mask=channel < CHANNELS)
            wanted, slot = next_snapshot(
                snapshot_rows, snapshot_lengths, snapshot_slots, snapshots, row, wanted, BLOCK_SNAPSHOTS
            )
    for j in tl.static_range(BEFORE):
        # Ascending, because each comes from a place further on.
        at = replay + commit + j
        is_kept = at < BEFORE + replay
        old = tl.load(kept + at * CHANNELS, mask=channel < tl.where(is_kept & from_base, CHANNELS, 0), other=0)
        new = _new_inputs(source + (at - BEFORE - replay) * x_stride, channel < tl.where(is_kept, 0, CHANNELS), GATE)
        tl.store(kept + j * CHANNELS, tl.where(is_kept, old, new), mask=channel < CHANNELS)
    for i in range(commit, count):
        new = _new_inputs(source + i * x_stride, channel < CHANNELS, GATE)
        tl.store(kept + (BEFORE + i - commit) * CHANNELS, new, mask=channel < CHANNELS)
