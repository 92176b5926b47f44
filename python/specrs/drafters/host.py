"""Drafters on the host: a declaration, for the core proposes. Runs no model and sees no tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specrs.drafters.base import Proposal


@dataclass(slots=True)
class HostDrafter:
    """Prompt lookup and suffix decoding: drafts what followed before, in the text itself or in others' outputs.

    `Scheduler.plan` looks it up (`specrs.core.NgramProposer`, `SuffixDrafter`) and writes the drafts into the record.
    """

    max_draft_lag: ClassVar[None] = None
    num_unfed_drafts: ClassVar[None] = None
    keeps_draft_kv: ClassVar[bool] = False
    max_model_len: ClassVar[None] = None
    hidden_layers: ClassVar[tuple[int, ...]] = ()
    proposal: ClassVar[Proposal] = Proposal.POINT_MASS
    on_host: ClassVar[bool] = True

    num_passes: int = 0
