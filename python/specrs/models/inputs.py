"""Inputs of one forward pass with torch. Data only: no derived fields."""

from dataclasses import dataclass

from torch import Tensor

from specrs.models.lora import AdapterRows


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Chunks of S prompts in a pass, after the rows of its B requests. They have their own attention call. int64
    tensors."""

    first: int
    """Index of the first row of the pass that belongs to the chunks."""
    q_start: Tensor
    """[S + 1] ascending: chunk s has the rows from `q_start[s]` to before `q_start[s + 1]`, counted from row
    `first`."""
    block_table: Tensor
    """[S, max_blocks] block ids of each chunk's request."""
    group_tables: Tensor | None
    """[G - 1, S, max_blocks] block ids in the KV groups after the first. None: there is one group."""
    max_q_len: int
    """Upper bound, known on the host, of the rows of a chunk."""
    batch: int
    """Number of requests, at most B, for which the attention of the rows before the chunks is split. It fixes the order
    of their sums, so chunks do not change it."""
    device_rows: Tensor | None = None
    """[S] int64 state row of each chunk's request, for models whose layers have states. None: its index."""

    def in_group(self, group: int) -> Tensor:
        """Return the block table of a KV group, [S, max_blocks]."""
        if group == 0:
            return self.block_table
        assert self.group_tables is not None
        return self.group_tables[group - 1]


@dataclass(frozen=True, slots=True)
class PassInputs:
    """Inputs of one forward pass over N flat rows of B requests. int64 tensors on the model's device; none is mutated.

    Row i of request b, `q_start[b] <= i < q_start[b + 1]`, feeds `input_ids[i]` at p = `positions[i]` and writes its K
    and V to `slots[i]`, which is `block_table[b, p // block_size] * block_size + p % block_size` (see `SlotMapper`). It
    attends to the keys at positions 0..p of request b, which were written earlier or are written by this pass.
    """

    input_ids: Tensor
    """[N] token ids. A masked row may have any id of the vocabulary."""
    positions: Tensor
    """[N] positions. -1: the row is masked, and its output is finite but meaningless."""
    slots: Tensor
    """[N] KV slots. -1 writes into the scratch block, which is never read."""
    q_start: Tensor
    """[B + 1] ascending, first 0. Rows from `q_start[B]` on belong to no request and are treated as masked."""
    block_table: Tensor
    """[B, max_blocks] block ids of the B requests. Entries past a request's context are never used."""
    max_q_len: int
    """Upper bound, known on the host, of the rows of a request."""
    max_context: int
    """Upper bound, known on the host, of position + 1."""
    k_start: Tensor | None = None
    """[B] first position whose KV a request's rows attend to. None: 0. Only a draft model's passes set it, because its
    KV may begin after position 0 if all layers have a sliding window. Earlier positions have left the windows of all
    later passes."""
    group_slots: Tensor | None = None
    """[G - 1, N] KV slots in the KV groups after the first, as `slots` is for the first. None: there is one group."""
    group_tables: Tensor | None = None
    """[G - 1, B, max_blocks] block ids in the KV groups after the first. Entries before a group's window are
    meaningless."""
    prompts: bool = False
    """True if all rows are tokens of prompts, or tokens that a draft model catches up with."""
    captured: bool = False
    """True if a graph of this number of rows and requests runs the pass. `max_q_len` is then the number of all rows."""
    chunks: ChunkRows | None = None
    """Prompt chunks whose rows follow those of the B requests. Only `CudaDecoder` supports them."""
    state_rows: tuple[int, ...] | None = None
    """[B] state row of each request, for models whose layers have states. None: its index."""
    device_rows: Tensor | None = None
    """[B] int64 state row of each request, as `CudaDecoder` reads them. None: its index. Passes with LoRA adapters
    need it."""
    snapshots: tuple[tuple[int, int, int], ...] = ()
    """State row, length and slot of each snapshot to write. It is written if the row's committed state passes that
    length in this pass."""
    adapters: tuple[AdapterRows, ...] = ()
    """For each LoRA adapter, the rows that use it. Other rows use the base model. Only `TorchDecoder` reads them.
    `CudaDecoder` finds the adapter of a request by its row in `device_rows`."""

    def in_group(self, group: int) -> tuple[Tensor, Tensor]:
        """Return the slots [N] and the block table [B, max_blocks] of a KV group."""
        if group == 0:
            return self.slots, self.block_table
        assert self.group_slots is not None
        assert self.group_tables is not None
        return self.group_slots[group - 1], self.group_tables[group - 1]
