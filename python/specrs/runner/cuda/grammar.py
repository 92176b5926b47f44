"""Grammar masks of the entries of a launch: what each row may write after its drafts. Compiles and commits nothing.

The matcher lives on the host, so a launch with grammars reads each drafted token back (chained, at depth 1).
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


class LaunchGrammar:
    """Masks for B entries and K + 1 rows each; row i is valid once `observe` has seen the entry's first i drafts."""

    @staticmethod
    def words(vocab_size: int) -> int:
        """int32 elements of one mask."""
        return -(-vocab_size // 32)

    def __init__(
        self,
        matchers: Sequence[GrammarMatcher | None],
        masks: NDArray[np.int32],
        vocab_size: int,
        ranks: Ranks | None = None,
    ) -> None:
        """`masks` `[B, K+1, words(vocab_size)]` is written to, now and as drafts are observed. Of several `ranks` the
        first alone has matchers, and hands its masks to the others."""
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
        """Advance the first `count` entries over their drafts `[count]` of one pass; `live` marks true drafts."""
        for cursor, token, is_draft in zip(self._cursors, tokens.tolist(), live.tolist(), strict=False):
            if cursor is not None and is_draft:
                cursor.advance(token)

    def finish(self) -> None:
        """Take the drafts back: only what is settled stays accepted."""
        for cursor in self._cursors:
            if cursor is not None:
                cursor.finish()

    def forbidden(self, entries: Tensor, offsets: Tensor) -> Tensor:
        """`[N, V]` bool, true where row `offsets` of `entries` (both `[N]` int64) may not write the token."""
        words = torch.from_numpy(self._words)[entries, offsets]
        return unpack_mask(words if self._ranks is None else self._ranks.take_first(words), self.vocab_size)
