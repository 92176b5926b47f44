"""Grammar masks for the sequences of a step: the tokens that each row may have after its drafts. Compiles no grammar.

The matcher lives on the host, so a step with grammars reads each drafted token back (chained, at depth 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrs.parallel.ranks import Ranks
from specrs.structured.matcher import ALL_ALLOWED, GrammarCursor, GrammarMatcher
from specrs.structured.torch_masks import unpack_mask
from specrs.transfer import to_device


@dataclass(frozen=True, slots=True)
class PackedMasks:
    """Masks of those of N flat rows whose sequences have a grammar, as words on the device."""

    rows: Tensor
    """[G] int64, ascending flat rows, in host memory."""
    words: Tensor
    """[G, words(V)] int32, bit i of word j is 1 if id 32 j + i is allowed."""
    vocab_size: int

    def forbidden(self, part: slice) -> Tensor:
        """Return `[rows of part, V]` bool on the device, True for tokens that a flat row must not have. Rows without
        grammar may have all."""
        first, last = torch.searchsorted(self.rows, torch.tensor((part.start, part.stop))).tolist()
        device = self.words.device
        out = torch.zeros((part.stop - part.start, self.vocab_size), dtype=torch.bool, device=device)
        if first < last:
            at = to_device(self.rows[first:last] - part.start, device)
            out.index_copy_(0, at, unpack_mask(self.words[first:last], self.vocab_size))
        return out


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
        vocab_size: int,
        ranks: Ranks | None = None,
    ) -> None:
        """Write the first masks. `masks` `[B, K+1, words(vocab_size)]` is mutated, here and by `observe`.

        `matchers` has None for sequences without grammar, for which `has_grammar` is False. Of several `ranks`, rank 0
        alone has matchers, and sends its masks to the others.
        """
        self.vocab_size = vocab_size
        self._has_grammar = torch.tensor(has_grammar)
        self._ranks = ranks
        self._words = masks
        masks[np.asarray(has_grammar)] = ALL_ALLOWED
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
        # One copy, because the host waits for each.
        both = torch.stack((tokens, live.to(tokens.dtype))).tolist()
        for cursor, token, is_draft in zip(self._cursors, *both, strict=False):
            if cursor is not None and is_draft:
                cursor.advance(token)

    def finish(self) -> None:
        """Take the drafts out of the grammars, which keep settled tokens only."""
        for cursor in self._cursors:
            if cursor is not None:
                cursor.finish()

    def masks(self, sequences: Tensor, offsets: Tensor, device: torch.device) -> PackedMasks:
        """Return the masks of flat rows: of row `offsets[i]` of sequence `sequences[i]`, both `[N]` int64 in host
        memory. Only words of sequences with a grammar are copied to `device`."""
        rows = self._has_grammar[sequences].nonzero().flatten()
        words = torch.from_numpy(self._words)[sequences[rows], offsets[rows]]
        if self._ranks is not None:
            words = self._ranks.take_first(words)
        return PackedMasks(rows, to_device(words, device), self.vocab_size)
