"""Log probabilities that a launch reports, as requests keep them. Computes none."""

from __future__ import annotations

from specrs.outputs import TokenLogprob
from specrs.verify.token_logprobs import TokenLogprobs


def token_entries(found: TokenLogprobs, tokens: list[int], num_top: int | None) -> list[TokenLogprob]:
    """What a request keeps of its first `len(tokens)` rows; `num_top` as the user gave it, -1 for all."""
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
