"""Rows of a pass by request, as kernels of delta nets read them: how many, what to replay, what to begin with. Computes
no state.

A state row has one base, the states after its first `length` positions, and a log with the updates of drafts after
them. The position of a request's next row says how many of these drafts were accepted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

BASE, ZEROS, FAULT = 0, 1, 2
"""Kinds of the states before a request's first row: the base and the log; zeros; or NaN, because neither base nor log
reach that position."""
_BLOCK = 256


@triton.jit(do_not_specialize=["first", "stride"])
def delta_runs_kernel(  # type: ignore[no-untyped-def]
    positions,
    q_start,
    rows,
    lengths,
    drafts,
    runs,
    first,
    stride,
    PROMPTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    s = tl.program_id(0)
    start, end = tl.load(q_start + s), tl.load(q_start + s + 1)
    own = positions + first
    count = start - start
    for at in range(start, end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        position = tl.load(own + i, mask=i < end, other=-1)
        count += tl.sum((position >= 0).to(tl.int64))
    position = tl.load(own + start, mask=start < end, other=-1)
    count = tl.where(position >= 0, count, 0)
    row = tl.load(rows + s)
    replay = tl.where(position == 0, 0, position - tl.load(lengths + row))
    known = (replay >= 0) & (replay <= tl.load(drafts + row))
    begin = tl.where(position == 0, 1, tl.where(known, 0, 2)).to(tl.int64)
    fed = count > 0
    commit = count
    if not PROMPTS:
        commit = tl.minimum(count, 1)
    tl.store(runs + s, count)
    tl.store(runs + stride + s, tl.where(known & fed, replay, 0))
    tl.store(runs + 2 * stride + s, begin)
    tl.store(runs + 3 * stride + s, commit)
    tl.store(runs + 4 * stride + s, tl.where(fed & known, position - replay, 0))
    tl.store(lengths + row, position + commit, mask=fed)
    tl.store(drafts + row, count - commit, mask=fed)


@torch.library.custom_op("specrs::delta_runs", mutates_args=("counts", "runs"))
def delta_runs(
    positions: Tensor,
    q_start: Tensor,
    rows: Tensor,
    counts: list[Tensor],
    runs: Tensor,
    first: int,
    prompts: bool,
    dependent: bool,
) -> None:
    """Write the runs of S requests: number of rows, number of logged updates before them, what they begin with (`BASE`,
    `ZEROS` or `FAULT`), number of first rows that change the base, and number of positions in the base before.

    Args:
        positions: `[N]` int64 of a pass; -1 masks a row. In a request, masked rows come last.
        q_start: `[S + 1]` int64, first row of each request, counted from row `first`.
        rows: `[S]` int64, the requests' state rows. A request without rows may have any row.
        counts: lengths and drafts, `[R]` int64 each: number of positions in the base of each state row, and of
            logged updates after them. Written for requests with rows: they become what this pass leaves.
        runs: `[5, >= S]` int64, written.
        first: index of the pass's first row of these requests.
        prompts: True if all rows are committed tokens. False: all but a request's first may be rejected later.
        dependent: launch dependently (see `_dependent_launch`).
    """
    _check(positions, q_start, rows, counts, runs)
    delta_runs_kernel[(rows.shape[0],)](
        positions,
        q_start,
        rows,
        *counts,
        runs,
        first,
        runs.stride(0),
        PROMPTS=prompts,
        BLOCK=_BLOCK,
        num_warps=1,
        **options(dependent),
    )


@delta_runs.register_fake
def _(
    positions: Tensor,
    q_start: Tensor,
    rows: Tensor,
    counts: list[Tensor],
    runs: Tensor,
    first: int,
    prompts: bool,
    dependent: bool,
) -> None:
    _check(positions, q_start, rows, counts, runs)


def _check(positions: Tensor, q_start: Tensor, rows: Tensor, counts: list[Tensor], runs: Tensor) -> None:
    lengths, drafts = counts
    assert q_start.shape == (rows.shape[0] + 1,)
    assert lengths.shape == drafts.shape
    assert runs.shape[0] == 5
    assert runs.shape[1] >= rows.shape[0]
    for tensor in (positions, q_start, rows, lengths, drafts):
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.int64
    assert runs.stride(1) == 1


def delta_runs_reference(
    positions: Tensor,
    q_start: Tensor,
    rows: Tensor,
    counts: list[Tensor],
    runs: Tensor,
    first: int,
    prompts: bool,
) -> None:
    """Reference for `delta_runs`, one request after the other."""
    lengths, drafts = counts
    starts = [first + start for start in q_start.tolist()]
    for s, (row, start, end) in enumerate(zip(rows.tolist(), starts[:-1], starts[1:], strict=True)):
        fed = [position for position in positions[start:end].tolist() if position >= 0]
        commit = len(fed) if prompts else min(1, len(fed))
        runs[:, s] = torch.tensor([len(fed), 0, FAULT, commit, 0])
        if not fed:
            continue
        replay = fed[0] - int(lengths[row])
        if fed[0] == 0:
            runs[2, s] = ZEROS
        elif 0 <= replay <= int(drafts[row]):
            runs[1:3, s], runs[4, s] = torch.tensor([replay, BASE]), lengths[row]
        lengths[row], drafts[row] = fed[0] + commit, len(fed) - commit


VARIANTS = tuple(
    Variant(
        f"delta_runs{'_prompts' * prompts}",
        delta_runs_kernel,
        {
            **dict.fromkeys(("positions", "q_start", "rows", "lengths", "drafts", "runs"), "*i64"),
            **dict.fromkeys(("first", "stride"), "i32"),
        },
        {"PROMPTS": prompts, "BLOCK": _BLOCK, "DEPENDENT": False},
        num_warps=1,
    )
    for prompts in (False, True)
)
