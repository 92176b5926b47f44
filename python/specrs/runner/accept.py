"""The end of an iteration: verify the drafts by the rule, commit, apply stops, report. Runs no model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.core import FLAG_CAPACITY, FLAG_TARGET_NON_FINITE, PURPOSE_ACCEPT, PURPOSE_GUMBEL
from specrs.runner.iteration import Drafted, Iteration
from specrs.runner.row_state import RowState
from specrs.runner.sampling_state import EntrySampling
from specrs.verify.coupled import verify_coupled
from specrs.verify.greedy import verify_greedy
from specrs.verify.rejection import append_token, count_accepted, draw_after
from specrs.verify.sample import draw


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
        return Results(*(tensor.narrow(0, start, length) for tensor in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All sections."""
        return self.num_emitted, self.num_accepted, self.num_drafted, self.flags, self.tokens


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decides for B entries, W = max K + 1 columns."""

    num_accepted: Tensor  # [B] int64
    tokens: Tensor  # [B, W] int64; meaningless past num_accepted
    top: Tensor  # [N], largest logit of each flat row after masks: not finite for NaN, infinities, nothing allowed
    filtered: Tensor  # [N, V], logits after every processing step but point masses


def accept(
    state: RowState,
    it: Iteration,
    logits: Tensor,
    positions: Tensor,
    drafted: Drafted,
    sampling: EntrySampling,
    rule: str,
) -> Verdict:
    """Apply masks, penalties and filters to the target's logits and verify the drafts; mutates nothing.

    Args:
        logits: `[N, V]`, row i of entry b for position n_b + i; rows beyond an entry's K_r are ignored.
        positions: the positions fed, `[N]` int64, -1 in masked rows.
        rule: `rejection` or `coupled`, for the entries that sample; greedy entries are the same under both.
    """
    width, n, k = it.max_k + 1, it.num_tokens, it.num_drafts
    entries, q_start = it.flat.entry, it.flat.q_start
    forbidden = None
    if sampling.grammar is not None:
        forbidden = sampling.grammar.forbidden(entries, it.flat.offset)
    adjusted = sampling.adjust(logits, entries, positions + 1, forbidden)
    drafts = state.tokens[it.rows[:, None], (n[:, None] + torch.arange(width - 1)).clamp(max=state.scratch_column)]
    if not sampling.steps.random:
        top, best = adjusted.max(dim=-1)
        accepted, tokens = verify_greedy(best[it.flat.index], drafts, k)
        return Verdict(accepted, tokens, top, adjusted)

    filtered = sampling.filter(adjusted, entries)
    processed = sampling.point_masses(filtered, entries)
    if rule == "coupled":
        noise = sampling.noise.gumbel(it.rows[entries], positions + 1, PURPOSE_GUMBEL)
        accepted, tokens = verify_coupled(processed, noise, q_start, drafts, k)
    elif drafted.q is None:
        # No draft in the batch: one row an entry, drawn like the token after the drafts.
        accepted = torch.zeros_like(n)
        tokens = draw(processed, sampling.noise.gumbel(it.rows, n, PURPOSE_GUMBEL))[:, None]
    else:
        p = processed.softmax(dim=-1)
        uniforms = sampling.noise.uniform(it.rows, n[:, None] + torch.arange(width - 1), PURPOSE_ACCEPT)
        accepted = count_accepted(p, q_start, drafted.q, drafts, k, uniforms)
        # Not the purpose of the drafts' noise, and the one of `coupled`: without drafts both rules write the same text.
        noise = sampling.noise.gumbel(it.rows, n + accepted, PURPOSE_GUMBEL)
        tokens = append_token(drafts, accepted, draw_after(p, q_start, drafted.q, k, accepted, noise))
    return Verdict(accepted, tokens, adjusted.amax(dim=-1), filtered)


def update(state: RowState, it: Iteration, verdict: Verdict, drafted: Drafted, results: Results) -> None:
    """Commit the emitted tokens, apply stops and the limit, report; mutates row state and results.

    draft_len' = min(n' - 1, n + K_r - 1) where K_r > 0, unchanged where K_r = 0. An entry that ended before reports
    zeros.
    """
    rows, n, k = it.rows, it.num_tokens, it.num_drafts
    accepted, tokens = verdict.num_accepted, verdict.tokens
    width = it.max_k + 1
    column = torch.arange(width, device=rows.device)
    finite = (verdict.top[it.flat.index].isfinite() | (column > k[:, None])).all(dim=1)
    fits = n + k <= it.capacity
    flags = drafted.flags | torch.where(finite, 0, FLAG_TARGET_NON_FINITE) | torch.where(fits, 0, FLAG_CAPACITY)
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
    if it.max_k:
        state.draft_len[rows] = torch.where(good & (k > 0), torch.minimum(grown, n + k) - 1, state.draft_len[rows])

    results.num_emitted.copy_(emitted)
    results.num_accepted.copy_(torch.where(good, accepted, 0))
    results.num_drafted.copy_(torch.where(good, k, 0))
    results.flags.copy_(torch.where(it.alive, flags, 0))
    results.tokens[:, :width] = tokens
