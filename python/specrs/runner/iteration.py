"""One decode iteration: `draft`, `verify`, `accept_and_update` over flat rows. Plans nothing and never waits.

The three functions use only fixed shapes given by the plan (rows, K_r): no `.item()`, no `nonzero`, no boolean index.
They are the CPU path and the reference of the captured GPU path.

Positions of one row during an iteration, n = num_tokens before it (DESIGN section 2):

    [0, n - 1)      target KV valid        row i of verification is fed position n - 1 + i
    [0, draft_len)  draft KV valid         draft pass 1 is fed n - 2 and n - 1, pass i >= 2 is fed n + i - 2
    [n, n + K_r)    drafts, kept in `tokens` behind the committed ones
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.drafters.draft_model import DraftModel
from specrs.models.decoder import Decoder
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.runner.row_state import RowState
from specrs.verify.greedy import verify_greedy

FLAG_TARGET_NON_FINITE = 1
FLAG_DRAFT_NON_FINITE = 2
FLAG_CAPACITY = 4


@dataclass(frozen=True, slots=True)
class Iteration:
    """The rows of one launch's decode iteration, B entries sorted by planned K descending."""

    rows: Tensor  # [B] int64, row of each entry
    planned: tuple[int, ...]  # K_r as planned, descending
    num_tokens: Tensor  # [B] int64, n at the start of the iteration
    num_drafts: Tensor  # [B] int64, K_r after the device's own guards
    alive: Tensor  # [B] bool, false for rows that ended before this launch
    capacity: Tensor  # [B] int64, positions covered by the block table
    block_table: Tensor  # [B, blocks] int64
    block_size: int
    max_context: int  # host bound of position + 1 over all passes

    @property
    def max_k(self) -> int:
        """Largest planned K_r."""
        return self.planned[0] if self.planned else 0

    def slots(self, entries: Tensor, positions: Tensor) -> Tensor:
        """Slot of each position of each entry, `[N]` int64; -1 for masked positions and beyond the row's capacity."""
        block = self.block_table[entries, (positions.clamp(min=0) // self.block_size).clamp(max=self.last_block)]
        slot = block * self.block_size + positions % self.block_size
        return torch.where((positions >= 0) & (positions < self.capacity[entries]), slot, -1)

    @property
    def last_block(self) -> int:
        """Last column of `block_table`."""
        return self.block_table.shape[1] - 1


@dataclass(frozen=True, slots=True)
class Results:
    """Where an iteration reports, views of one ring slot; index i is the launch's entry i."""

    num_emitted: Tensor  # [B] int64
    num_accepted: Tensor  # [B] int64
    num_drafted: Tensor  # [B] int64
    flags: Tensor  # [B] int64, FLAG_* bits
    tokens: Tensor  # [B, K+1] int64

    def narrow(self, start: int, length: int) -> Results:
        """The same views for entries [start, start + length)."""
        return Results(
            *(t.narrow(0, start, length) for t in (self.num_emitted, self.num_accepted, self.num_drafted, self.flags)),
            tokens=self.tokens.narrow(0, start, length),
        )


def prepare(
    state: RowState,
    rows: Tensor,
    planned: Sequence[int],
    capacity: Tensor,
    *,
    block_size: int,
    max_context: int,
    drafter: DraftModel | None,
) -> Iteration:
    """Read lengths from row state and apply the device's guards to the planned K_r; mutates nothing.

    K_r = clamp(min(planned, limit - n - 1, draft context - n + 1), 0), and 0 where the row has ended or the draft's
    KV lags by more
    than `first_rows`: whatever the host believes, no row drafts past its limit or over a hole in its draft KV.
    """
    n = state.num_tokens[rows]
    alive = state.active[rows]
    k = torch.tensor(planned, dtype=torch.int64, device=rows.device)
    if drafter is not None and planned and planned[0] > 0:
        room = torch.minimum(state.limit[rows] - n - 1, drafter.max_model_len - n + 1)
        ready = alive & (state.draft_len[rows] >= n - drafter.first_rows)
        k = torch.where(ready, torch.minimum(k, room).clamp(min=0), 0)
    blocks = min(-(-max_context // block_size), state.block_table.shape[1])
    return Iteration(
        rows=rows,
        planned=tuple(planned),
        num_tokens=n,
        num_drafts=k,
        alive=alive,
        capacity=capacity,
        block_table=state.block_table[rows, :blocks],
        block_size=block_size,
        max_context=min(max_context, blocks * block_size),
    )


def draft(state: RowState, it: Iteration, drafter: DraftModel) -> Tensor:
    """Draw up to K_r drafts per entry by argmax; pass i feeds the entries planned at K >= i.

    Pass 1 feeds positions n - 2 and n - 1, so that the token that the draft has not seen after a full acceptance is
    caught up
    without a pass of its own; its slot is -1 where that KV is already there.

    Returns:
        `[B]` int64 flags: FLAG_DRAFT_NON_FINITE where draft logits were not finite. Mutates `state.tokens` in
        [n, n + K_r) and the draft's KV cache.
    """
    flags = torch.zeros_like(it.num_tokens)
    entries = torch.arange(len(it.planned), device=it.rows.device)
    for i in range(1, it.max_k + 1):
        count = sum(k >= i for k in it.planned)
        active, n, rows = entries[:count], it.num_tokens[:count], it.rows[:count]
        live = it.num_drafts[:count] >= i
        if i == 1:
            width = drafter.first_rows
            columns = torch.arange(-width, 0, device=rows.device)
            positions = torch.where(live[:, None], n[:, None] + columns, -1).flatten()
            of_row = active.repeat_interleave(width)
            written = positions < state.draft_len[rows].repeat_interleave(width)
        else:
            width = 1
            positions = torch.where(live, n + (i - 2), -1)
            of_row = active
            written = None
        slots = it.slots(of_row, positions)
        if written is not None:
            slots = torch.where(written, -1, slots)
        inputs = PassInputs(
            input_ids=state.tokens[it.rows[of_row], positions.clamp(min=0)],
            positions=positions,
            slots=slots,
            q_start=torch.arange(0, count * width + 1, width, device=rows.device),
            block_table=it.block_table[:count],
            max_q_len=width,
            max_context=it.max_context,
        )
        top, tokens = drafter.propose(inputs, last_of=width).max(dim=-1)
        flags[:count] |= torch.where(live & ~top.isfinite(), FLAG_DRAFT_NON_FINITE, 0)
        state.tokens[rows, torch.where(live, n + (i - 1), state.scratch_column)] = tokens
    return flags


def verify(state: RowState, it: Iteration, target: Decoder, kv_cache: KVCache) -> tuple[Tensor, Tensor, Tensor]:
    """Feed t_{n-1}, d_1..d_K of every entry to the target in one pass of N = sum(planned + 1) flat rows.

    Returns:
        `(logits [N, V], positions [N] int64, q_start [B+1] int64)`: logits row q_start[b] + i is the distribution of
        position
        n_b + i; positions are -1 in masked rows. Mutates the target's KV cache only.
    """
    device = it.rows.device
    counts = torch.tensor([k + 1 for k in it.planned], dtype=torch.int64, device=device)
    total = sum(it.planned) + len(it.planned)
    q_start = torch.zeros(len(it.planned) + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts, 0, out=q_start[1:])
    of_row = torch.arange(len(it.planned), device=device).repeat_interleave(counts, output_size=total)
    offset = torch.arange(total, device=device) - q_start[of_row]
    live = it.alive[of_row] & (offset <= it.num_drafts[of_row])
    positions = torch.where(live, it.num_tokens[of_row] - 1 + offset, -1)
    inputs = PassInputs(
        input_ids=state.tokens[it.rows[of_row], positions.clamp(min=0)],
        positions=positions,
        slots=it.slots(of_row, positions),
        q_start=q_start,
        block_table=it.block_table,
        max_q_len=it.max_k + 1,
        max_context=it.max_context,
    )
    return target.compute_logits(target.forward(inputs, kv_cache)), positions, q_start


def mask_min_tokens(state: RowState, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Forbid the ids that would stop a row before `min_len`: logits `[N, V]` are mutated and returned.

    Row i of logits is the distribution of position `positions[i] + 1` of state row `rows[i]`.
    """
    ids = state.stop_ids[rows]
    forbidden = (ids >= 0) & (positions[:, None] + 1 < state.min_len[rows, None])
    # Padding is clamped to id 0 and adds 0.0 there: an assignment would race with a real stop id 0.
    penalty = torch.where(forbidden, -torch.inf, 0.0).to(logits.dtype)
    return logits.scatter_add_(1, ids.clamp(min=0), penalty)


def accept_and_update(
    state: RowState, it: Iteration, logits: Tensor, q_start: Tensor, flags: Tensor, results: Results
) -> None:
    """Verify the drafts, commit the emitted tokens, apply stops and the limit, report; mutates row state and results.

    Args:
        logits: `[N, V]`, row q_start[b] + i for position n_b + i; rows beyond an entry's K_r are ignored.
        flags: `[B]` int64 from drafting.

    draft_len' = min(n' - 1, n + K_r - 1) where K_r > 0, unchanged where K_r = 0. An entry that ended before reports
    zeros.
    """
    rows, n, k = it.rows, it.num_tokens, it.num_drafts
    width = it.max_k + 1
    column = torch.arange(width, device=rows.device)
    top, best = logits.max(dim=-1)
    index = torch.minimum(q_start[:-1, None] + column, q_start[1:, None] - 1)
    drafts = state.tokens[rows[:, None], (n[:, None] + column[:-1]).clamp(max=state.scratch_column)]
    accepted, tokens = verify_greedy(best[index], drafts, k)

    used = column <= k[:, None]
    finite = (top[index].isfinite() | ~used).all(dim=1)
    fits = n + k <= it.capacity
    flags = flags | torch.where(finite, 0, FLAG_TARGET_NON_FINITE) | torch.where(fits, 0, FLAG_CAPACITY)
    good = it.alive & finite & fits

    positions = n[:, None] + column
    is_stop = (tokens[:, :, None] == state.stop_ids[rows][:, None, :]).any(dim=2)
    is_stop &= (column <= accepted[:, None]) & (positions >= state.min_len[rows, None])
    first_stop = torch.where(is_stop, column, width).amin(dim=1)
    emitted = torch.where(good, torch.minimum(accepted, first_stop) + 1, 0)
    grown = n + emitted

    target_column = torch.where(column < emitted[:, None], positions, state.scratch_column)
    state.tokens[rows[:, None], target_column] = tokens
    state.num_tokens[rows] = grown
    state.active[rows] = good & (first_stop == width) & (grown < state.limit[rows])
    state.draft_len[rows] = torch.where(good & (k > 0), torch.minimum(grown, n + k) - 1, state.draft_len[rows])

    results.num_emitted.copy_(emitted)
    results.num_accepted.copy_(torch.where(good, accepted, 0))
    results.num_drafted.copy_(torch.where(good, k, 0))
    results.flags.copy_(torch.where(it.alive, flags, 0))
    results.tokens[:, :width] = tokens
