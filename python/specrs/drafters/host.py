"""Drafters on the host, from the runner's view: the Rust core proposes. Runs no model and sees no tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specrs.core import HostDrafter

ALWAYS_DRAFTS = HostDrafter("ngram", prompt_lookup_min=0)
"""Drafter that proposes tokens for every text, to measure the cost of verifying them."""
NEVER_DRAFTS = HostDrafter("ngram", prompt_lookup_min=1024, prompt_lookup_max=1024)
"""Drafter that proposes nothing for short texts, to measure the other drafters of a list."""


@dataclass(slots=True)
class OnHost:
    """Stand-in for a drafter with passes, for drafts that the host proposes: `Scheduler.plan` has already written them
    into the record. Its number of passes stays 0."""

    on_host: ClassVar[bool] = True

    num_passes: int = 0
