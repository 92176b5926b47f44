"""Grammar masks for the sequences of a step: the tokens that each row may have after its drafts. Compiles no grammar.

The matcher lives on the host, so a step with grammars reads each drafted token back (chained, at depth 1). It is read
when the next pass is enqueued already, so the device does not wait for the matcher.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrs.parallel.ranks import Ranks
from specrs.structured.matcher import ALL_ALLOWED, GrammarCursor, GrammarMatcher
from specrs.transfer import to_device, to_host


class StepGrammar:
    """Masks for B sequences, K + 1 rows each. Row i is valid once `observe` has seen the sequence's first i drafts."""

    @staticmethod
    def words(vocab_size: int) -> int:
        """Return the number of int32 elements of a mask."""
        return -(-vocab_size // 32)

    def __init__(
        self,
        matchers: Sequence[GrammarMatcher | None],
        has_grammar: Sequence[bool],
        masks: NDArray[np.int32],
        ranks: Ranks | None = None,
    ) -> None:
        """Write the first masks. `masks` `[B, K+1, words(V)]` is mutated, now and when the grammars advance.

        `matchers` has None for sequences without grammar, for which `has_grammar` is False. Of several `ranks`, rank 0
        alone has matchers, and sends its masks to the others.
        """
        self._has_grammar = torch.tensor(has_grammar)
        self._ranks = ranks
        self._words = masks
        self._given: tuple[Tensor, torch.cuda.Event | None] | None = None  # drafts that were not advanced over
        masks[np.asarray(has_grammar)] = ALL_ALLOWED
        self._cursors = [
            None if matcher is None else GrammarCursor(matcher, rows)
            for matcher, rows in zip(matchers, self._words, strict=True)
        ]
        for cursor in self._cursors:
            if cursor is not None:
                cursor.start()

    def observe(self, tokens: Tensor, live: Tensor) -> None:
        """Take the drafts `tokens` `[count]` of one pass of the first sequences. `live` `[count]` marks true drafts.
        The grammars advance over them when a mask of a later row is asked for. Waits for nothing but drafts that were
        given before."""
        self._advance()
        # One copy for both.
        drafts, done = to_host(torch.stack((tokens, live.to(tokens.dtype)))), None
        if tokens.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        self._given = drafts, done

    def _advance(self) -> None:
        """Advance the grammars over the drafts that were given last. Waits until the device has drawn them."""
        if self._given is None:
            return
        (drafts, done), self._given = self._given, None
        if done is not None:
            done.synchronize()
        for cursor, token, is_draft in zip(self._cursors, *drafts.tolist(), strict=False):
            if cursor is not None and is_draft:
                cursor.advance(token)

    def finish(self) -> None:
        """Take the drafts out of the grammars, which keep settled tokens only."""
        self._given = None
        for cursor in self._cursors:
            if cursor is not None:
                cursor.finish()

    def masks(self, sequences: Tensor, offsets: Tensor, device: torch.device) -> Tensor:
        """Return the grammar masks `[G, words(V)]` int32 on `device` of N flat rows, for the G of them whose sequences
        have a grammar, in the order of the rows."""
        self._advance()
        rows = self._has_grammar[sequences].nonzero().flatten()
        words = torch.from_numpy(self._words)[sequences[rows], offsets[rows]]
        if self._ranks is not None:
            words = self._ranks.take_first(words)
        return to_device(words, device)
