"""From raw logits to the distribution that is sampled: masks, bias, penalties, temperature, filters. Draws nothing.

The order is that of vLLM's V1 sampler: allowed_token_ids, bad_words, min_tokens, logit_bias, repetition, frequency
and presence penalty; then temperature, min_p, top_k, top_p. Greedy rows take the argmax before temperature. Where
transformers (5.23) has a step, this is what differs:

    step              transformers                             here
    allowed ids       none (suppress_tokens: the complement)   -inf outside
    bad_words         after the penalties; drops [eos]         before; [eos] is a word like any other. Prompt and output
                                                               are matched, as in transformers; vLLM matches the output
    min_tokens        min_new_tokens, over eos ids             over all stop ids, unless a grammar leaves only them
    logit_bias        sequence_bias, also for sequences        single ids
    repetition        x < 0 multiplied, else divided;          the same
                      over prompt and output
    frequency         none                                     x - frequency * count, over the output
    presence          none                                     x - presence * (count > 0), over the output
    temperature       the same                                 the same; 0 is greedy
    min_p             after top_k and top_p                    before them: they act on what it leaves
    top_k             ties at the cut kept                     the same
    top_p             the sort breaks a tie at the cut;        ties kept; the head's sum reaches top_p
                      the tail's sum stays <= 1 - top_p

All shapes are fixed by the arguments. A row's result does not depend on the other rows, nor on steps that only they
need. A step that no row needs is skipped; where nothing is left to do the argument itself is returned. No function
mutates its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.verify.history import TokenCounts
from specrs.verify.params import SamplingRows, Steps
from specrs.verify.thresholds import apply_coarse_top_k_top_p, apply_min_p, apply_top_k_top_p


@dataclass(frozen=True, slots=True)
class Constraints:
    """Masks and biases of N flat rows; None where no row has any. Ids are of the vocabulary, padding as named."""

    forbidden: Tensor | None = None  # [N, V] bool: outside allowed_token_ids, or excluded by a grammar
    bad_words: Tensor | None = None  # [N, W, L] int64, see `pack_bad_words`
    context: Tensor | None = None  # [N, L-1] int64, see `context_rows`; needed with bad_words
    stop_ids: Tensor | None = None  # [N, S] int64, -1 is padding
    stops_forbidden: Tensor | None = None  # [N] bool: the row's token comes before min_tokens; needed with stop_ids
    bias_ids: Tensor | None = None  # [N, M] int64; padding is any id with bias 0
    bias: Tensor | None = None  # [N, M] in the logits' dtype; needed with bias_ids


def process_logits(
    logits: Tensor,
    rows: SamplingRows,
    steps: Steps,
    *,
    constraints: Constraints | None = None,
    counts: TokenCounts | None = None,
    coarse: bool = False,
) -> Tensor:
    """Return logits `[N, V]` whose softmax is the distribution that each row samples. A greedy row has all of it on its
    argmax.

    Args:
        logits: raw, `[N, V]` fp32 or float64.
        rows: parameters of the N rows, floats in the logits' dtype.
        steps: union of the steps of all rows' requests.
        constraints: None if no row has any.
        counts: history of each flat row, `[N, V]`; needed if `steps.penalties`.
        coarse: for drafting, top_k and top_p cut on a grid (`apply_coarse_top_k_top_p`).
    """
    adjusted = adjust_logits(logits, rows, steps, constraints=constraints, counts=counts)
    filtered = filter_logits(adjusted, rows, steps, coarse=coarse)
    return greedy_as_point_mass(filtered, rows.greedy) if steps.greedy else filtered


def adjust_logits(
    logits: Tensor,
    rows: SamplingRows,
    steps: Steps,
    *,
    constraints: Constraints | None = None,
    counts: TokenCounts | None = None,
) -> Tensor:
    """Apply masks, bias and penalties, which are all steps that can change an argmax. A batch of greedy rows needs no
    others."""
    adjusted = logits if constraints is None else constrain(logits, constraints)
    if not steps.penalties:
        return adjusted
    if counts is None:
        raise ValueError("counts: None, must be the token counts of the rows where a row has a penalty")
    return penalize(adjusted, rows, steps, counts)


def constrain(logits: Tensor, constraints: Constraints) -> Tensor:
    """Return logits `[N, V]` after allowed ids, bad words, `min_tokens` and biases."""
    c = constraints
    out = logits.clone() if c.forbidden is None else logits.masked_fill(c.forbidden, -torch.inf)
    if c.bad_words is not None:
        if c.context is None:
            raise ValueError("context: None, must be the tokens before each row where bad_words are given")
        prefix, last = c.bad_words[:, :, :-1], c.bad_words[:, :, -1]
        complete = ((prefix == c.context[:, None, :]) | (prefix < 0)).all(dim=-1) & (last >= 0)
        _forbid(out, last, complete)
    if c.stop_ids is not None:
        if c.stops_forbidden is None:
            raise ValueError("stops_forbidden: None, must mark the rows before min_tokens where stop_ids are given")
        _forbid(out, c.stop_ids, (c.stop_ids >= 0) & c.stops_forbidden[:, None])
    if c.bias_ids is not None:
        if c.bias is None:
            raise ValueError("bias: None, must hold a bias for each of bias_ids")
        out.scatter_add_(1, c.bias_ids, c.bias)
    return out


def leaves_only_stops(forbidden: Tensor, stop_ids: Tensor) -> Tensor:
    """Return `[N]` bool, True if a grammar allows only stop ids. The text is then complete, and `min_tokens` does not
    apply.

    Args:
        forbidden: `[N, V]` bool, true where the grammar excludes the token.
        stop_ids: `[N, S]` int64, -1 is padding.
    """
    # Added and not assigned, as in `_forbid`.
    is_stop = torch.zeros_like(forbidden, dtype=torch.int8)
    is_stop.scatter_add_(1, stop_ids.clamp(min=0), (stop_ids >= 0).to(torch.int8))
    return (forbidden | (is_stop > 0)).all(dim=1)


def _forbid(logits: Tensor, ids: Tensor, where: Tensor) -> None:
    # Added and not assigned: padding is clamped to id 0, where an assignment would race with a real id 0.
    logits.scatter_add_(1, ids.clamp(min=0), torch.where(where, -torch.inf, 0.0).to(logits.dtype))


def penalize(logits: Tensor, rows: SamplingRows, steps: Steps, counts: TokenCounts) -> Tensor:
    """Return logits `[N, V]` after the repetition penalty (Keskar et al. 2019, section 4.1, with the sign rule), then
    frequency and presence penalty."""
    in_output = counts.output > 0
    if steps.repetition:
        scaled = torch.where(logits > 0, logits / rows.repetition_penalty, logits * rows.repetition_penalty)
        logits = torch.where(in_output | counts.prompt, scaled, logits)
    if steps.counts:
        logits = logits - rows.frequency_penalty * counts.output - rows.presence_penalty * in_output
    return logits


def filter_logits(adjusted: Tensor, rows: SamplingRows, steps: Steps, *, coarse: bool = False) -> Tensor:
    """Return logits `[N, V]` after temperature, min_p, top_k and top_p, none of which changes the argmax. Greedy rows
    are unchanged."""
    out = adjusted / rows.temperature if steps.temperature else adjusted
    if steps.min_p:
        out = apply_min_p(out, rows.log_min_p)
    if steps.top_k or steps.top_p:
        apply = apply_coarse_top_k_top_p if coarse else apply_top_k_top_p
        out = apply(out, rows.top_k if steps.top_k else None, rows.top_p if steps.top_p else None)
    return out


def greedy_as_point_mass(logits: Tensor, greedy: Tensor) -> Tensor:
    """Replace greedy rows (`greedy` `[N, 1]` bool) by 0 at the argmax, the lowest id if several are equal, and -inf
    elsewhere. Other rows are unchanged.

    softmax then gives exactly 1 and 0, and any finite noise draws the argmax, so the sampling rules need no case for
    greedy rows.
    """
    best = logits.argmax(dim=-1, keepdim=True)
    point = torch.full_like(logits, -torch.inf).scatter_(1, best, 0.0)
    return torch.where(greedy, point, logits)
