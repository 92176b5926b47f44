"""Warns if the first drafts of an EAGLE-3 head are rarely accepted, because it may read other hidden states than in
training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("specrs")
DRAFTS = 1000
LEAST_ACCEPTANCE = 0.15


@dataclass(slots=True)
class HeadCheck:
    """Counter of the first 1,000 drafts. Warns if less than 15 % of their first tokens were accepted."""

    head: str
    layer_ids: tuple[int, ...]
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
        if self.accepted < LEAST_ACCEPTANCE * self.drafts:
            ids = list(self.layer_ids)
            logger.warning(
                "%s: the target accepted the first token of %.1f %% of the first %d drafts, and of a head that fits it "
                "more than %.0f %%. It reads hidden states where they enter layers %s, counted from 0; where its ids "
                "mean the output of a layer, set speculative_config.aux_hidden_state_layer_ids=%s, and where it was "
                "trained with another base than its config.json says, speculative_config.rope_theta",
                self.head,
                100.0 * self.accepted / self.drafts,
                self.drafts,
                100.0 * LEAST_ACCEPTANCE,
                ids,
                [layer + 1 for layer in ids],
            )
        return True
