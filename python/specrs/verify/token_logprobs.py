"""Log probabilities of tokens, in the form in which steps report them. Computes none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of N rows: of a given token, and of the n most probable tokens.

    Each field is a NumPy array, or a tensor of the host.
    """

    value: Any  # [N] fp32
    rank: Any  # [N] int64, 1 for the most probable; of equal tokens the lowest id ranks first
    top_ids: Any  # [N, n] int64, most probable first, same order as rank
    top_values: Any  # [N, n] fp32
