"""Converts log probabilities that a step reports to the form that requests keep. Computes none."""

from __future__ import annotations

from specrs.outputs import TokenLogprob
from specrs.verify.token_logprobs import TokenLogprobs


def token_entries(found: TokenLogprobs, tokens: list[int], num_top: int | None) -> list[TokenLogprob]:
    """Return a `TokenLogprob` for each of `tokens`, from the rows of `found`. `num_top` is the number of most likely
    tokens that the user asked for, -1 for all."""
    width = num_top if num_top is not None and num_top >= 0 else found.top_ids.shape[1]
    return [
        TokenLogprob(token, value, rank, ids[:width], tops[:width])
        for token, value, rank, ids, tops in zip(
            tokens,
            found.value.tolist(),
            found.rank.tolist(),
            found.top_ids.tolist(),
            found.top_values.tolist(),
            strict=False,
        )
    ]
