"""Prepares slots and block tables of an iteration in the KV groups after the first, on the device. Launches nothing if
there is one group. `prepare` handles the first group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda.prepare import VerifyRows
from specrs.kernels.cuda.row_state import Sequences
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_BLOCK_ROWS = 64
_BLOCK_TABLE = 1024
"""Number of block table entries per step, 8 per thread: 16,384 positions in blocks of 16."""


@triton.jit(do_not_specialize=["num_rows", "group_stride", "table_stride", "table_group_stride", "slot_stride"])
def group_rows_kernel(  # type: ignore[no-untyped-def]
    row_ptr,
    n_ptr,
    k_ptr,
    alive_ptr,
    position_ptr,
    first_slot_ptr,
    state_row_ptr,
    tables_ptr,
    table_ptr,
    slot_ptr,
    num_rows,
    group_stride,
    table_stride,
    table_group_stride,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TABLE: tl.constexpr,
):
    b, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tables = tables_ptr + group * group_stride
    # Slots of flat rows, whose sequences are of any length: a program takes its share of them.
    for first in range(b * BLOCK_ROWS, num_rows, tl.num_programs(0) * BLOCK_ROWS):
        i = first + tl.arange(0, BLOCK_ROWS)
        # A row that the first group has no slot for has none in any.
        live = tl.load(first_slot_ptr + i, mask=i < num_rows, other=-1) >= 0
        position = tl.load(position_ptr + i, mask=live, other=0)
        row = tl.load(state_row_ptr + i, mask=live, other=0)
        block = tl.load(tables + row * table_stride + position // BLOCK_SIZE, mask=live, other=0)
        slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slot_ptr + group * slot_stride + i, slot, mask=i < num_rows)
    source = tables + tl.load(row_ptr + b) * table_stride
    out = table_ptr + group * table_group_stride + b.to(tl.int64) * table_stride
    end = tl.load(n_ptr + b) + tl.load(k_ptr + b)
    blocks = tl.where(tl.load(alive_ptr + b) != 0, (end + BLOCK_SIZE - 1) // BLOCK_SIZE, 0)
    blocks = tl.minimum(blocks, table_stride)
    for first in range(0, blocks, BLOCK_TABLE):
        t = first + tl.arange(0, BLOCK_TABLE)
        tl.store(out + t, tl.load(source + t, mask=t < blocks, other=0), mask=t < blocks)


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Slots and block tables of an iteration of B sequences and N flat rows in the G - 1 KV groups after the first,
    int64."""

    tables: Tensor
    """[G - 1, B, max_blocks], rows contiguous: block tables of the sequences, as far as they are read."""
    slots: Tensor
    """[G - 1, N], rows contiguous: slots of the rows of verification."""


def prepare_groups(tables: Tensor, sequences: Sequences, verify: VerifyRows, out: GroupRows, block_size: int) -> None:
    """Write `out` from the block tables of row state. Mutates nothing else, and does nothing if there is one group.

    Args:
        tables: `[G - 1, R + 1, max_blocks]` int64, contiguous.
        sequences: the sequences, written by `prepare_iteration`.
        verify: the rows of verification, written by `prepare_iteration`. A row without a slot has none in any group.
        out: buffers of the same numbers of sequences and rows.
        block_size: number of positions of a block, the same in all groups.
    """
    if len(tables):
        read = [
            sequences.row,
            sequences.n,
            sequences.k,
            sequences.alive,
            verify.positions,
            verify.slots,
            verify.rows,
            tables,
        ]
        torch.ops.specrs.prepare_groups(read, out.tables, out.slots, block_size)


@torch.library.custom_op("specrs::prepare_groups", mutates_args=["table", "slots"])
def _prepare_groups(read: list[Tensor], table: Tensor, slots: Tensor, block_size: int) -> None:
    """Launch the kernel of `prepare_groups`. Tensors are in the order of the kernel's pointers."""
    _check(read, table, slots, block_size)
    tables = read[-1]
    group_rows_kernel[table.shape[1], len(tables)](
        *read,
        table,
        slots,
        slots.shape[1],
        tables.stride(0),
        tables.stride(1),
        table.stride(0),
        slots.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_TABLE=_BLOCK_TABLE,
    )


@_prepare_groups.register_fake
def _check(read: list[Tensor], table: Tensor, slots: Tensor, block_size: int) -> None:
    tables, rows = read[-1], read[4]
    assert tables.is_contiguous()
    assert table.shape == (len(tables), len(read[0]), tables.shape[2])
    assert slots.shape == (len(tables), len(rows))
    assert slots.stride(1) == table.stride(2) == 1
    assert table.stride(1) == tables.stride(1)


def _variant() -> Variant:
    constants = {"BLOCK_SIZE": 16, "BLOCK_ROWS": _BLOCK_ROWS, "BLOCK_TABLE": _BLOCK_TABLE}
    signature = {
        arg: "*i64" if arg.endswith("_ptr") else "i32" for arg in group_rows_kernel.arg_names if arg not in constants
    }
    return Variant("group_rows", group_rows_kernel, signature, constants)


VARIANTS = (_variant(),)
