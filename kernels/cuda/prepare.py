"""Inputs of an iteration from row state, on the device. Runs no model and draws nothing.

Only the device knows n while launches are in flight, so positions and slots of a decode iteration are made here;
`SlotMapper` of the Rust core defines the same mapping where lengths are known to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda.row_state import Entries, RowTensors
from specrs.kernels.cuda.variants import Variant
from torch import Tensor


@triton.jit
def _slot(table, position, first, capacity, block_size: tl.constexpr):  # type: ignore[no-untyped-def]
    live = (position >= first) & (position < capacity)
    block = tl.load(table + position // block_size, mask=live, other=0)
    return tl.where(live, block * block_size + position % block_size, -1)


@triton.jit(
    do_not_specialize=[
        "draft_context",
        "padding_row",
        "num_rows",
        "tokens_stride",
        "table_stride",
        "batch",
        "K",
        "stride",
    ]
)
def prepare_kernel(  # type: ignore[no-untyped-def]
    count_ptr,
    entry_row_ptr,
    entry_k_ptr,
    entry_capacity_ptr,
    emits_ptr,
    num_tokens_ptr,
    draft_len_ptr,
    limit_ptr,
    active_ptr,
    tokens_ptr,
    block_table_ptr,
    row_ptr,
    n_ptr,
    k_ptr,
    alive_ptr,
    capacity_ptr,
    q_start_ptr,
    first_id_ptr,
    first_position_ptr,
    first_slot_ptr,
    draft_position_ptr,
    draft_slot_ptr,
    draft_draw_ptr,
    verify_id_ptr,
    verify_position_ptr,
    verify_slot_ptr,
    verify_draw_ptr,
    verify_row_ptr,
    table_ptr,
    draft_context,
    padding_row,
    num_rows,
    tokens_stride,
    table_stride,
    batch,
    K,
    stride,
    W: tl.constexpr,
    HAS_EMITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    b = tl.program_id(0)
    count = tl.load(count_ptr)
    valid = b < count
    row = tl.where(valid, tl.load(entry_row_ptr + b, mask=valid, other=0), padding_row)
    capacity = tl.load(entry_capacity_ptr + b, mask=valid, other=0)
    planned = tl.load(entry_k_ptr + b, mask=valid, other=0)
    n = tl.load(num_tokens_ptr + row)
    alive = valid & (tl.load(active_ptr + row) != 0)
    if HAS_EMITS:
        alive = alive & (tl.load(emits_ptr + b, mask=valid, other=0) != 0)
    draft_len = tl.load(draft_len_ptr + row)
    room = tl.minimum(tl.load(limit_ptr + row) - 1, draft_context + 1) - n
    ready = alive
    if W > 0:
        ready = ready & (draft_len >= n - W)
    k = tl.where(ready, tl.maximum(tl.minimum(planned, room), 0), 0)

    others = tl.arange(0, BLOCK_B)
    rows_of = tl.load(entry_k_ptr + others, mask=others < count, other=0) + 1
    start = tl.sum(tl.where((others < b) & (others < count), rows_of, 0))
    tl.store(row_ptr + b, row)
    tl.store(n_ptr + b, n)
    tl.store(k_ptr + b, k)
    tl.store(alive_ptr + b, alive.to(tl.int64))
    tl.store(capacity_ptr + b, capacity)
    tl.store(q_start_ptr + b, start)
    total = tl.sum(tl.where(others < count, rows_of, 0))
    if b == batch - 1:
        tl.store(q_start_ptr + batch, total)

    source = block_table_ptr + row * table_stride
    sequence = tokens_ptr + row * tokens_stride
    j = tl.arange(0, BLOCK_K)

    # Verification: row j is fed position n - 1 + j; ids of drafts come when they are drawn.
    owned = j < tl.where(valid, planned + 1, 0)
    position = tl.where(j < tl.where(alive, k + 1, 0), n - 1 + j, -1)
    last = tl.load(sequence + n - 1, mask=valid & (n > 0), other=0)
    at = start + j
    tl.store(verify_id_ptr + at, tl.where(j == 0, last, 0), mask=owned)
    tl.store(verify_position_ptr + at, position, mask=owned)
    tl.store(verify_slot_ptr + at, _slot(source, position, 0, capacity, BLOCK_SIZE), mask=owned)
    tl.store(verify_draw_ptr + at, n + j, mask=owned)
    tl.store(verify_row_ptr + at, row, mask=owned)
    for tail in range(total + b, num_rows, batch):
        tl.store(verify_id_ptr + tail, 0)
        tl.store(verify_position_ptr + tail, -1)
        tl.store(verify_slot_ptr + tail, -1)
        tl.store(verify_draw_ptr + tail, 0)
        tl.store(verify_row_ptr + tail, padding_row)

    if W > 0:  # noqa: SIM102 (a constant: without draft KV nothing of it is compiled)
        if K > 0:
            # Pass 1 feeds the last W positions; slot -1 where the draft has their KV already.
            c = tl.arange(0, BLOCK_K)
            fed = tl.maximum(tl.where(c < tl.where(k >= 1, W, 0), n - W + c, -1), -1)
            written = _slot(source, fed, draft_len, capacity, BLOCK_SIZE)
            tl.store(first_id_ptr + b * W + c, tl.load(sequence + fed, mask=fed >= 0, other=0), mask=c < W)
            tl.store(first_position_ptr + b * W + c, fed, mask=c < W)
            tl.store(first_slot_ptr + b * W + c, written, mask=c < W)
            # Pass i >= 2 feeds n + i - 2; pass i draws the token of position n + i - 1. Row i - 1 of [K, batch].
            fed = tl.where(j + 1 <= k, n + j - 1, -1)
            written = _slot(source, fed, draft_len, capacity, BLOCK_SIZE)
            tl.store(draft_position_ptr + j * stride + b, fed, mask=j < K)
            tl.store(draft_slot_ptr + j * stride + b, written, mask=j < K)
            tl.store(draft_draw_ptr + j * stride + b, n + j, mask=j < K)

    blocks = tl.where(alive, (n + k + BLOCK_SIZE - 1) // BLOCK_SIZE, 0)
    blocks = tl.minimum(blocks, table_stride)
    for first in range(0, blocks, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        tl.store(table_ptr + b * table_stride + t, tl.load(source + t, mask=t < blocks, other=0), mask=t < blocks)


@dataclass(frozen=True, slots=True)
class PlannedEntries:
    """The record's entries that an iteration is for; int64, sections of at least B words."""

    count: Tensor
    """[1] entries that the launch has; those behind are padding."""
    row: Tensor
    k: Tensor
    """Planned K, descending."""
    capacity: Tensor
    emits: Tensor | None = None
    """0 for a prompt chunk that is not its prompt's last; None: all entries emit."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What the draft passes of an iteration of B entries are fed, int64; written by `prepare_iteration`."""

    first_ids: Tensor
    """[B * max_draft_lag], of pass 1; like the next two."""
    first_positions: Tensor
    first_slots: Tensor
    positions: Tensor
    """[K, B], any row stride: row i - 1 is what pass i >= 2 feeds."""
    slots: Tensor
    """Of the strides of `positions`."""
    draws: Tensor
    """Of the strides of `positions`; row i - 1 is the position that pass i draws."""


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """The N >= sum(planned + 1) flat rows of verification, int64 `[N]`; written by `prepare_iteration`."""

    ids: Tensor
    """Those of drafts follow in `assemble_drafts`."""
    positions: Tensor
    slots: Tensor
    draws: Tensor
    """The position that each row gives the distribution of."""
    rows: Tensor
    """The state row of each."""


@dataclass(frozen=True, slots=True)
class IterationInputs:
    """All that `prepare_iteration` writes."""

    entries: Entries
    table: Tensor
    """[B, max_blocks] int64, the entries' block tables as far as they are read."""
    draft: DraftRows
    verify: VerifyRows


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is fixed for an engine's life; with the rows of state it fixes what is compiled, so that no plan compiles
    anew."""

    draft_context: int
    """Positions that the draft may hold; as many as a row without one."""
    max_draft_lag: int
    """Rows an entry of draft pass 1; 0 for a drafter without KV, for which no draft rows are written."""
    block_size: int
    max_k: int
    """The engine's K."""


def prepare_iteration(rows: RowTensors, planned: PlannedEntries, out: IterationInputs, sizes: Sizes) -> None:
    """Guard the planned K and write the inputs of every pass of an iteration of B entries; mutates `out` only.

    K_r = max(min(planned, min(limit - 1, draft_context + 1) - n), 0), and 0 where the row has ended or the draft's KV
    lags by more than `max_draft_lag`: `runner.iteration.prepare` is the reference. Padding owns no row and names the
    padding row, the last one of row state.
    """
    read = [planned.count, planned.row, planned.k, planned.capacity]
    read += [planned.k if planned.emits is None else planned.emits]
    read += [rows.num_tokens, rows.draft_len, rows.limit, rows.active, rows.tokens, rows.block_table]
    draft, verify = out.draft, out.verify
    written = out.entries.tensors()
    written += [draft.first_ids, draft.first_positions, draft.first_slots, draft.positions, draft.slots, draft.draws]
    written += [verify.ids, verify.positions, verify.slots, verify.draws, verify.rows, out.table]
    fixed = [sizes.draft_context, sizes.max_draft_lag, sizes.block_size, sizes.max_k]
    torch.ops.specrs.prepare_iteration(read, written, fixed, planned.emits is not None)


@torch.library.custom_op("specrs::prepare_iteration", mutates_args=["written"])
def _prepare_iteration(read: list[Tensor], written: list[Tensor], sizes: list[int], has_emits: bool) -> None:
    """The op behind `prepare_iteration`: tensors in the order of the kernel's pointers, the fields of a Sizes."""
    num_tokens, tokens, block_table = read[5], read[9], read[10]
    row, draft_positions, verify_ids = written[0], written[9], written[12]
    draft_context, max_draft_lag, block_size, max_k = sizes
    batch = row.shape[0]
    prepare_kernel[(batch,)](
        *read,
        *written,
        draft_context,
        num_tokens.shape[0] - 1,
        verify_ids.shape[0],
        tokens.stride(0),
        block_table.stride(0),
        batch,
        draft_positions.shape[0],
        draft_positions.stride(0),
        W=max_draft_lag,
        HAS_EMITS=has_emits,
        BLOCK_SIZE=block_size,
        BLOCK_B=triton.next_power_of_2(num_tokens.shape[0]),
        BLOCK_K=triton.next_power_of_2(max(max_k + 1, max_draft_lag)),
        BLOCK_T=256,
        num_warps=1,
        enable_fp_fusion=True,
    )


@_prepare_iteration.register_fake
def _(read: list[Tensor], written: list[Tensor], sizes: list[int], has_emits: bool) -> None:
    return None


@triton.jit(do_not_specialize=["tokens_stride", "K", "stride", "drafts_stride"])
def assemble_kernel(  # type: ignore[no-untyped-def]
    drawn_ptr,
    row_ptr,
    n_ptr,
    k_ptr,
    q_start_ptr,
    tokens_ptr,
    verify_id_ptr,
    draft_ptr,
    tokens_stride,
    K,
    stride,
    drafts_stride,
    BLOCK_K: tl.constexpr,
):
    b = tl.program_id(0)
    j = tl.arange(0, BLOCK_K)
    k = tl.load(k_ptr + b)
    drafted = j < k
    drawn = tl.load(drawn_ptr + j * stride + b, mask=drafted, other=0)
    tl.store(draft_ptr + b * drafts_stride + j, drawn, mask=j < K)
    tl.store(verify_id_ptr + tl.load(q_start_ptr + b) + 1 + j, drawn, mask=drafted)
    sequence = tokens_ptr + tl.load(row_ptr + b) * tokens_stride
    tl.store(sequence + tl.load(n_ptr + b) + j, drawn, mask=drafted)


def assemble_drafts(
    drawn: Tensor, entries: Entries, tokens: Tensor, verify_ids: Tensor, drafts: Tensor, max_k: int
) -> None:
    """Put the drafts into the inputs of verification and behind the committed tokens of their rows.

    Args:
        drawn: `[K, B]` int64, the tokens that pass i drew in row i - 1.
        entries: of `prepare_iteration`.
        tokens: `[R + 1, M]` of row state; [n, n + K_r) is written.
        verify_ids: `[N]` int64; rows 1..K_r of each entry are written.
        drafts: `[B, K]` int64, written; 0 in columns from K_r on.
        max_k: the engine's K.
    """
    torch.ops.specrs.assemble_drafts(drawn, entries.tensors(), tokens, verify_ids, drafts, max_k)


@torch.library.custom_op("specrs::assemble_drafts", mutates_args=["tokens", "verify_ids", "drafts"])
def _assemble_drafts(
    drawn: Tensor, entries: list[Tensor], tokens: Tensor, verify_ids: Tensor, drafts: Tensor, max_k: int
) -> None:
    row, n, k, _, _, q_start = entries
    num_drafts, batch = drawn.shape
    assemble_kernel[(batch,)](
        drawn,
        row,
        n,
        k,
        q_start,
        tokens,
        verify_ids,
        drafts,
        tokens.stride(0),
        num_drafts,
        drawn.stride(0),
        drafts.stride(0),
        BLOCK_K=triton.next_power_of_2(max_k),
        num_warps=1,
        enable_fp_fusion=True,
    )


@_assemble_drafts.register_fake
def _(drawn: Tensor, *rest: object) -> None:
    return None


def _variants() -> tuple[Variant, ...]:
    ints = {"draft_context", "padding_row", "num_rows", "tokens_stride", "table_stride", "batch", "K", "stride"}
    ints |= {"drafts_stride"}

    def make(name: str, fn: Any, constants: dict[str, Any]) -> Variant:
        signature = {
            arg: "i32" if arg in ints else "*i1" if arg == "active_ptr" else "*i64"
            for arg in fn.arg_names
            if arg not in constants
        }
        return Variant(name, fn, signature, constants, num_warps=1)

    made = [
        make(
            f"prepare_{name}_b{rows}",
            prepare_kernel,
            {"W": lag, "HAS_EMITS": emits, "BLOCK_SIZE": 16, "BLOCK_B": rows, "BLOCK_K": 8, "BLOCK_T": 256},
        )
        for name, lag, emits, rows in (
            ("decode", 2, False, 2),
            ("decode", 2, False, 512),
            ("plain", 0, False, 512),
            ("prefill", 2, True, 512),
        )
    ]
    return (*made, make("assemble_drafts", assemble_kernel, {"BLOCK_K": 8}))


VARIANTS = _variants()
