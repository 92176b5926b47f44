"""Grammar masks of the entries of a launch: what each row may write after its drafts. Compiles and commits nothing.

The matcher lives on the host, so a launch with grammars reads each drafted token back (chained, at depth 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from specrs.structured.matcher import GrammarMatcher

_ALL_ALLOWED = -1  # every bit of an int32 word


class LaunchGrammar:
    """Masks for B entries and K + 1 rows each; row i is valid once `observe` has seen the entry's first i drafts."""

    def __init__(self, matchers: Sequence[GrammarMatcher | None], max_k: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._words = np.full((len(matchers), max_k + 1, -(-vocab_size // 32)), _ALL_ALLOWED, dtype=np.int32)
        self._matchers = list(matchers)
        self._drafted = [0] * len(matchers)
        self._dead = [matcher is None for matcher in matchers]  # no mask from here on
        for entry, matcher in enumerate(matchers):
            if matcher is not None:
                matcher.fill_mask(self._words[entry, 0])

    def observe(self, row: int, tokens: Tensor, live: Tensor) -> None:
        """Advance over the drafts `[count]` of pass `row`, and fill mask row `row`; `live` marks true drafts.

        Behind a draft that the grammar forbids everything is allowed: verification rejects that draft, so those rows
        are never reached.
        """
        for entry, (token, is_draft) in enumerate(zip(tokens.tolist(), live.tolist(), strict=True)):
            matcher = self._matchers[entry]
            if self._dead[entry] or matcher is None:
                continue
            if not is_draft or not matcher.accept(token):
                self._dead[entry] = True
                continue
            self._drafted[entry] += 1
            matcher.fill_mask(self._words[entry, row])

    def finish(self) -> None:
        """Take the drafts back: only what is settled stays accepted."""
        for matcher, drafted in zip(self._matchers, self._drafted, strict=True):
            if matcher is not None and drafted:
                matcher.rollback(drafted)

    def forbidden(self, entries: Tensor, offsets: Tensor) -> Tensor:
        """`[N, V]` bool, true where row `offsets` of `entries` (both `[N]` int64) may not write the token."""
        from specrs.structured.matcher import unpack_mask

        return unpack_mask(torch.from_numpy(self._words)[entries, offsets], self.vocab_size)
