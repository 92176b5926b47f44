"""Makes the inputs of an iteration from row state, on the device. Runs no model and draws nothing.

Only the device knows n while steps are in flight, so positions and slots of a decode iteration are made here.
`SlotMapper` of the Rust core defines the same mapping for lengths that the host knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from specrs.core import DRAFTER_DEVICE
from specrs.kernels.cuda.row_state import HiddenTensors, RowTensors, Sequences
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_DEVICE = tl.constexpr(DRAFTER_DEVICE)


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
        "mask_id",
    ],
    # Views of the record from any sequence on: as compiled for an even one they would not serve an odd one.
    do_not_specialize_on_alignment=[
        "count_ptr",
        "seq_row_ptr",
        "seq_k_ptr",
        "seq_capacity_ptr",
        "emits_ptr",
        "drafter_ptr",
    ],
)
def prepare_kernel(  # type: ignore[no-untyped-def]
    count_ptr,
    seq_row_ptr,
    seq_k_ptr,
    seq_capacity_ptr,
    emits_ptr,
    drafter_ptr,
    num_tokens_ptr,
    draft_len_ptr,
    limit_ptr,
    active_ptr,
    tokens_ptr,
    block_table_ptr,
    hidden_start_ptr,
    draft_start_ptr,
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
    on_host_ptr,
    k_start_ptr,
    draft_context,
    padding_row,
    num_rows,
    tokens_stride,
    table_stride,
    batch,
    K,
    stride,
    mask_id,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    READS_HIDDEN: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,
    HAS_EMITS: tl.constexpr,
    HAS_HOST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    b = tl.program_id(0)
    count, first_chunk = tl.load(count_ptr), 0
    if HAS_CHUNKS:
        first_chunk = count
        count += tl.load(count_ptr + 1)
    valid = b < count
    row = tl.where(valid, tl.load(seq_row_ptr + b, mask=valid, other=0), padding_row)
    capacity = tl.load(seq_capacity_ptr + b, mask=valid, other=0)
    planned = tl.load(seq_k_ptr + b, mask=valid, other=0)
    n = tl.load(num_tokens_ptr + row)
    alive = valid & (tl.load(active_ptr + row) != 0)
    if HAS_EMITS:
        alive = alive & (tl.load(emits_ptr + b - first_chunk, mask=valid & (b >= first_chunk), other=1) != 0)
    draft_len = tl.load(draft_len_ptr + row)
    end = tl.load(limit_ptr + row) - 1
    within = tl.minimum(end, draft_context + 1)
    close = draft_len >= n - W
    if HAS_HOST:
        # What bounds passes on the device does not bound drafts that are there.
        on_host = tl.load(drafter_ptr + b, mask=valid, other=_DEVICE) != _DEVICE
        within = tl.where(on_host, end, within)
        close = close | on_host
        tl.store(on_host_ptr + b, on_host.to(tl.int64))
    room = within - n
    ready = alive
    if W > 0:  # noqa: SIM102 (constants)
        if READS_HIDDEN == 0:
            ready = ready & close
    k = tl.where(ready, tl.maximum(tl.minimum(planned, room), 0), 0)

    others = tl.arange(0, BLOCK_B)
    rows_of = tl.load(seq_k_ptr + others, mask=others < count, other=0) + 1
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
            drafts, missing, least, offset = k, draft_len, 0, 0
            if HAS_HOST:
                drafts = tl.where(on_host, 0, k)
            if READS_HIDDEN:
                # The state of a position goes with the token after it; where states leave a gap, the KV begins anew.
                offset = 1
                first_state, begin = tl.load(hidden_start_ptr + row), tl.load(draft_start_ptr + row)
                begin = tl.where((drafts > 0) & (draft_len < first_state), first_state, begin)
                tl.store(draft_start_ptr + row, begin)
                tl.store(k_start_ptr + b, begin)
                missing = tl.maximum(draft_len, first_state)
                least = missing
            # Pass 1 feeds the last W positions, and masks after them where it drafts all; slot -1 where the draft has
            # their KV already.
            c = tl.arange(0, BLOCK_C)
            fed = tl.where(drafts >= tl.maximum(c - (W - 2), 1), n - W - offset + c, -1)
            fed = tl.where((c < ROWS) & (fed >= least), fed, -1)
            written = _slot(source, fed, missing, capacity, BLOCK_SIZE)
            known = (fed >= 0) & (c < W)
            ids = tl.load(sequence + fed + offset, mask=known, other=0)
            if ROWS > W:
                ids = tl.where((fed >= 0) & (c >= W), mask_id, ids)
            tl.store(first_id_ptr + b * ROWS + c, ids, mask=c < ROWS)
            tl.store(first_position_ptr + b * ROWS + c, fed, mask=c < ROWS)
            tl.store(first_slot_ptr + b * ROWS + c, written, mask=c < ROWS)
            # Pass i >= 2 feeds n + i - 2; pass i draws the token of position n + i - 1. Row i - 1 of [K, batch].
            fed = tl.where(j + 1 <= drafts, n - offset + j - 1, -1)
            written = _slot(source, fed, missing, capacity, BLOCK_SIZE)
            tl.store(draft_position_ptr + j * stride + b, fed, mask=j < K)
            tl.store(draft_slot_ptr + j * stride + b, written, mask=j < K)
            tl.store(draft_draw_ptr + j * stride + b, n + j, mask=j < K)

    blocks = tl.where(alive, (n + k + BLOCK_SIZE - 1) // BLOCK_SIZE, 0)
    blocks = tl.minimum(blocks, table_stride)
    for first in range(0, blocks, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        tl.store(table_ptr + b * table_stride + t, tl.load(source + t, mask=t < blocks, other=0), mask=t < blocks)


@dataclass(frozen=True, slots=True)
class PlannedSequences:
    """Sequences of the record that an iteration is for. int64 sections of at least B elements."""

    count: Tensor
    """[1] number of sequences in the step; further ones are padding. Or [2]: number of decoding sequences, and number
    of prompt chunks after them."""
    row: Tensor
    k: Tensor
    """Planned K of each sequence, descending."""
    capacity: Tensor
    emits: Tensor | None = None
    """From the first chunk on, 0 for a prompt chunk that is not its prompt's last, else 1. None: all sequences emit."""
    drafter: Tensor | None = None
    """Drafter of each sequence's drafts, `DRAFTER_*`. None: no drafter is on the host."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Inputs of the draft passes of an iteration of B sequences, int64; written by `prepare_iteration`."""

    first_ids: Tensor
    """[B * `Sizes.first_pass_rows`], ids that pass 1 feeds. `first_positions` and `first_slots` have the same shape."""
    first_positions: Tensor
    first_slots: Tensor
    positions: Tensor
    """[K, B], any row stride. Row i - 1 has the positions that pass i >= 2 feeds."""
    slots: Tensor
    """[K, B], with the strides of `positions`. Row i - 1 has the cache slots that pass i >= 2 writes."""
    draws: Tensor
    """[K, B], with the strides of `positions`. Row i - 1 has the positions whose tokens pass i draws."""


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """The N >= sum(planned + 1) flat rows of verification, int64 `[N]`; written by `prepare_iteration`."""

    ids: Tensor
    """Token ids. `assemble_drafts` writes those of drafts later."""
    positions: Tensor
    slots: Tensor
    draws: Tensor
    """Position whose distribution each row gives."""
    rows: Tensor
    """State row of each row."""


@dataclass(frozen=True, slots=True)
class IterationInputs:
    """Outputs of `prepare_iteration`: the sequences of an iteration, and the inputs of its passes."""

    sequences: Sequences
    table: Tensor
    """[B, max_blocks] int64, block tables of the sequences, as far as they are read."""
    draft: DraftRows
    verify: VerifyRows
    on_host: Tensor | None = None
    """[B] int64, 1 if the record has the sequence's drafts; written with `PlannedSequences.drafter`."""
    k_start: Tensor | None = None
    """[B] int64, first position that draft passes of the sequence attend to; written for a drafter that reads hidden
    states."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that are fixed for an engine's life. Together with the number of state rows they fix what is compiled, so
    no plan compiles anew."""

    draft_context: int
    """Maximum number of positions of the drafter; without a drafter, that of the row."""
    width: int
    """Number of committed tokens per sequence that draft pass 1 feeds; 0 for a drafter without KV, for which no draft
    rows are written."""
    block_size: int
    max_k: int
    """Maximum number of drafts per sequence, K."""
    mask_token_id: int | None = None
    """Token that pass 1 feeds in place of drafts 1 to K - 1. None: each draft has a pass."""

    @property
    def first_pass_rows(self) -> int:
        """Number of rows per sequence of draft pass 1."""
        return self.width + (0 if self.mask_token_id is None else self.max_k - 1)


def prepare_iteration(
    rows: RowTensors,
    planned: PlannedSequences,
    out: IterationInputs,
    sizes: Sizes,
    hidden: HiddenTensors | None = None,
) -> None:
    """Limit the planned K of each sequence, and write the inputs of every pass of an iteration of B sequences. Mutates
    `out`, and in `hidden` the start of draft KV.

    K_r = max(min(planned, min(limit - 1, draft_context + 1) - n), 0). It is 0 if the row has ended, or if the draft KV
    lags by more than `width`. For drafts in the record, only the limit counts. A drafter that reads hidden states
    (`hidden` has those that are kept) starts anew after a longer lag. Padding has no row of its own, and uses the
    padding row, the last one of row state.
    """
    read = [planned.count, planned.row, planned.k, planned.capacity]
    read += [planned.k if planned.emits is None else planned.emits]
    read += [planned.k if planned.drafter is None else planned.drafter]
    read += [rows.num_tokens, rows.draft_len, rows.limit, rows.active, rows.tokens, rows.block_table]
    read += [planned.k if hidden is None else hidden.start]
    draft, verify = out.draft, out.verify
    written = out.sequences.tensors()
    written += [draft.first_ids, draft.first_positions, draft.first_slots, draft.positions, draft.slots, draft.draws]
    written += [verify.ids, verify.positions, verify.slots, verify.draws, verify.rows, out.table]
    if planned.drafter is not None:
        assert out.on_host is not None
        written.append(out.on_host)
    if hidden is not None:
        assert out.k_start is not None
        written += [out.k_start, hidden.draft_start]
    mask = -1 if sizes.mask_token_id is None else sizes.mask_token_id
    fixed = [sizes.draft_context, sizes.width, sizes.block_size, sizes.max_k, sizes.first_pass_rows, mask]
    flags = [len(planned.count) == 2, planned.emits is not None, planned.drafter is not None, hidden is not None]
    torch.ops.specrs.prepare_iteration(read, written, fixed, flags)


@torch.library.custom_op("specrs::prepare_iteration", mutates_args=["written"])
def _prepare_iteration(read: list[Tensor], written: list[Tensor], sizes: list[int], flags: list[bool]) -> None:
    """Launch the kernel of `prepare_iteration`. Tensors are in the order of the kernel's pointers, optional ones last.
    `sizes` are the fields of a Sizes. `flags` say which of these the step has: prompt chunks after the decoding
    sequences, `emits`, `drafter`, `hidden`."""
    num_tokens, tokens, block_table = read[6], read[10], read[11]
    row, draft_positions, verify_ids = written[0], written[9], written[12]
    draft_context, width, block_size, max_k, first_pass_rows, mask_id = sizes
    has_chunks, has_emits, has_host, reads_hidden = flags
    always, some = written[:18], written[18:]
    on_host = some[0] if has_host else row
    k_start, draft_start = some[-2:] if reads_hidden else (row, row)
    batch = row.shape[0]
    prepare_kernel[(batch,)](
        *read,
        draft_start,
        *always,
        on_host,
        k_start,
        draft_context,
        num_tokens.shape[0] - 1,
        verify_ids.shape[0],
        tokens.stride(0),
        block_table.stride(0),
        batch,
        draft_positions.shape[0],
        draft_positions.stride(0),
        mask_id,
        W=width,
        ROWS=first_pass_rows,
        READS_HIDDEN=reads_hidden,
        HAS_CHUNKS=has_chunks,
        HAS_EMITS=has_emits,
        HAS_HOST=has_host,
        BLOCK_SIZE=block_size,
        BLOCK_B=triton.next_power_of_2(num_tokens.shape[0]),
        BLOCK_K=triton.next_power_of_2(max_k + 1),
        BLOCK_C=triton.next_power_of_2(max(first_pass_rows, 1)),
        BLOCK_T=256,
        num_warps=1,
        enable_fp_fusion=True,
    )


@_prepare_iteration.register_fake
def _(read: list[Tensor], written: list[Tensor], sizes: list[int], flags: list[bool]) -> None:
    return None


@triton.jit(do_not_specialize=["tokens_stride", "K", "stride", "drafts_stride", "proposed_stride"])
def assemble_kernel(  # type: ignore[no-untyped-def]
    drawn_ptr,
    row_ptr,
    n_ptr,
    k_ptr,
    q_start_ptr,
    tokens_ptr,
    verify_id_ptr,
    draft_ptr,
    on_host_ptr,
    proposed_ptr,
    tokens_stride,
    K,
    stride,
    drafts_stride,
    proposed_stride,
    HAS_HOST: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    b = tl.program_id(0)
    j = tl.arange(0, BLOCK_K)
    k = tl.load(k_ptr + b)
    drafted = j < k
    drawn = tl.load(drawn_ptr + j * stride + b, mask=drafted, other=0)
    if HAS_HOST:
        there = j < tl.where(tl.load(on_host_ptr + b) != 0, k, 0)
        drawn = tl.where(there, tl.load(proposed_ptr + b * proposed_stride + j, mask=there, other=0), drawn)
    tl.store(draft_ptr + b * drafts_stride + j, drawn, mask=j < K)
    tl.store(verify_id_ptr + tl.load(q_start_ptr + b) + 1 + j, drawn, mask=drafted)
    sequence = tokens_ptr + tl.load(row_ptr + b) * tokens_stride
    tl.store(sequence + tl.load(n_ptr + b) + j, drawn, mask=drafted)


@dataclass(frozen=True, slots=True)
class Proposed:
    """Drafts in the record, int64."""

    on_host: Tensor
    """[B], from `prepare_iteration`: 1 for sequences whose drafts are in the record."""
    tokens: Tensor
    """[>= B, the engine's K], any row stride; row i has the drafts of sequence i."""


def assemble_drafts(
    drawn: Tensor,
    sequences: Sequences,
    tokens: Tensor,
    verify_ids: Tensor,
    drafts: Tensor,
    max_k: int,
    proposed: Proposed | None = None,
) -> None:
    """Write the drafts into the inputs of verification, and after the committed tokens of their rows.

    Args:
        drawn: `[K, B]` int64; row i - 1 has the tokens that pass i drew.
        sequences: the sequences, from `prepare_iteration`.
        tokens: `[R + 1, M]` of row state; positions [n, n + K_r) are written.
        verify_ids: `[N]` int64; rows 1..K_r of each sequence are written.
        drafts: `[B, K]` int64, written; 0 in columns from K_r on.
        max_k: the engine's K.
        proposed: drafts that replace `drawn` in some sequences; None: no drafter is on the host.
    """
    host = [] if proposed is None else [proposed.on_host, proposed.tokens]
    torch.ops.specrs.assemble_drafts(drawn, sequences.tensors(), tokens, verify_ids, drafts, max_k, host)


@torch.library.custom_op("specrs::assemble_drafts", mutates_args=["tokens", "verify_ids", "drafts"])
def _assemble_drafts(
    drawn: Tensor,
    sequences: list[Tensor],
    tokens: Tensor,
    verify_ids: Tensor,
    drafts: Tensor,
    max_k: int,
    host: list[Tensor],
) -> None:
    row, n, k, _, _, q_start = sequences
    num_drafts, batch = drawn.shape
    on_host, proposed = host or [drawn, drawn]
    assemble_kernel[(batch,)](
        drawn,
        row,
        n,
        k,
        q_start,
        tokens,
        verify_ids,
        drafts,
        on_host,
        proposed,
        tokens.stride(0),
        num_drafts,
        drawn.stride(0),
        drafts.stride(0),
        proposed.stride(0),
        HAS_HOST=bool(host),
        BLOCK_K=triton.next_power_of_2(max_k),
        num_warps=1,
        enable_fp_fusion=True,
    )


@_assemble_drafts.register_fake
def _(drawn: Tensor, *rest: object) -> None:
    return None


def _variants() -> tuple[Variant, ...]:
    ints = {"draft_context", "padding_row", "num_rows", "tokens_stride", "table_stride", "batch", "K", "stride"}
    ints |= {"drafts_stride", "proposed_stride", "mask_id"}

    def make(name: str, fn: Any, constants: dict[str, Any]) -> Variant:
        signature = {
            arg: "i32" if arg in ints else "*i1" if arg == "active_ptr" else "*i64"
            for arg in fn.arg_names
            if arg not in constants
        }
        return Variant(name, fn, signature, constants, num_warps=1)

    def prepare(name: str, width: int, first_pass_rows: int, rows: int, **flags: bool) -> Variant:
        constants = {"READS_HIDDEN": False, "HAS_CHUNKS": False, "HAS_EMITS": False, "HAS_HOST": False} | flags
        sizes = {"BLOCK_SIZE": 16, "BLOCK_B": rows, "BLOCK_K": 8, "BLOCK_T": 256}
        sizes |= {"W": width, "ROWS": first_pass_rows, "BLOCK_C": triton.next_power_of_2(max(first_pass_rows, 1))}
        return make(f"prepare_{name}_b{rows}", prepare_kernel, constants | sizes)

    return (
        prepare("decode", 2, 2, 2),
        prepare("decode", 2, 2, 512),
        prepare("plain", 0, 0, 512),
        prepare("prefill", 2, 2, 512, HAS_EMITS=True),
        prepare("merged", 2, 2, 512, HAS_CHUNKS=True, HAS_EMITS=True),
        prepare("list", 2, 2, 512, HAS_HOST=True),
        prepare("parallel", 6, 10, 512),
        prepare("hidden", 14, 14, 512, READS_HIDDEN=True),
        make("assemble_drafts", assemble_kernel, {"HAS_HOST": False, "BLOCK_K": 8}),
        make("assemble_list", assemble_kernel, {"HAS_HOST": True, "BLOCK_K": 8}),
    )


VARIANTS = _variants()
