"""The end of an iteration: verify the drafts by the rule, commit, apply stops, report. Runs no model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specrs.core import FINISH_LENGTH, FINISH_STOP, FLAG_CAPACITY, FLAG_NO_TOKEN_ALLOWED, FLAG_TARGET_NON_FINITE
from specrs.reference.iteration import Drafted, Scored, is_finite
from specrs.runner.cuda.entries import Iteration
from specrs.runner.cuda.row_state import RowState
from specrs.runner.cuda.samplers import VerifyEntries
from specrs.runner.cuda.sampling_state import EntrySampling
from specrs.runner.cuda.slots import Results
from specrs.verify.greedy import verify_greedy
from specrs.verify.rejection import append_token


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decides for B entries, W = max K + 1 columns."""

    num_accepted: Tensor  # [B] int64
    tokens: Tensor  # [B, W] int64; meaningless past num_accepted
    top: Tensor  # [N], largest logit of each flat row before masks: not finite where the model's answer is not
    adjusted: Tensor  # [N, V], logits after masks, bias and penalties
    allowed_top: Tensor | None = None
    """`[N]`, largest logit of each flat row after masks, -inf where no token is allowed. None: there are no masks."""


def accept(it: Iteration, scored: Scored, drafted: Drafted, sampling: EntrySampling) -> Verdict:
    """Apply masks and penalties to the target's logits and verify the drafts; mutates nothing.

    Entries that sample are verified by `rejection` where the drafts have a q, by `coupled` where they have none; greedy
    entries are the same under both.
    Rows and drafts beyond an entry's K_r are ignored.
    """
    n, k, entries = it.num_tokens, it.num_drafts, it.flat.entry
    forbidden = None
    if sampling.grammar is not None:
        forbidden = sampling.grammar.forbidden(entries, it.flat.offset)
    adjusted = sampling.adjust(scored.logits, entries, scored.positions + 1, forbidden)
    if not sampling.steps.random:
        top, best = adjusted.max(dim=-1)
        accepted, tokens = verify_greedy(it.flat.columns(best), scored.drafts, k)
        return _verdict(accepted, tokens, top, scored.logits, adjusted)

    at = VerifyEntries(it.rows, entries, it.flat.q_start, n, k)
    accepted, tokens, top = sampling.sampler.verify(adjusted, at, scored.drafts, sampling.steps, drafted.q)
    if drafted.q is not None and drafted.on_host is not None:
        # Of a point mass nothing is kept, and `coupled` is its rule.
        other, others, _ = sampling.sampler.verify(adjusted, at, scored.drafts, sampling.steps, None)
        accepted = torch.where(drafted.on_host, other, accepted)
        tokens = torch.where(drafted.on_host[:, None], others, tokens)
    return _verdict(accepted, tokens, top, scored.logits, adjusted)


def _verdict(accepted: Tensor, tokens: Tensor, top: Tensor, logits: Tensor, adjusted: Tensor) -> Verdict:
    """The verdict with both tops; `top` `[N]` is of `adjusted`, which is `logits` itself where nothing is masked."""
    if adjusted is logits:
        return Verdict(accepted, tokens, top, adjusted)
    return Verdict(accepted, tokens, logits.amax(dim=-1), adjusted, allowed_top=top)


def at_rates(state: RowState, it: Iteration, verdict: Verdict, num_accepted: Tensor) -> Verdict:
    """The verdict with another number of drafts accepted, and the target's argmax behind them: for timing only."""
    index = (it.num_tokens[:, None] + torch.arange(it.max_k)).clamp(max=state.scratch_column)
    drafts = state.tokens[it.rows[:, None], index]
    best = verdict.adjusted.argmax(dim=-1)[it.flat.index].gather(1, num_accepted[:, None]).squeeze(1)
    return replace(verdict, num_accepted=num_accepted, tokens=append_token(drafts, num_accepted, best))


def update(
    state: RowState,
    it: Iteration,
    verdict: Verdict,
    drafted: Drafted,
    results: Results,
    min_len: Tensor | None = None,
) -> None:
    """Commit the emitted tokens, apply stops and the limit, report; mutates row state and results.

    Only rows 0 to `num_accepted` are judged: plain decoding does not reach the others. A reached row that is not finite
    ends the request at once. A reached row in which no token is allowed ends it there: the tokens before it are emitted
    first, and the next iteration, which begins with that row, reports the error.

    `min_len` `[B]` int64: positions from which stop ids count; None: those of the rows.

    Nothing behind this judges stops and limits again: `finish_reason` is what the scheduler ends a request by.

    Draft KV is valid as far as the drafter says (`Drafter.num_unfed_drafts`) where K_r > 0, as before where K_r = 0. An
    entry that ended before reports zeros.
    """
    rows, n, k = it.rows, it.num_tokens, it.num_drafts
    accepted, tokens = verdict.num_accepted, verdict.tokens
    width = it.max_k + 1
    column = torch.arange(width, device=rows.device)
    is_sound, reached = is_finite(it.flat.columns(verdict.top)), accepted
    fits = n + k <= it.capacity
    flags = drafted.flags | torch.where(fits, 0, FLAG_CAPACITY)
    good = it.alive & fits
    if verdict.allowed_top is not None:
        is_empty = is_sound & (it.flat.columns(verdict.allowed_top) == -math.inf)
        first_empty = torch.where(is_empty, column, width).amin(dim=1)
        reached = torch.minimum(accepted, first_empty)
        flags = flags | torch.where(first_empty > 0, 0, FLAG_NO_TOKEN_ALLOWED)
        good &= first_empty > 0
        # The draft that leads to the empty row is the last token, as if it had been drawn in the row before.
        accepted = torch.minimum(accepted, (first_empty - 1).clamp_(min=0))
    finite = (is_sound | (column > reached[:, None])).all(dim=1)
    flags = flags | torch.where(finite, 0, FLAG_TARGET_NON_FINITE)
    good &= finite

    positions = n[:, None] + column
    if it.max_k:
        # Draft i stands in column i, behind what was emitted: read before the last token takes the place of the first.
        drafts = state.tokens[rows[:, None], (positions - 1).clamp(max=state.scratch_column)]
        tokens = torch.where((column > accepted[:, None]) & (column <= k[:, None]), drafts, tokens)
    is_stop = (tokens[:, :, None] == state.stop_ids.index_select(0, rows)[:, None, :]).any(dim=2)
    if min_len is None:
        min_len = state.min_len.index_select(0, rows)
    is_stop &= (column <= accepted[:, None]) & (positions >= min_len[:, None])
    first_stop = torch.where(is_stop, column, width).amin(dim=1)
    emitted = torch.where(good, torch.minimum(accepted, first_stop) + 1, 0)
    grown = n + emitted

    target_column = torch.where(column < emitted[:, None], positions, state.scratch_column)
    state.tokens[rows[:, None], target_column] = tokens
    state.num_tokens.index_copy_(0, rows, grown)
    unstopped = first_stop == width
    goes_on = good & unstopped & (grown < state.limit.index_select(0, rows))
    state.active.index_copy_(0, rows, goes_on)
    if it.max_k and drafted.num_unfed is not None:
        before, after = state.draft_len.index_select(0, rows), torch.minimum(grown - 1, n + k - drafted.num_unfed)
        drew = good & (k > 0)
        if drafted.on_host is not None:
            drew &= ~drafted.on_host
        state.draft_len.index_copy_(0, rows, torch.where(drew, after, before))

    results.num_emitted.copy_(emitted)
    results.num_accepted.copy_(torch.where(good, accepted, 0))
    results.num_drafted.copy_(torch.where(good, k, 0))
    results.flags.copy_(torch.where(it.alive, flags, 0))
    results.finish_reason.copy_(torch.where(unstopped, FINISH_LENGTH, FINISH_STOP) * (good ^ goes_on))
    results.tokens[:, :width] = tokens
