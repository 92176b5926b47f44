"""Token ids to text as they come, and stop strings in it. Knows one request's output; no scheduling, no stop ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from specrs.sampling import SamplingParams
    from specrs.tokenizer import Tokenizer

_CONTEXT = 8
"""Prompt tokens that the decoder sees before the output: enough for its first word to get its space, or to lose it."""
_MAX_PENDING = 32
"""Tokens held back before what cannot become a character any more is given out; each step decodes all of them."""
_MAX_CHAR_TOKENS = 3
"""An unfinished UTF-8 character is at most three bytes, so at most three tokens."""


class IncrementalDetokenizer:
    """The text of one request's output, token by token.

    Text is what `decode` of all ids gives, except that a stop string ends it, and that the end of a stream of bytes
    which are no text may differ in its number of replacement characters. Bytes of an unfinished character are held back
    until it is complete, or until `finish`.

    A stop string counts if the token that completes it is at 0-based output index `min_tokens` or later. Where one
    token completes several, the one that ends first counts; among those, the longest.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        """The last few of `prompt_token_ids` are context for the decoder; their text is not part of the output."""
        self._backend = tokenizer.backend
        self._skip = params.skip_special_tokens
        self._stop = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._text = ""
        self._ended = False
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        self._shown: list[int] = []  # the ids of the last piece of text: the decoder's context
        self._pending: list[int] = []  # ids taken and not yet text
        for token in prompt_token_ids[-_CONTEXT:]:
            self._step(token)
        if self._pending:
            # The prompt ends within a character. Its bytes belong to the prompt's text, so the output starts afresh.
            self._restart([])

    @property
    def text(self) -> str:
        """All text so far; ends before a stop string, or after it with `include_stop_str_in_output`."""
        return self._text

    @property
    def stable_text(self) -> str:
        """The part of `text` that no further token can take back: a possible beginning of a stop string is left out."""
        if self._ended or self._keep_stop:
            return self._text
        return self._text[: len(self._text) - self._held_back()]

    def update(self, token_ids: Sequence[int]) -> tuple[int, str | None]:
        """Take new output ids; `(tokens taken, stop string that ended the text or None)`. Mutates.

        Tokens after the one that completes a stop string are not taken.
        """
        for taken, token in enumerate(token_ids, start=1):
            piece = self._step(token)
            self._num_tokens += 1
            if piece:
                stop = self._append(piece)
                if stop is not None:
                    return taken, stop
        return len(token_ids), None

    def finish(self) -> None:
        """End the text: bytes held back become replacement characters. Mutates; a second call changes nothing."""
        if self._ended:
            return
        self._ended = True
        if self._pending:
            self._text += self._flush(len(self._pending))

    def _append(self, piece: str) -> str | None:
        old = len(self._text)
        self._text += piece
        if not self._stop or self._num_tokens <= self._min_tokens:
            return None
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = self._text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                found = candidate if found is None else min(found, candidate)
        if found is None:
            return None
        end, start, stop = found
        self._text = self._text[: end if self._keep_stop else start]
        self._ended = True
        return stop

    def _held_back(self) -> int:
        """Length of the longest end of `text` that is a beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._text)), 0, -1):
            tail = self._text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _step(self, token: int) -> str | None:
        """Feed one id; the text that it completes, or None."""
        self._pending.append(token)
        try:
            piece = self._stream.step(self._backend, token)
        except Exception as fault:
            # Some decoders change text that they gave out before (byte fallback: an invalid run). tokenizers has one
            # exception type for all, so its message is all there is to tell.
            if "Invalid prefix" not in str(fault):
                raise
            return self._flush(len(self._pending))
        if piece is not None:
            self._shown, self._pending = self._pending, []
        elif len(self._pending) > _MAX_PENDING:
            return self._flush(len(self._pending) - _MAX_CHAR_TOKENS)
        return piece

    def _flush(self, count: int) -> str:
        """Give out the first `count` pending ids as they are, and go on behind them with a new stream."""
        head, tail = self._pending[:count], self._pending[count:]
        context = self._decode(self._shown)
        both = self._decode(self._shown + head)
        piece = both[len(context) :] if both.startswith(context) else self._decode(head)
        self._restart(head)
        for token in tail:
            piece += self._step(token) or ""
        return piece

    def _restart(self, shown: list[int]) -> None:
        """A new stream behind `shown`, which is not given out again."""
        self._shown, self._pending = shown, []
        # Of context that ends in a replacement character, DecodeStream would give out the text once more.
        context = [] if self._decode(shown).endswith("\ufffd") else shown
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip)

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=self._skip) if ids else ""
