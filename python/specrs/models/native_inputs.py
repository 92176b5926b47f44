"""Inputs and outputs of one native pass, for callers in Python: tests and measurements.

Steps of an engine build the inputs of passes in the Rust core.
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
    """Inputs of one forward pass over N flat rows of B requests. Contiguous int64 arrays; none is mutated.

    Row i of request b, `q_start[b] <= i < q_start[b + 1]`, feeds `input_ids[i]` at p = `positions[i]` and writes its K
    and V to `slots[i]`. It attends to the keys at positions 0..p of request b.
    """

    input_ids: Ints
    """[N] token ids. A masked row may have any id of the vocabulary."""
    positions: Ints
    """[N] positions. -1: the row is masked, and its output is finite but meaningless."""
    slots: Ints
    """[N] KV slots. -1 writes into the scratch block, which is never read."""
    q_start: Ints
    """[B + 1] ascending, first 0. Rows from `q_start[B]` on belong to no request and are treated as masked."""
    block_table: Ints
    """[B, max_blocks] block ids of the B requests. Entries past a request's context are never used."""
    k_start: Ints | None = None
    """[B] first key position that a request's rows attend to. None: 0."""
    group_slots: Ints | None = None
    """[G - 1, N] KV slots in the KV groups after the first, as `slots` is for the first. None: there is one group."""
    group_tables: Ints | None = None
    """[G - 1, B, max_blocks] block ids in the KV groups after the first. None: there is one group."""
    prompts: bool = False
    """True if all rows are tokens of prompts, or tokens that a draft model catches up with."""
    adapters: Sequence[tuple[LoRAAdapter, list[int]]] = ()
    """For each LoRA adapter, the rows that use it. Other rows use the base model."""


class NativeStates(NamedTuple):
    """Hidden states of a pass over N rows, float32."""

    final: Array
    """[N, hidden], after the final norm: the argument of `compute_logits`."""
    entries: Array | None
    """[N, L, hidden]: the residual stream at the input of each of the L requested layers, in the order of the request.
    None for L = 0."""
