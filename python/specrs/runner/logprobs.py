"""Log probabilities that a launch reports next to its tokens. Computes none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specrs.outputs import TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of N rows: of the token in question, and of the n most probable tokens.

    Each field is a NumPy array, or a tensor of the host.
    """

    value: Any  # [N] fp32
    rank: Any  # [N] int64, 1 for the most probable; of equal tokens the lowest id ranks first
    top_ids: Any  # [N, n] int64, most probable first, same order as rank
    top_values: Any  # [N, n] fp32


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
