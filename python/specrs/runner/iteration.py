"""One decode iteration: `draft` and `verify` over flat rows (`accept` has the rest). Plans nothing and never waits.

The functions use only fixed shapes given by the plan (rows, K_r): no `.item()`, no `nonzero`, no boolean index.
They are the CPU path and the reference of the captured GPU path.

Positions of one row during an iteration, n = num_tokens before it (DESIGN section 2):

    [0, n - 1)      target KV valid        row i of verification is fed position n - 1 + i
    [0, draft_len)  draft KV valid         draft pass 1 is fed n - 2 and n - 1, pass i >= 2 is fed n + i - 2
    [n, n + K_r)    drafts, kept in `tokens` behind the committed ones
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specrs.core import FLAG_DRAFT_NON_FINITE, PURPOSE_DRAFT, PURPOSE_GUMBEL
from specrs.drafters.draft_model import DraftModel
from specrs.models.decoder import Decoder
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.runner.row_state import RowState
from specrs.verify.sample import draw, draw_draft

if TYPE_CHECKING:
    from specrs.runner.sampling_state import EntrySampling


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
class Drafted:
    """What drafting leaves for verification, besides the drafts in row state."""

    flags: Tensor  # [B] int64, FLAG_DRAFT_NON_FINITE where draft logits were not finite
    q: Tensor | None  # [B, K, V], the distribution that each draft was drawn from; None where no rule needs it


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


def draft(state: RowState, it: Iteration, drafter: DraftModel, sampling: EntrySampling, rule: str) -> Drafted:
    """Draw up to K_r drafts per entry; pass i feeds the entries planned at K >= i.

    Pass 1 feeds positions n - 2 and n - 1, so that the token that the draft has not seen after a full acceptance is
    caught up without a pass of its own; its slot is -1 where that KV is already there. Greedy rows draft by argmax,
    sampled ones from the draft's own processed distribution, which `rejection` keeps as q.

    Mutates `state.tokens` in [n, n + K_r) and the draft's KV cache.
    """
    flags = torch.zeros_like(it.num_tokens)
    q = None
    if sampling.steps.random and rule == "rejection":
        q = torch.zeros((len(it.planned), it.max_k, sampling.vocab_size), dtype=sampling.noise.dtype)
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
        top, tokens = _draw(drafter.propose(inputs, last_of=width), active, n + (i - 1), sampling, rule, i - 1, q)
        flags[:count] |= torch.where(live & ~top.isfinite(), FLAG_DRAFT_NON_FINITE, 0)
        state.tokens[rows, torch.where(live, n + (i - 1), state.scratch_column)] = tokens
        if sampling.grammar is not None:
            sampling.grammar.observe(i, tokens, live)
    return Drafted(flags, q)


def _draw(
    logits: Tensor,
    entries: Tensor,
    positions: Tensor,
    sampling: EntrySampling,
    rule: str,
    column: int,
    q: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Largest raw logit and draft token of each row, `[count]` each; writes the distribution drawn from into `q`."""
    forbidden = None
    if sampling.grammar is not None:
        forbidden = sampling.grammar.forbidden(entries, torch.full_like(entries, column))
    adjusted = sampling.adjust(logits, entries, positions, forbidden)
    if not sampling.steps.random:
        top, tokens = adjusted.max(dim=-1)
        return (top if adjusted is logits else logits.amax(dim=-1)), tokens
    rows = sampling.it.rows[: len(entries)]
    # A coarse cut is cheaper and costs only acceptance: q is whatever was drawn from.
    processed = sampling.point_masses(sampling.filter(adjusted, entries, coarse=True), entries)
    if q is None:
        tokens = draw(processed, sampling.noise.gumbel(rows, positions, PURPOSE_GUMBEL))
    else:
        noise = sampling.noise.gumbel(rows, positions, PURPOSE_DRAFT)
        tokens, q[: len(entries), column] = draw_draft(processed, noise)
    return logits.amax(dim=-1), tokens


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
