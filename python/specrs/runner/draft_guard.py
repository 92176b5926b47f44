"""What a drafter does in a launch, and whether it counts: one that fails costs its drafts, on every rank alike.

Of several ranks one may fail alone. Each tells the others in an exchange of the target's next pass that happens anyway
(`Ranks.notice`); behind that pass all know, and take back what their own drafters have done by then. Until then nothing
else reads it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from enum import IntFlag
from functools import reduce
from operator import or_

import numpy as np
from numpy.typing import NDArray

from specrs.errors import EngineError
from specrs.parallel.ranks import ExchangeError, Ranks
from specrs.runner.ring import RingSlot

logger = logging.getLogger("specrs")
Undo = Callable[[], NDArray[np.int64]]
"""Takes back what a stage has done to row state; the blocks whose draft KV it was to write, int64."""


def nothing_written() -> NDArray[np.int64]:
    """Of a stage that leaves nothing that counts."""
    return np.zeros(0, np.int64)


class Stage(IntFlag):
    """What a drafter does in a launch."""

    BEHIND = 1
    """Feeds what the launch before has left to it."""
    CATCH_UP = 2
    """Feeds the launch's draft chunks."""
    DRAFT = 4
    """Drafts."""


_OWN = 8
"""In a notice: this rank is not one whose drafter failed because another's did."""


class DraftGuard:
    """The stages of one launch after another. Knows no models and no row state."""

    def __init__(self) -> None:
        self.ranks: Ranks | None = None
        self._attempted: dict[Stage, Undo] = {}  # since the ranks last agreed
        self._error: Exception | None = None
        self._slot: RingSlot | None = None
        self._told = False

    def begin(self, slot: RingSlot) -> None:
        """A launch begins."""
        self._slot, self._error = slot, None
        self._attempted.clear()
        slot.draft_fault = None

    @property
    def has_failed(self) -> bool:
        """Whether a stage of this launch has, here or, as far as is known, elsewhere."""
        assert self._slot is not None
        return self._error is not None or self._slot.draft_fault is not None

    @contextlib.contextmanager
    def stage(self, stage: Stage, undo: Undo = nothing_written) -> Iterator[None]:
        """Around what the drafter does: an exception ends the block, and no more. `undo` is called where it fails, on
        any rank, whether or not it has come to its end here."""
        assert self._slot is not None
        try:
            with contextlib.nullcontext() if self.ranks is None else self.ranks.drafting():
                yield
        except Exception as error:
            if self.ranks is None:
                self._slot.drafter_failed(error, undo())
                return
            self.ranks.notice |= stage | (0 if isinstance(error, ExchangeError) else _OWN)
            self._error = self._error or error
        if self.ranks is not None:
            self._attempted[stage] = undo

    def agree(self) -> bool:
        """Behind a pass of the target, or `exchange_notices`: whether a stage that no rank knew of has failed. It has
        been taken back then. Raises ExchangeError, where a rank is lost meanwhile."""
        attempted, self._attempted = self._attempted, {}
        if self.ranks is None or not attempted:
            return False
        self.ranks.notice = 0
        failed = reduce(or_, self.ranks.notices)
        if not failed:
            return False
        assert self._slot is not None
        cause = self._cause(self.ranks)
        for stage, undo in attempted.items():
            if stage & failed:
                self._slot.drafter_failed(cause, undo())
        self.ranks.connect_drafting()
        return True

    def settle(self) -> None:
        """At the end of a launch: `agree` where no pass of the target has run since a stage."""
        if self.ranks is not None and self._attempted:
            self.ranks.exchange_notices()
            self.agree()

    def _cause(self, ranks: Ranks) -> Exception:
        if self._error is not None and ranks.notices[ranks.rank] & _OWN:
            if ranks.rank and not self._told:  # rank 0's engine tells and counts
                self._told = True
                logger.warning("on rank %d of %d the drafter failed", ranks.rank, ranks.size, exc_info=self._error)
            return self._error
        first = next((rank for rank, notice in enumerate(ranks.notices) if notice & _OWN), None)
        if first is None:  # connections are lost, and the next exchange tells of whom
            assert self._error is not None
            return self._error
        return EngineError(f"it failed on rank {first} of {ranks.size}, which has logged how")
