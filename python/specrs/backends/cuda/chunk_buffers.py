"""Inputs of passes over prompt chunks and catch-up chunks, at fixed addresses, padded to a shape. Runs no pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specrs.backends.cuda.shapes import ChunkShape, MergedShape
from specrs.models.base import HiddenStates
from specrs.models.inputs import PassInputs


@dataclass(frozen=True, slots=True)
class ChunkBuffers:
    """Persistent inputs of passes over chunks, int64. Unlike sections of a record, their views are aligned in every
    step."""

    ids: Tensor  # [C], C = max_num_batched_tokens
    positions: Tensor  # [C], -1 where nothing is fed
    slots: Tensor  # [C], -1 where nothing is fed
    q_start: Tensor  # [R + 1]
    table: Tensor  # [R, max_blocks]
    k_start: Tensor  # [R]
    rows: Tensor  # [R], state row of each chunk's request
    group_slots: Tensor  # [G - 1, C], in the KV groups after the first
    group_tables: Tensor  # [G - 1, R, max_blocks]
    max_model_len: int
    left: dict[ChunkShape, HiddenStates] = field(default_factory=dict)
    """For each shape, the hidden states that the captured pass over prompt chunks writes. Views of the model's
    buffers."""
    merged: dict[MergedShape, Tensor] = field(default_factory=dict)
    """[rows, hidden] final states of the prompt chunks in a merged verification pass. Views of the model's buffers."""

    @classmethod
    def allocate(
        cls, rows: int, seqs: int, max_blocks: int, num_groups: int, max_model_len: int, device: torch.device
    ) -> ChunkBuffers:
        """Return buffers for at most `rows` rows of `seqs` chunks. Passes over them write nothing until they are
        filled."""

        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=device)

        return cls(
            ids=ints(rows),
            positions=ints(rows, fill=-1),
            slots=ints(rows, fill=-1),
            q_start=ints(seqs + 1),
            table=ints(seqs, max_blocks),
            k_start=ints(seqs),
            rows=ints(seqs),
            group_slots=ints(num_groups - 1, rows, fill=-1),
            group_tables=ints(num_groups - 1, seqs, max_blocks),
            max_model_len=max_model_len,
        )

    def inputs(self, shape: ChunkShape, *, windowed: bool) -> PassInputs:
        """Return the inputs of a pass of `shape` as views of the buffers. With `windowed` they include `k_start`."""
        return PassInputs(
            input_ids=self.ids[: shape.rows],
            positions=self.positions[: shape.rows],
            slots=self.slots[: shape.rows],
            q_start=self.q_start[: shape.seqs + 1],
            block_table=self.table[: shape.seqs],
            max_q_len=shape.rows,
            max_context=self.max_model_len,
            k_start=self.k_start[: shape.seqs] if windowed else None,
            group_slots=self.group_slots[:, : shape.rows],
            group_tables=self.group_tables[:, : shape.seqs],
            device_rows=self.rows[: shape.seqs],
            prompts=True,
            captured=shape.captured,
        )

    def fill(self, given: PassInputs, shape: ChunkShape) -> PassInputs:
        """Copy `given` into the buffers, pad it to `shape`, and return the padded inputs. Inputs of a draft model have
        no KV groups."""
        rows, seqs = given.input_ids.shape[0], given.block_table.shape[0]
        for own, theirs, nothing in (
            (self.ids, given.input_ids, 0),
            (self.positions, given.positions, -1),
            (self.slots, given.slots, -1),
        ):
            own[:rows].copy_(theirs)
            own[rows : shape.rows].fill_(nothing)
        self.q_start[: seqs + 1].copy_(given.q_start)
        self.q_start[seqs + 1 : shape.seqs + 1].fill_(rows)
        self.table[:seqs].copy_(given.block_table)
        if given.k_start is not None:
            self.k_start[:seqs].copy_(given.k_start)
        if given.device_rows is not None:
            self.rows[:seqs].copy_(given.device_rows)
        if given.group_slots is not None and given.group_tables is not None:
            self.group_slots[:, :rows].copy_(given.group_slots)
            self.group_slots[:, rows : shape.rows].fill_(-1)
            self.group_tables[:, :seqs].copy_(given.group_tables)
        made = replace(self.inputs(shape, windowed=given.k_start is not None), max_context=given.max_context)
        # A grid for a chunk of all rows would have as many programs for every chunk.
        return made if shape.captured else replace(made, max_q_len=given.max_q_len)

    def mask_ends(self, last: Tensor, is_end: Tensor) -> None:
        """Mask the last row of each chunk that ends its prompt, because verification feeds this row. `last` `[S]` are
        the row indices, and `is_end` `[S]` is 0 or 1. Mutates the buffers."""
        for own in (self.positions, self.slots, *self.group_slots):
            own.index_copy_(0, last, torch.where(is_end != 0, -1, own.index_select(0, last)))
