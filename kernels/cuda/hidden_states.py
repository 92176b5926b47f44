"""Moves hidden states of the target between its passes and a drafter's: stores them by row, and gathers them. Computes
nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda.row_state import HiddenTensors
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["columns", "rows_per_seq"])
def gather_states_kernel(  # type: ignore[no-untyped-def]
    states, start, row_ptr, positions, out, columns, rows_per_seq, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position, row = tl.load(positions + r), tl.load(row_ptr + r // rows_per_seq)
    column = position - tl.load(start + row)
    live = (position >= 0) & (column >= 0) & (column < columns - 1)
    at = (row * columns + tl.where(live, column, 0)) * WIDTH
    x = tl.load(states + at + i, mask=i < tl.where(live, WIDTH, 0), other=0)
    tl.store(out + r * WIDTH + i, x, mask=i < WIDTH)


@triton.jit(do_not_specialize=["columns"])
def keep_states_kernel(  # type: ignore[no-untyped-def]
    entries, q_start, row_ptr, first_ptr, count_ptr, states, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    b, j = tl.program_id(0), tl.program_id(1)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    kept = i < tl.where(j < tl.load(count_ptr + b), WIDTH, 0)
    source = (tl.load(q_start + b) + j) * WIDTH
    at = (tl.load(row_ptr + b) * columns + tl.load(first_ptr + b) + j) * WIDTH
    tl.store(states + at + i, tl.load(entries + source + i, mask=kept, other=0), mask=kept)


def gather_states(hidden: HiddenTensors, row: Tensor, positions: Tensor, out: Tensor) -> None:
    """Gather the hidden states that a first drafting pass feeds. The reference is `gather_states_reference`.

    Args:
        hidden: hidden states that are kept by row.
        row: state row of each sequence, `[B]` int64.
        positions: `[B * C]` int64, C for each sequence. -1, and positions that are not kept, give zeros.
        out: `[B * C, L * hidden]` contiguous, of the states' dtype.
    """
    torch.ops.specrs.gather_states(hidden.states, hidden.start, row, positions, out)


def gather_states_reference(hidden: HiddenTensors, row: Tensor, positions: Tensor, out: Tensor) -> None:
    """Reference for `gather_states`, position by position."""
    rows = row.repeat_interleave(len(positions) // len(row)).tolist()
    for i, (of, position) in enumerate(zip(rows, positions.tolist(), strict=True)):
        column = position - int(hidden.start[of])
        is_kept = position >= 0 and 0 <= column < hidden.states.shape[1] - 1
        out[i] = hidden.states[of, column].flatten() if is_kept else 0


@torch.library.custom_op("specrs::gather_states", mutates_args=["out"])
def _gather_states(states: Tensor, start: Tensor, row: Tensor, positions: Tensor, out: Tensor) -> None:
    _check_gather(states, start, row, positions, out)
    rows, width = out.shape
    gather_states_kernel[(rows, triton.cdiv(width, _BLOCK))](
        states,
        start,
        row,
        positions,
        out,
        states.shape[1],
        rows // row.shape[0],
        WIDTH=width,
        BLOCK=_BLOCK,
    )


@_gather_states.register_fake
def _(states: Tensor, start: Tensor, row: Tensor, positions: Tensor, out: Tensor) -> None:
    _check_gather(states, start, row, positions, out)


def _check_gather(states: Tensor, start: Tensor, row: Tensor, positions: Tensor, out: Tensor) -> None:
    assert states.is_contiguous()
    assert out.is_contiguous()
    assert out.dtype == states.dtype
    assert out.shape == (positions.shape[0], states[0, 0].numel())
    assert positions.shape[0] % row.shape[0] == 0
    assert start.shape == states.shape[:1]


@dataclass(frozen=True, slots=True)
class Kept:
    """Rows of a verification whose hidden states are kept, `[B]` int64 each; written by `update_rows`."""

    first: Tensor
    """Column of a row's kept hidden states into which a sequence's first state goes."""
    count: Tensor
    """Number of states to keep, in order; 0 keeps nothing."""


def keep_states(
    entries: Tensor, q_start: Tensor, row: Tensor, kept: Kept, hidden: HiddenTensors, max_rows: int
) -> None:
    """Store the hidden states of committed tokens. Mutates `hidden.states`. The reference is `keep_states_reference`.

    Args:
        entries: `[N, L, hidden]` contiguous, states of the flat rows of a verification, or of the ends of prompts.
        q_start: `[B]` or more int64, the first flat row of each sequence.
        row: state row of each sequence, `[B]` int64.
        kept: rows to store.
        max_rows: maximum value of `kept.count`.
    """
    torch.ops.specrs.keep_states(entries, q_start, row, [kept.first, kept.count], hidden.states, max_rows)


def keep_states_reference(entries: Tensor, q_start: Tensor, row: Tensor, kept: Kept, hidden: HiddenTensors) -> None:
    """Reference for `keep_states`, one sequence after the other."""
    for start, of, first, count in zip(*(x.tolist() for x in (q_start, row, kept.first, kept.count)), strict=False):
        hidden.states[of, first : first + count] = entries[start : start + count]


@torch.library.custom_op("specrs::keep_states", mutates_args=["states"])
def _keep_states(
    entries: Tensor, q_start: Tensor, row: Tensor, kept: list[Tensor], states: Tensor, max_rows: int
) -> None:
    _check_keep(entries, kept, states)
    width = states[0, 0].numel()
    keep_states_kernel[(row.shape[0], max_rows, triton.cdiv(width, _BLOCK))](
        entries, q_start, row, *kept, states, states.shape[1], WIDTH=width, BLOCK=_BLOCK
    )


@_keep_states.register_fake
def _(entries: Tensor, q_start: Tensor, row: Tensor, kept: list[Tensor], states: Tensor, max_rows: int) -> None:
    _check_keep(entries, kept, states)


def _check_keep(entries: Tensor, kept: list[Tensor], states: Tensor) -> None:
    assert entries.is_contiguous()
    assert states.is_contiguous()
    assert entries.dtype == states.dtype
    assert entries.shape[1:] == states.shape[2:]
    assert kept[0].shape == kept[1].shape


def _variants() -> tuple[Variant, ...]:
    made = []
    for fn, name in ((gather_states_kernel, "gather_states"), (keep_states_kernel, "keep_states")):
        for dtype in ("bf16", "fp32"):
            states = dict.fromkeys(("states", "out", "entries"), f"*{dtype}")
            types = {**dict.fromkeys(("columns", "rows_per_seq"), "i32"), **states}
            signature = {arg: types.get(arg, "*i64") for arg in fn.arg_names if arg not in ("WIDTH", "BLOCK")}
            made.append(Variant(f"{name}_{dtype}", fn, signature, {"WIDTH": 3 * 5120, "BLOCK": _BLOCK}))
    return tuple(made)


VARIANTS = _variants()
