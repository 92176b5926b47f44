"""Follows the text of one request through its grammar: masks of the next tokens, likely tokens, and rollback. Samples
nothing.

A mask is `[ceil(V / 32)]` int32. Token t may come next if and only if bit t % 32 of word t // 32 is set. If the grammar
leaves only one text, the mask allows only the tokenizer's own spelling of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specrs.errors import SpecrsError, invalid
from specrs.structured.layout import CONTEXT

if TYPE_CHECKING:
    from specrs.structured.compiler import Start

ALL_ALLOWED = -1
"""A mask word with every bit set."""


class GrammarMatcher:
    """State of a grammar after the tokens accepted so far. Use it from one thread at a time.

    An accepted stop id ends the text. From then on only stop ids are allowed, because a row past its end still writes
    tokens. A stop id that is also text, inside an incomplete text that could go on with it, is allowed and ends it,
    too.

    If the library gives up on a text (its limits for ambiguity and automata), `fill_mask` allows only stop ids,
    `accept` accepts no token, and `error` has the reason. A token that is rejected when a step settles ends the request
    with that reason.
    """

    def __init__(self, start: Start, vocab_size: int, stop_ids: Sequence[int], end_token_id: int) -> None:
        """Start before the first token. `start`: the compiled grammar. `end_token_id`: the library's own mark of a
        complete text."""
        self.stop_ids = frozenset(stop_ids)
        self.error: str | None = None
        """Reason why the library gave up in the last `fill_mask` or `accept`; None if it did not."""
        self._start = start
        self._library = start.copy()
        self._vocab_size = vocab_size
        self._end_token_id = end_token_id
        self._tokens: list[int] = []  # accepted by the library; what came after its end is only counted
        self._num_accepted = 0
        self._num_learned = 0  # of the tokens, by the layout
        self._ended_at: int | None = None  # num_accepted right after the first stop id
        size = max(vocab_size, end_token_id + 1)
        self._num_words = -(-vocab_size // 32)
        self._scratch = np.zeros(-(-size // 32), dtype=np.int32)  # the library's, with its end token
        self._scratch_address = self._scratch.ctypes.data
        self._stop_words = np.zeros(self._num_words, dtype=np.int32)
        for token_id in self.stop_ids:
            if not 0 <= token_id < vocab_size:
                raise invalid(SpecrsError, "stop_ids", token_id, f"must be from 0 to {vocab_size - 1}")
            self._stop_words[token_id // 32] |= _bit(token_id)

    @property
    def num_accepted(self) -> int:
        """Number of tokens that were accepted and not rolled back, stop ids included."""
        return self._num_accepted

    def fill_mask(self, out: NDArray[np.int32]) -> None:
        """Write the mask of the next token into `out`, `[ceil(V / 32)]` int32. At least one token is allowed."""
        if out.shape != (self._num_words,) or out.dtype != np.int32:
            raise invalid(
                SpecrsError, "out", (out.shape, str(out.dtype)), f"must be int32 of shape ({self._num_words},)"
            )
        if self._ended_at is not None or not self._library_mask(out):
            out[:] = self._stop_words

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, with the state unchanged, if it may not come next."""
        if self._ended_at is not None:
            if token_id not in self.stop_ids:
                return False
        elif token_id in self.stop_ids and self._library.is_accepting():
            self._ended_at = self._num_accepted + 1
        else:
            if not 0 <= token_id < self._vocab_size or token_id == self._end_token_id:
                return False
            if self._library.try_consume_tokens([token_id]) != 1 and not (
                self._recovered() and self._library.try_consume_tokens([token_id]) == 1
            ):
                self._give_up()
                return False
            self._tokens.append(token_id)
            if token_id in self.stop_ids:
                self._ended_at = self._num_accepted + 1
        self._num_accepted += 1
        return True

    def drafts(self, most: int) -> list[int]:
        """Return up to `most` tokens that are likely to come next. Leaves the state as it was.

        Tokens that must come because the grammar allows no others are among them. Where it leaves a choice of
        punctuation or white space, the token is the one that earlier texts of the grammar have there. A stop id comes
        last if the text must end there and the request has no other stop id. Learns the layout of the accepted tokens.
        """
        self._start.layout.learn(self._tokens, self._num_learned)
        self._num_learned = len(self._tokens)
        if self._ended_at is not None:
            return []
        drafts = list[int]()
        while len(drafts) < most:
            more = self._forced(most - len(drafts)) or self._guess(drafts)
            taken = self._library.try_consume_tokens(more)
            drafts += more[:taken]
            if not more or taken < len(more):
                break
        stopped = self._library.is_stopped()
        if self._recovered():
            return []
        if drafts and not self._library.rollback(len(drafts)):
            self._rebuild()
        if stopped and len(drafts) < most and len(self.stop_ids) == 1:
            drafts += self.stop_ids
        return drafts

    def _forced(self, most: int) -> list[int]:
        """Return up to `most` tokens that must come next, because the grammar allows no others."""
        found = self._library.compute_ff_tokens()
        return list(itertools.takewhile(lambda token: 0 <= token < self._vocab_size, found))[:most]

    def _guess(self, drafts: list[int]) -> list[int]:
        """Return the token that earlier texts have after `drafts`, if the grammar allows it; else none."""
        layout, before = self._start.layout, [*self._tokens[-CONTEXT:], *drafts]
        guesses: Iterable[int] = layout.guesses(before)
        if self._library.compute_ff_bytes():
            # Bytes must come, but not one token: a quote that ends a key, with the colon or without it.
            guesses = itertools.chain(guesses, layout.latest())
        for token in guesses:
            if self._library.validate_tokens([token]) == 1:
                return [token]
        return []

    def rollback(self, num_tokens: int) -> None:
        """Roll back the last `num_tokens` accepted tokens."""
        if not 0 <= num_tokens <= self._num_accepted:
            raise invalid(SpecrsError, "num_tokens", num_tokens, f"must be from 0 to num_accepted={self._num_accepted}")
        self._num_accepted -= num_tokens
        if self._ended_at is not None and self._num_accepted < self._ended_at:
            self._ended_at = None
        surplus = len(self._tokens) - self._num_accepted
        if surplus > 0:
            del self._tokens[self._num_accepted :]
            self._num_learned = min(self._num_learned, len(self._tokens))
            if not self._library.rollback(surplus):
                self._rebuild()

    def _library_mask(self, out: NDArray[np.int32]) -> bool:
        """Write the tokens that the grammar allows, and stop ids if the text is complete, into `out`. Return False if
        no token is allowed."""
        self._library.unsafe_compute_mask_ptr(self._scratch_address, self._scratch.nbytes)
        if self._recovered():
            self._library.unsafe_compute_mask_ptr(self._scratch_address, self._scratch.nbytes)
            if self._give_up():
                return False
        word, bit = self._end_token_id // 32, _bit(self._end_token_id)
        complete = bool(self._scratch[word] & bit)
        self._scratch[word] &= ~bit
        out[:] = self._scratch[: self._num_words]
        if complete:
            out |= self._stop_words
        if self._vocab_size % 32:
            out[-1] &= (1 << self._vocab_size % 32) - 1
        if not complete and not out.any():
            self.error = "no token of the vocabulary goes on with the text"
            return False
        return True

    def _recovered(self) -> bool:
        """Return True if the last call met a limit of the library and may be tried again.

        Other texts, or rejected drafts, may have filled the shared automata. With new automata, the outcome depends
        only on this text.
        """
        failed = self._library.is_error()
        if failed:
            self._rebuild()
        return failed

    def _give_up(self) -> bool:
        """Return True if the last call met a limit again. Its reason goes to `error`, and the state becomes that before
        the call."""
        failed = self._library.is_error()
        if failed:
            self.error = self._library.get_error().strip().partition("\n")[0]
            self._rebuild()
        return failed

    def _rebuild(self) -> None:
        """Read the text again from the start, because the library's error state has no way back."""
        self._library = self._start.renew()
        self._library.try_consume_tokens(self._tokens)


class GrammarCursor:
    """Masks for one decode iteration of one request: rows 0..K, row i after the drafts d_1..d_i.

    Call `start`, `advance` once per draft, and `finish`. Rows after a draft that is not allowed allow everything:
    verification rejects that draft, so they are never used.
    """

    def __init__(self, matcher: GrammarMatcher, rows: NDArray[np.int32]) -> None:
        """Prepare the iteration. `rows`: `[K + 1, ceil(V / 32)]` int32, a buffer of the caller that is written."""
        self._matcher = matcher
        self._rows = rows
        self._num_drafted = 0
        self._on_path = True

    def start(self) -> None:
        """Begin an iteration: write the mask after the committed tokens into row 0. Rows 1 to K, for the drafts, allow
        all tokens until `advance` writes them."""
        self._rows[1:] = ALL_ALLOWED
        self._matcher.fill_mask(self._rows[0])

    def advance(self, token_id: int) -> bool:
        """Add the next draft and write the mask of its row. Return False if the grammar does not allow this draft or an
        earlier one."""
        self._on_path = self._on_path and self._matcher.accept(token_id)
        if self._on_path:
            self._num_drafted += 1
            self._matcher.fill_mask(self._rows[self._num_drafted])
        return self._on_path

    def finish(self) -> None:
        """Roll the drafts back, so that the matcher is as before `start`."""
        self._matcher.rollback(self._num_drafted)
        self._num_drafted = 0
        self._on_path = False


def _bit(token_id: int) -> np.int32:
    """Return the bit of a token in its mask word. Bit 31 is the sign."""
    return np.uint32(1 << token_id % 32).view(np.int32)
