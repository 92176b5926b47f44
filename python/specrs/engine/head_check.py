"""A look at the first drafts of a hidden-state head: one that reads other states than it was trained on shows in
nothing but a low acceptance. Says so once, and changes nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from specrs.runner.ring import Header, RingSlot

logger = logging.getLogger("specrs")
DRAFTS = 1000
LEAST_ACCEPTANCE = 0.15


@dataclass(slots=True)
class HeadCheck:
    """Counts drafts until there are 1,000; warns if less than 15 % of their first tokens were accepted."""

    head: str
    layer_ids: tuple[int, ...]
    drafts: int = 0
    accepted: int = 0

    def settled(self, slot: RingSlot, header: Header) -> bool:
        """Count a launch; whether it was the last to be looked at."""
        results = slot.results_arrays
        self.drafts += int(np.count_nonzero(results["num_drafted"][: header.num_decode]))
        self.accepted += int(np.count_nonzero(results["num_accepted"][: header.num_decode]))
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
