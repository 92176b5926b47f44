"""Inputs and outputs of one pass of a native model that is called by itself.

Steps of an engine feed passes in the Rust core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrs.arrays import Array
from specrs.models.lora import LoRAAdapter

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NativeInputs:
    """One forward pass over N flat rows of B requests; contiguous int64 arrays, none is mutated.

    Row i of request b, `q_start[b] <= i < q_start[b + 1]`, feeds `input_ids[i]` at p = `positions[i]` and writes its K
    and V to `slots[i]`. It attends the keys at positions 0..p of request b.
    """

    input_ids: Ints
    """[N] token ids; of a masked row anything inside the vocabulary."""
    positions: Ints
    """[N] positions; -1: the row is masked, its output is finite and means nothing."""
    slots: Ints
    """[N] KV slots; -1 writes into the scratch block, which is never read."""
    q_start: Ints
    """[B + 1] ascending, first 0; rows from `q_start[B]` on belong to no request and are treated as masked."""
    block_table: Ints
    """[B, max_blocks] block ids; those after a request's context are never used."""
    k_start: Ints | None = None
    """[B] the first key that a request's rows attend; None: 0."""
    group_slots: Ints | None = None
    """[G - 1, N] KV slots in the groups after the first, as `slots` in the first; None: there is one."""
    group_tables: Ints | None = None
    """[G - 1, B, max_blocks] their block ids, as `block_table`."""
    prompts: bool = False
    """All rows are of prompts, or of what a draft catches up with."""
    adapters: Sequence[tuple[LoRAAdapter, list[int]]] = ()
    """By LoRA adapter the rows that are computed with it."""


class NativeStates(NamedTuple):
    """What a pass over N rows leaves, float32."""

    final: Array
    """[N, hidden], after the final norm: what `compute_logits` takes."""
    entries: Array | None
    """[N, L, hidden], the residual stream where it enters each layer asked for, in that order; None where L = 0."""
