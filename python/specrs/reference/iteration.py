"""One decode iteration: `draft` and `verify` over flat rows (`accept` has the rest). Plans nothing and never waits.

The functions use only fixed shapes given by the plan (rows, K_r): no `.item()`, no `nonzero`, no boolean index, but for
one question of `draft`, whether any row needs its first position. They are the CPU path and the reference of the
captured GPU path.

Positions of one row during an iteration, n = num_tokens before it (the law is docs/start.md's):

    [0, n - 1)      target KV valid        row i of verification is fed position n - 1 + i
    [0, draft_len)  draft KV valid         draft pass 1 is fed n - 2 and n - 1, pass i >= 2 is fed n + i - 2
    [n, n + K_r)    drafts, kept in `tokens` behind the committed ones

A drafter with a mask token has one pass, which is fed [draft_len, n) and masks at n .. n + K_r - 2.
A drafter that reads the target's hidden states is one position behind: the state of position p goes with the token at
p + 1 (`Drafter.token_offset`). The last state that is known is that of n - 2, so pass 1 is fed the positions up to
there whose states are kept and whose KV is missing (`runner.hidden_rows`), and pass i >= 2 is fed n + i - 3 with what
the pass before left. Its KV then counts up to n - 1; behind that it is of no true states, and written again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.core import FLAG_DRAFT_NON_FINITE
from specrs.drafters.base import DeviceDrafter, Drafter
from specrs.models.base import TorchModel
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.lora import AdapterRows
from specrs.runner.cuda.entries import Iteration, flat_rows
from specrs.runner.cuda.hidden_rows import HiddenRows
from specrs.runner.cuda.row_state import RowState
from specrs.runner.cuda.sampling_state import EntrySampling


@dataclass(frozen=True, slots=True)
class Drafted:
    """What drafting leaves for verification, besides the drafts in row state."""

    flags: Tensor  # [B] int64, FLAG_DRAFT_NON_FINITE where draft logits were not finite
    q: Tensor | None  # [B, K, V], the distribution that each draft was drawn from; None for a point mass and `coupled`
    num_unfed: int | Tensor | None = None
    """Of K_r drafts how many leave no draft KV, for all entries or `[B]`; None: draft KV is as it was."""
    on_host: Tensor | None = None
    """`[B]` bool, entries whose drafts a drafter on the host made; None: none where `q` or `num_unfed` is not None."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What the target says of a pass over N flat rows; row i of entry b gives the distribution of position n_b + i."""

    logits: Tensor  # [N, V]
    positions: Tensor  # [N] int64, those fed, -1 in masked rows
    drafts: Tensor  # [B, K] int64, the drafts among the tokens fed; from K_r on they mean nothing
    entries: Tensor | None = None  # [N, L, hidden], the hidden states that the drafter will read


def prepare(
    state: RowState,
    rows: Tensor,
    planned: Sequence[int],
    capacity: Tensor,
    *,
    block_size: int,
    max_context: int,
    drafter: Drafter | None,
    on_host: Tensor | None = None,
) -> Iteration:
    """Read lengths from row state and apply the device's guards to the planned K_r; mutates nothing.

    K_r = max(min(planned, min(limit - 1, draft_context + 1) - n), 0), and 0 where the row has ended or the draft's KV
    lags by more than `max_draft_lag`, if it does not start anew there: whatever the host believes, no row drafts past
    its limit or over a gap in its draft KV. `on_host` `[B]` bool: entries that the drafter's own bounds are not for;
    None: no such.
    """
    n = state.num_tokens.index_select(0, rows)
    alive = state.active.index_select(0, rows)
    flat = flat_rows(tuple(planned))
    k = flat.planned
    if drafter is not None and planned[0] > 0:
        end = state.limit.index_select(0, rows).sub_(1)
        if drafter.max_model_len is not None:
            within = end.clamp(max=drafter.max_model_len + 1)
            end = within if on_host is None else torch.where(on_host, end, within)
        ready = alive
        if drafter.max_draft_lag is not None and not drafter.hidden_layers:
            close = state.draft_len.index_select(0, rows) >= n - drafter.max_draft_lag
            ready = (close if on_host is None else close.logical_or_(on_host)).logical_and_(alive)
        k = torch.minimum(k, end.sub_(n)).clamp_(min=0).mul_(ready)
    blocks = min(-(-max_context // block_size), state.block_table.shape[1])
    return Iteration(
        rows=rows,
        planned=tuple(planned),
        flat=flat,
        num_tokens=n,
        num_drafts=k,
        alive=alive,
        capacity=capacity,
        block_table=state.block_table.narrow(1, 0, blocks).index_select(0, rows),
        block_size=block_size,
        max_context=min(max_context, blocks * block_size),
        group_tables=state.group_tables[:, rows, :blocks] if len(state.tables) > 1 else None,
    )


def place(
    state: RowState, it: Iteration, proposed: Tensor, sampling: EntrySampling, on_host: Tensor | None = None
) -> Drafted:
    """Take the drafts of drafters on the host, `proposed` `[B, K]` int64; columns from K_r on are ignored, and q is
    a point mass. `on_host` `[B]` bool: whose they are; None: all entries'. Mutates `state.tokens` in [n, n + K_r)."""
    column = torch.arange(it.max_k)
    live = column < it.num_drafts[:, None]
    if on_host is not None:
        live &= on_host[:, None]
    state.tokens[it.rows[:, None], torch.where(live, it.num_tokens[:, None] + column, state.scratch_column)] = proposed
    if sampling.grammar is not None:
        for tokens, is_draft in zip(proposed.unbind(1), live.unbind(1), strict=True):
            sampling.grammar.observe(tokens, is_draft)
    return Drafted(torch.zeros_like(it.num_tokens), None)


def draft(
    state: RowState,
    it: Iteration,
    drafter: DeviceDrafter,
    sampling: EntrySampling,
    rule: str,
    on_host: Tensor | None = None,
    hidden: HiddenRows | None = None,
    read_from: Tensor | None = None,
) -> Drafted:
    """Draw up to K_r drafts per entry; pass i feeds the entries planned at K >= i.

    `on_host` `[B]` bool: entries that have their drafts already, masked in every pass; None: no such. There are passes
    up to the largest K planned of the others.

    Pass 1 feeds positions n - 2 and n - 1, so that the token that the draft has not seen after a full acceptance is
    caught up without a pass of its own; its slot is -1 where that KV is already there. Where it is in every entry, pass
    1 feeds n - 1 alone, in half the time. A drafter with a mask token has no other pass: it is fed all columns, the
    mask at drafts' positions. Greedy rows draft by argmax, sampled ones from the draft's own processed distribution,
    which `rejection` keeps as q.

    `hidden`: what is kept for a drafter that reads hidden states. Its pass 1 feeds only positions whose KV is missing.
    `read_from` `[R + 1]`: from where on another drafter's rows read KV, None: from 0.

    Mutates `state.tokens` in [n, n + K_r), the draft's KV cache, and with `hidden` where its KV begins and ends.
    """
    assert drafter.max_draft_lag is not None
    batch, offset, n = len(it.planned), drafter.token_offset, it.num_tokens
    width = drafter.max_draft_lag - offset
    depth = it.max_k
    if on_host is not None:
        depth = max((k for k, placed in zip(it.planned, on_host.tolist(), strict=True) if not placed), default=0)
        if not depth:
            return Drafted(torch.zeros_like(n), None)
    q = None
    if sampling.steps.random and rule == "rejection":
        q = torch.empty((batch, it.max_k, sampling.vocab_size), dtype=sampling.dtype)
    # Columns 0..width-1 are fed in pass 1, column width + i - 2 in pass i >= 2: with no offset n - width .. n + K - 2.
    column = torch.arange(width - 1 + it.max_k)
    live = it.num_drafts[:, None] >= (column - (width - 2)).clamp_(min=1)
    if on_host is not None:
        live &= ~on_host[:, None]
    fed = torch.where(live, n[:, None] + (column - width - offset), -1).clamp_(min=-1)
    k_start = begins = None if read_from is None else read_from.index_select(0, it.rows)
    missing = state.draft_len.index_select(0, it.rows)
    if hidden is not None:
        missing = hidden.begin(state, it, live[:, 0])
        k_start = hidden.draft_start.index_select(0, it.rows)
    if k_start is not None:  # rows whose KV is there may lie before it begins
        fed.masked_fill_(fed < missing[:, None], -1)
    slots = it.slots(fed).masked_fill_(fed < missing[:, None], -1)
    # Of the first columns those that no entry needs are left out.
    behind = (slots[:, : width - 1] >= 0).any(dim=0).tolist()
    first = behind.index(True) if True in behind else width - 1
    written = torch.where(live[:, width - 1 :], fed[:, width - 1 :] + 1 + offset, state.scratch_column)
    counts = [sum(k >= i for k in it.planned) for i in range(1, depth + 1)]
    tops = torch.zeros((it.max_k, batch), dtype=sampling.dtype)
    drawn = torch.zeros((it.max_k, batch), dtype=torch.int64)
    before, left = state.tokens[it.rows, fed[:, width - 1].clamp(min=0)], None
    proposed: Tensor | None = None  # [B, K, V]
    if drafter.mask_token_id is not None:
        inputs = _first_inputs(state, it, fed[: counts[0], first:], slots[: counts[0], first:], offset, begins)
        inputs.input_ids.view(counts[0], -1)[:, width - first :] = drafter.mask_token_id
        proposed = drafter.propose_all(inputs, it.max_k)
    for i, (count, top, tokens) in enumerate(zip(counts, tops[:depth], drawn[:depth], strict=True), 1):
        if proposed is not None:
            logits = proposed[:count, i - 1]
        elif i == 1 and (first < width - 1 or hidden is not None):
            columns = slice(first, width)
            inputs = _first_inputs(state, it, fed[:count, columns], slots[:count, columns], offset, begins)
            read = None if hidden is None else hidden.read(it.rows[:count], fed[:count, columns])
            logits, left = drafter.propose(inputs, read, last_of=width - first)
        else:
            inputs = PassInputs(
                input_ids=before[:count],
                positions=fed[:count, width + i - 2].contiguous(),
                slots=slots[:count, width + i - 2].contiguous(),
                q_start=torch.arange(count + 1),
                block_table=it.block_table[:count],
                max_q_len=1,
                max_context=it.max_context,
                k_start=None if k_start is None else k_start[:count],
            )
            logits, left = drafter.step(inputs, None if left is None else left[:count])
        if count < batch:
            top, tokens = top[:count], tokens[:count]
        _draw(logits, n[:count], i - 1, sampling, q, top, tokens)
        before = tokens
        if sampling.adjusts:  # of later passes, by what was drafted so far
            state.tokens[it.rows[:count], written[:count, i - 1]] = tokens
        if sampling.grammar is not None:
            sampling.grammar.observe(tokens, live[:count, width + i - 2])
    state.tokens[it.rows[:, None], written] = drawn.t()
    faulty = (~is_finite(tops) & live[:, width - 1 :].t()).any(dim=0)
    unfed = drafter.num_unfed_drafts
    if unfed is not None and not drafter.keeps_draft_kv:
        return Drafted(faulty * FLAG_DRAFT_NON_FINITE, q, it.num_drafts + unfed, on_host)
    return Drafted(faulty * FLAG_DRAFT_NON_FINITE, q, unfed, on_host)


def _first_inputs(
    state: RowState, it: Iteration, positions: Tensor, slots: Tensor, offset: int, k_start: Tensor | None
) -> PassInputs:
    """Pass 1 of entries: `positions` and `slots` `[count, width]`; position p is fed the token at p + offset."""
    count, width = positions.shape
    return PassInputs(
        input_ids=state.tokens[it.rows[:count, None], positions.clamp(min=0) + offset].view(-1),
        positions=positions.reshape(-1),
        slots=slots.reshape(-1),
        q_start=torch.arange(0, count * width + 1, width),
        block_table=it.block_table[:count],
        max_q_len=width,
        max_context=it.max_context,
        k_start=None if k_start is None else k_start[:count],
    )


def _draw(
    logits: Tensor, n: Tensor, column: int, sampling: EntrySampling, q: Tensor | None, top: Tensor, tokens: Tensor
) -> None:
    """Draw the draft at position n + column of each row; writes the largest raw logits, the tokens, and the
    distributions drawn from into `q`. `n`, `top` and `tokens` are `[count]`."""
    adjusted = logits
    if sampling.adjusts:
        entries, forbidden = torch.arange(len(n)), None
        if sampling.grammar is not None:
            forbidden = sampling.grammar.forbidden(entries, torch.full_like(entries, column))
        adjusted = sampling.adjust(logits, entries, n + column, forbidden)
    if sampling.steps.random:
        rows = sampling.it.rows[: len(n)]
        largest, drawn = sampling.sampler.draft(adjusted, rows, n + column, sampling.steps, q, column)
        top.copy_(largest)
        tokens.copy_(drawn)
    else:
        torch.max(adjusted, dim=-1, out=(top, tokens))
    if adjusted is not logits:
        torch.amax(logits, dim=-1, out=top)


def is_finite(x: Tensor) -> Tensor:
    """`x.isfinite()` in two operations instead of five."""
    return x.abs() < math.inf


def verify_inputs(state: RowState, it: Iteration, adapters: tuple[AdapterRows, ...] = ()) -> tuple[PassInputs, Tensor]:
    """Build the verification pass of an iteration and the tokens that it feeds; mutates nothing.

    The pass has N = sum(planned + 1) flat rows; `adapters` are the LoRA adapters of some of them. The tokens are
    t_{n-1}, d_1 .. d_K of every sequence, `[B, K + 1]` int64; in masked columns they mean nothing.
    """
    column = torch.arange(it.max_k + 1)
    live = it.alive[:, None] & (column <= it.num_drafts[:, None])
    fed = torch.where(live, it.num_tokens[:, None] - 1 + column, -1)
    positions = it.flat.take(fed)
    tokens = state.tokens[it.rows[:, None], fed.clamp(min=0)]
    inputs = PassInputs(
        input_ids=it.flat.take(tokens),
        positions=positions,
        slots=it.flat.take(it.slots(fed)),
        q_start=it.flat.q_start,
        block_table=it.block_table,
        max_q_len=it.max_k + 1,
        max_context=it.max_context,
        group_slots=it.flat_group_slots(fed),
        group_tables=it.group_tables,
        adapters=adapters,
    )
    return inputs, tokens


def verify(
    state: RowState,
    it: Iteration,
    target: TorchModel,
    kv_cache: KVCache,
    hidden_layers: Sequence[int] = (),
    adapters: tuple[AdapterRows, ...] = (),
) -> Scored:
    """Feed t_{n-1}, d_1..d_K of every entry to the target in one pass of N = sum(planned + 1) flat rows, some of them
    those of LoRA `adapters`; mutates the target's KV cache only."""
    inputs, tokens = verify_inputs(state, it, adapters)
    hidden = target.forward(inputs, kv_cache, hidden_layers)
    return Scored(target.compute_logits(hidden.final), inputs.positions, tokens[:, 1:], hidden.entries)
