"""Token usage and speculation statistics of a request, in the form of answers. Counts nothing itself."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from specrs.outputs import AcceptanceFigures, RequestOutput


def usage(
    outputs: Collection[RequestOutput], *, completion_tokens: int, reasoning_tokens: int | None
) -> dict[str, Any]:
    """Return the `usage` object of a request, over all its prompts.

    `completion_tokens`: number of tokens of all completions that were sent. `reasoning_tokens`: number of these that
    are reasoning; None for completions that are no messages. Requests with a prediction also report how many of the
    tokens drafted from it were accepted and rejected.
    """
    prompt = cached = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        # the completions of a prompt share it, so that together they may have found it more than once
        cached += min(output.metrics.num_cached_tokens, len(output.prompt_token_ids))
    details = {} if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens}
    predictions = [output.metrics for output in outputs if output.metrics.num_predicted_tokens is not None]
    if predictions:
        accepted = sum(one.num_accepted_predicted_tokens for one in predictions)
        drafted = sum(one.num_predicted_tokens or 0 for one in predictions)
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        **({"completion_tokens_details": details} if details else {}),
    }


def tokens_of(length: int, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
    """Return the number of first `token_ids` whose text has at least `length` characters."""
    return bisect_left(range(len(token_ids)), length, key=lambda count: len(decode(token_ids[:count])))


def speculation(outputs: Iterable[RequestOutput], num_speculative_tokens: int) -> dict[str, Any] | None:
    """Return vLLM's `metrics` object: acceptance statistics over all completions of a request. None on an engine
    without a drafter."""
    if num_speculative_tokens == 0:
        return None
    statistics = [output.metrics for output in outputs]
    figures = AcceptanceFigures(
        draft_tokens=sum(one.draft_tokens for one in statistics),
        acceptance_histogram=[
            sum(counts) for counts in zip(*(one.acceptance_histogram for one in statistics), strict=True)
        ],
    )
    return {
        "speculative_decoding": {
            "mean_acceptance_length": figures.acceptance_length,
            "draft_acceptance_rate": figures.acceptance_rate,
            "acceptance_histogram": figures.acceptance_histogram,
            "num_spec_steps": figures.drafts,
            "num_accepted_draft_tokens": figures.accepted_tokens,
            "num_draft_tokens": figures.draft_tokens,
            "num_spec_tokens": num_speculative_tokens,
        }
    }
