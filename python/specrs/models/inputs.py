"""The inputs of one forward pass. Data only: no derived fields, no device."""

from dataclasses import dataclass

from torch import Tensor

from specrs.models.lora import AdapterRows


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Chunks of S prompts behind the rows of a pass's B requests, which attend by themselves; int64 tensors."""

    first: int
    """The pass's row that the chunks begin at."""
    q_start: Tensor
    """[S + 1] as `PassInputs.q_start`, counted from that row."""
    block_table: Tensor
    """[S, max_blocks]"""
    group_tables: Tensor | None
    """[G - 1, S, max_blocks]"""
    max_q_len: int
    """Host upper bound of rows per chunk."""
    batch: int
    """Requests that the attention of the others is cut up for, at most B: what their sums' order is without chunks."""

    def in_group(self, group: int) -> Tensor:
        """Block table [S, max_blocks] of a group."""
        if group == 0:
            return self.block_table
        assert self.group_tables is not None
        return self.group_tables[group - 1]


@dataclass(frozen=True, slots=True)
class PassInputs:
    """One forward pass over N flat rows of B requests; all tensors int64 on the model's device, none is mutated.

    Row i of request b, `q_start[b] <= i < q_start[b + 1]`, feeds `input_ids[i]` at p = `positions[i]` and writes its K
    and V to `slots[i]`, which is `block_table[b, p // block_size] * block_size + p % block_size` (see `SlotMapper`). It
    attends the keys at positions 0..p of request b, all of which were written before or are written by this pass.
    """

    input_ids: Tensor
    """[N] token ids; of a masked row anything inside the vocabulary."""
    positions: Tensor
    """[N] positions; -1: the row is masked, its output is finite and means nothing."""
    slots: Tensor
    """[N] KV slots; -1 writes into the scratch block, which is never read."""
    q_start: Tensor
    """[B + 1] ascending, first 0; rows from `q_start[B]` on belong to no request and are treated as masked."""
    block_table: Tensor
    """[B, max_blocks] block ids, the rows of these B requests; entries past a request's context are never used."""
    max_q_len: int
    """Host upper bound of rows per request."""
    max_context: int
    """Host upper bound of position + 1."""
    k_start: Tensor | None = None
    """[B] the first key that a request's rows attend; None: 0. Models with a window in every layer alone are given it:
    what lies before it has left the windows of all passes to come."""
    group_slots: Tensor | None = None
    """[G - 1, N] KV slots in the groups behind the first (`KVGroups`), as `slots` in the first; None: there is one."""
    group_tables: Tensor | None = None
    """[G - 1, B, max_blocks] their block ids, as `block_table`. Entries before a group's window mean nothing."""
    prompts: bool = False
    """All rows are of prompts, or of what a draft catches up with."""
    chunks: ChunkRows | None = None
    """Chunks whose rows are behind those of the B requests. For `CudaDense` alone."""
    adapters: tuple[AdapterRows, ...] = ()
    """By LoRA adapter the rows that are computed with it; those of none are the base model's. Dense decoders alone."""

    def in_group(self, group: int) -> tuple[Tensor, Tensor]:
        """Slots [N] and block table [B, max_blocks] of a group."""
        if group == 0:
            return self.slots, self.block_table
        assert self.group_slots is not None
        assert self.group_tables is not None
        return self.group_slots[group - 1], self.group_tables[group - 1]
