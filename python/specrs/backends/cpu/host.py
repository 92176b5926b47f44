"""Callbacks of CPU steps into Python: grammar masks, text of another tokenizer, and agreement among ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specrs.backends.extras import ExtrasLookup, no_extras
from specrs.backends.ring import RingSlot
from specrs.core import SAMPLING_STEPS
from specrs.drafters.other_tokenizer.text import Bridge
from specrs.errors import EngineError
from specrs.parallel.connection import ExchangeError
from specrs.structured.matcher import ALL_ALLOWED, GrammarCursor

if TYPE_CHECKING:
    from specrs.parallel.ranks import Ranks  # and torch

logger = logging.getLogger("specrs")
_EXTRAS = 1 << SAMPLING_STEPS.index("extras")
_FAILED, _FAILED_HERE = 1, 2
"""Bits of the notice that a rank sends after a stage of its drafter. First: the drafter failed. Second: the cause is on
the sending rank itself, and not a lost connection."""


class StepHost:
    """Callbacks of one runner's steps, as `specrs._core._StepHost`."""

    def __init__(self, vocab_size: int, bridge: Bridge | None = None, ranks: Ranks | None = None) -> None:
        """Prepare the callbacks. `bridge` converts between the texts of target and draft model if their tokenizers
        differ. Of several `ranks`, rank 0 alone has grammars, and sends their masks to the others."""
        self.extras: ExtrasLookup = no_extras
        self.cause: Exception | None = None
        """Exception of the drafter in the current step, if ranks agreed that it failed."""
        self._num_words = -(-vocab_size // 32)
        self._bridge = bridge
        self._ranks = ranks
        self._requests: dict[int, int] = {}  # by state row, of requests with a grammar
        self._cursors: dict[int, GrammarCursor] = {}
        self._rest: dict[int, Iterator[NDArray[np.int32]]] = {}
        self._masks: NDArray[np.int32] | None = None
        self._stage = contextlib.ExitStack()
        self._has_logged = False

    @property
    def has_ranks(self) -> bool:
        """True if other ranks run the same steps."""
        return self._ranks is not None

    def admit(self, record: Mapping[str, NDArray[np.int64]], num_admitted: int) -> None:
        """Remember which of the admitted rows have requests with a grammar."""
        columns = (record[name][:num_admitted].tolist() for name in ("admit_row", "admit_request_id", "admit_steps"))
        for row, request_id, steps in zip(*columns, strict=True):
            if steps & _EXTRAS:
                self._requests[row] = request_id
            else:
                self._requests.pop(row, None)

    def begin(self, slot: RingSlot, rows: NDArray[np.int64]) -> StepHost | None:
        """Begin the step in `slot` over the state rows `rows`. Return None if the step needs no callbacks."""
        self.cause = None
        has_grammars = bool(self._requests) and not self._requests.keys().isdisjoint(rows.tolist())
        if has_grammars:
            count, width = slot.tokens.shape
            self._masks = slot.grammar_masks(0, count, width, self._num_words)
        return self if has_grammars or self._bridge is not None or self._ranks is not None else None

    def finish(self) -> None:
        """End the step: remove the drafts from the grammars, so that these have only settled tokens."""
        for cursor in self._cursors.values():
            cursor.finish()
        self._cursors.clear()
        self._rest.clear()

    def start_grammar(self, index: int, row: int) -> NDArray[np.int32]:
        """Return the mask `[ceil(V / 32)]` of the next token of sequence `index`, whose request is in `row`.

        Raises:
            EngineError: the request's grammar is not known. A record alone cannot be replayed then.
        """
        assert self._masks is not None
        masks = self._masks[index]
        self._rest[index] = iter(masks)
        if self._ranks is None or self._ranks.rank == 0:
            extras = self.extras(self._requests[row])
            if extras is None:
                message = f"request {self._requests[row]}: the step needs its extras, which are in no record"
                raise EngineError(message)
            cursor = self._cursors[index] = GrammarCursor(extras.matcher, masks)
            cursor.start()
        else:
            masks.fill(ALL_ALLOWED)
        return self._next_mask(index)

    def advance_grammar(self, index: int, token: int) -> NDArray[np.int32]:
        """Return the mask of the token after the next draft `token` of sequence `index`."""
        if index in self._cursors:
            self._cursors[index].advance(token)
        return self._next_mask(index)

    def _next_mask(self, index: int) -> NDArray[np.int32]:
        mask = next(self._rest[index])
        return mask if self._ranks is None else self._ranks.take_first_array(mask)

    def draft_ids(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the draft model's ids of the text whose ids for the target are `tokens`: see `Bridge.own_ids`."""
        assert self._bridge is not None
        return np.array(self._bridge.own_ids(tokens.tolist()), dtype=np.int64)

    def target_ids(
        self, tokens: NDArray[np.int64], own: NDArray[np.int64], drafted: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the target's ids for `drafted`, ids that the draft model generated: see `Bridge.target_ids`."""
        assert self._bridge is not None
        found = self._bridge.target_ids(tokens.tolist(), own.tolist(), drafted.tolist())
        return np.array(found, dtype=np.int64)

    def enter(self, stage: int) -> None:
        """Begin a stage of the drafter. It exchanges data over separate connections, which may be replaced if it
        fails."""
        assert self._ranks is not None
        self._stage.enter_context(self._ranks.drafting())

    def leave(self, stage: int, error: Exception | None) -> bool:
        """End a stage of the drafter. `error` is its exception on this rank, None if it succeeded.

        Returns True if the drafter failed on any rank; its connections are then replaced. Raises ExchangeError if a
        rank is lost.
        """
        assert self._ranks is not None
        with contextlib.suppress(Exception):  # the error itself comes back
            self._stage.__exit__(type(error) if error else None, error, None)
        notice = 0
        if error is not None:
            notice = _FAILED if isinstance(error, ExchangeError) else _FAILED | _FAILED_HERE
        notices = self._ranks.gather_numbers(notice)
        if not any(notices):
            return False
        self.cause = self._cause(self._ranks, notices, error)
        self._ranks.connect_drafting()
        return True

    def _cause(self, ranks: Ranks, notices: list[int], error: Exception | None) -> Exception:
        """Return the exception to report for a failed stage: this rank's own, or one that names the rank that
        failed."""
        if error is not None and notices[ranks.rank] & _FAILED_HERE:
            if ranks.rank and not self._has_logged:  # rank 0's engine reports and counts
                self._has_logged = True
                logger.warning("on rank %d of %d the drafter failed", ranks.rank, ranks.size, exc_info=error)
            return error
        first = next((rank for rank, notice in enumerate(notices) if notice & _FAILED_HERE), None)
        if first is None:  # connections are lost, and the next exchange reports to which rank
            assert error is not None
            return error
        return EngineError(f"it failed on rank {first} of {ranks.size}, which has logged how")
