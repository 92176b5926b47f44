"""Handles drafters that fail: counts failures, logs the first, and pauses the drafter for some steps. The steps
themselves went on without drafts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from specrs.backends.ring import DraftFault, Header, RingSlot
from specrs.core import DRAFTER_DEVICE, DRAFTERS, Scheduler

logger = logging.getLogger("specrs")
HOST_KINDS = {method: number for number, method in enumerate(DRAFTERS) if number != DRAFTER_DEVICE}
"""For each method that drafts on the host, its number in the core. All other methods draft on the device."""
LONGEST_PAUSE = 1023
"""Maximum number of steps without drafts after the device's drafter has failed. While the drafter keeps failing, the
pauses have 0, 1, 3, 7 and so on steps."""


class DraftFaults:
    """Counter of failures of an engine's drafters."""

    def __init__(self, scheduler: Scheduler, drafters: Sequence[str]) -> None:
        """Start counting. `drafters` are the engine's methods; at most one of them drafts on the device."""
        self._scheduler = scheduler
        self._drafters = tuple(drafters)
        self._on_host = {name: kind for name, kind in HOST_KINDS.items() if name in self._drafters}
        self._on_device = 0
        self._in_a_row = 0  # steps in which the device's drafter failed since one that drafted
        self._told: set[str] = set()

    def counts(self) -> list[int]:
        """Return the number of failures of each drafter."""
        on_host = {name: self._scheduler.draft_errors_of(kind)[0] for name, kind in self._on_host.items()}
        return [on_host.get(name, self._on_device) for name in self._drafters]

    def planned(self) -> None:
        """Log the first failure of each drafter that proposes on the host while steps are planned. The core has planned
        these steps without its drafts."""
        for name, kind in self._on_host.items():
            failures, cause = self._scheduler.draft_errors_of(kind)
            if failures:
                self._tell(name, cause)

    def executed(self, slot: RingSlot, header: Header) -> None:
        """Handle a failure of the device's drafter in a step that was executed or enqueued. The step went on without
        drafts. If the drafter keeps failing, later steps also run without drafts for a while."""
        fault, slot.draft_fault = slot.draft_fault, None  # its traceback holds the tensors of the step
        if fault is not None:
            self._failed(fault)
        elif self._in_a_row and _drafts_on_device(slot, header):
            self._in_a_row = 0

    def _failed(self, fault: DraftFault) -> None:
        if len(fault.blocks):
            self._scheduler.draft_kv_not_written(fault.blocks)
        self._scheduler.pause_drafting(min((1 << self._in_a_row) - 1, LONGEST_PAUSE))
        self._in_a_row = min(self._in_a_row + 1, LONGEST_PAUSE.bit_length())
        self._on_device += 1
        self._tell(next(name for name in self._drafters if name not in HOST_KINDS), fault.error)

    def _tell(self, drafter: str, cause: Exception | str | None) -> None:
        """Log the failure of a drafter, the first time only."""
        if drafter not in self._told:
            self._told.add(drafter)
            logger.warning(
                "the drafter %r failed, and its step went on without drafts: %s; its other failures are only counted "
                "(EngineStats.draft_errors)",
                drafter,
                repr(cause) if isinstance(cause, Exception) else cause,
                exc_info=cause if isinstance(cause, Exception) else None,
            )


def _drafts_on_device(slot: RingSlot, header: Header) -> bool:
    ks, drafters = (slot.record_arrays[name][: header.num_decode] for name in ("seq_k", "seq_drafter"))
    return bool(((ks > 0) & (drafters == DRAFTER_DEVICE)).any())
