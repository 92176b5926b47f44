"""Warns if the first drafts of a head are rarely accepted, because it may read other hidden states than in training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("specrs")
DRAFTS = 1000


@dataclass(slots=True)
class HeadCheck:
    """Counter of a head's first 1,000 drafts. Warns if too few of the drafts' first tokens were accepted."""

    head: str
    """The user's name for the head."""
    least: float
    """Minimum share of first draft tokens that the target accepts if the head fits it."""
    advice: str
    """End of the warning: what may be wrong, and what to do."""
    drafts: int = 0
    accepted: int = 0

    def settled(self, results: Mapping[str, NDArray[np.int64]], num_decode: int) -> bool:
        """Count the results of a step with `num_decode` decoding sequences. Returns True if it was the last to count.

        Mutates the counts, and logs the warning.
        """
        self.drafts += int(np.count_nonzero(results["num_drafted"][:num_decode]))
        self.accepted += int(np.count_nonzero(results["num_accepted"][:num_decode]))
        if self.drafts < DRAFTS:
            return False
        if self.accepted < self.least * self.drafts:
            logger.warning(
                "%s: the target accepted the first token of %.1f %% of the first %d drafts, and of a head that fits it "
                "more than %.0f %%. %s",
                self.head,
                100.0 * self.accepted / self.drafts,
                self.drafts,
                100.0 * self.least,
                self.advice,
            )
        return True
