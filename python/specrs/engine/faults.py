"""Drafters that fail: counted, told once, left alone for a while. Runs nothing: their launches have gone on by then."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from specrs.core import DRAFTER_DEVICE, DRAFTER_NGRAM, DRAFTER_SUFFIX, Scheduler
from specrs.runner.ring import DraftFault, Header, RingSlot

logger = logging.getLogger("specrs")
HOST_KINDS = {"ngram": DRAFTER_NGRAM, "suffix": DRAFTER_SUFFIX}
"""Methods that draft on the host, as the core numbers them; the others draft on the device."""
LONGEST_PAUSE = 1023
"""Launches without drafts of the device behind its drafter's failure, at most: 0, 1, 3, 7 and so on while it fails."""


class DraftFaults:
    """The failures of an engine's drafters."""

    def __init__(self, scheduler: Scheduler, drafters: Sequence[str]) -> None:
        """`drafters` by their methods; one of them at most is on the device."""
        self._scheduler = scheduler
        self._drafters = tuple(drafters)
        self._on_host = {name: kind for name, kind in HOST_KINDS.items() if name in self._drafters}
        self._on_device = 0
        self._in_a_row = 0  # launches in which the device's drafter failed since one that drafted
        self._told: set[str] = set()

    def counts(self) -> list[int]:
        """How often each drafter has failed."""
        on_host = {name: self._scheduler.draft_errors_of(kind)[0] for name, kind in self._on_host.items()}
        return [on_host.get(name, self._on_device) for name in self._drafters]

    def planned(self) -> None:
        """Tell of drafters on the host that failed in a plan; the core has gone on without their drafts."""
        for name, kind in self._on_host.items():
            failures, cause = self._scheduler.draft_errors_of(kind)
            if failures:
                self._tell(name, cause)

    def launched(self, slot: RingSlot, header: Header) -> None:
        """Look for a failure of the device's drafter in a launch that has been executed or enqueued. That went on
        without drafts: so do later ones for a while, where it keeps failing."""
        fault, slot.draft_fault = slot.draft_fault, None  # its traceback holds the tensors of the launch
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
        """Once for each drafter."""
        if drafter not in self._told:
            self._told.add(drafter)
            logger.warning(
                "the drafter %r failed, and its launch went on without drafts: %s; its other failures are only counted "
                "(EngineStats.draft_errors)",
                drafter,
                repr(cause) if isinstance(cause, Exception) else cause,
                exc_info=cause if isinstance(cause, Exception) else None,
            )


def _drafts_on_device(slot: RingSlot, header: Header) -> bool:
    ks, drafters = (slot.record_arrays[name][: header.num_decode] for name in ("entry_k", "entry_drafter"))
    return bool(((ks > 0) & (drafters == DRAFTER_DEVICE)).any())
