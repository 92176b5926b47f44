"""Grammar masks for the sequences of a step: the tokens that each row may have after its drafts. Compiles no grammar.

The matcher lives on the host, so a step with grammars reads each drafted token back (chained, at depth 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrs.parallel.ranks import Ranks
from specrs.structured.matcher import ALL_ALLOWED, GrammarCursor, GrammarMatcher
from specrs.structured.torch_masks import unpack_mask


class StepGrammar:
    """Masks for B sequences, K + 1 rows each. Row i is valid once `observe` has seen the sequence's first i drafts."""

    @staticmethod
    def words(vocab_size: int) -> int:
        """Return the number of int32 elements of a mask."""
        return -(-vocab_size // 32)

    def __init__(
        self,
        matchers: Sequence[GrammarMatcher | None],
        masks: NDArray[np.int32],
        vocab_size: int,
        ranks: Ranks | None = None,
    ) -> None:
        """Write the first masks. `masks` `[B, K+1, words(vocab_size)]` is mutated, here and by `observe`.

        `matchers` has None for sequences without grammar. Of several `ranks`, rank 0 alone has matchers, and sends its
        masks to the others.
        """
        self.vocab_size = vocab_size
        self._ranks = ranks
        self._words = masks
        masks.fill(ALL_ALLOWED)
        self._cursors = [
            None if matcher is None else GrammarCursor(matcher, rows)
            for matcher, rows in zip(matchers, self._words, strict=True)
        ]
        for cursor in self._cursors:
            if cursor is not None:
                cursor.start()

    def observe(self, tokens: Tensor, live: Tensor) -> None:
        """Advance the grammars of the first sequences over their drafts `tokens` `[count]` of one pass. `live`
        `[count]` marks true drafts."""
        for cursor, token, is_draft in zip(self._cursors, tokens.tolist(), live.tolist(), strict=False):
            if cursor is not None and is_draft:
                cursor.advance(token)

    def finish(self) -> None:
        """Take the drafts out of the grammars, which keep settled tokens only."""
        for cursor in self._cursors:
            if cursor is not None:
                cursor.finish()

    def forbidden(self, sequences: Tensor, offsets: Tensor) -> Tensor:
        """Return `[N, V]` bool: True for tokens that row `offsets[i]` of sequence `sequences[i]` must not have. Both
        are `[N]` int64."""
        words = torch.from_numpy(self._words)[sequences, offsets]
        return unpack_mask(words if self._ranks is None else self._ranks.take_first(words), self.vocab_size)
