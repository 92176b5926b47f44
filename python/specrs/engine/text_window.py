"""The text that each token adds to an output, at a cost that does not grow with the output."""

from __future__ import annotations

from collections.abc import Sequence

from specrs.core import Output, TokenDecoder

_LONG = 1000
"""Characters after which the text is dropped: `Output` copies all of its text each time it is read."""
_CONTEXT = 8
"""Tokens before an output that the detokenizer reads (`rust/text`), to tell whether it begins with a blank."""
_NEVER = 2**31 - 1
"""`min_tokens` with which a stop string ends nothing; its beginning is held back all the same."""


class TextWindow:
    """The end of a text that grows token by token.

    A token that ends within a character adds nothing; the token that completes the character adds it. Text that may
    become a stop string is held back until it is clear that it does not.
    """

    def __init__(
        self,
        decoder: TokenDecoder | None,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        stop: Sequence[str] = (),
    ) -> None:
        """Start after a prompt, whose last tokens decide whether the text begins with a blank.

        Args:
            decoder: the tokenizer's; None for no text.
            prompt_token_ids: what the text follows.
            skip_special_tokens: whether special tokens have no text.
            stop: strings whose beginnings are held back. None of them ends the text.
        """
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._stop = list(stop)
        self._size = 0  # of the text that was returned, in characters
        self._open: list[int] = []  # tokens since the last one that completed a character
        self._whole: list[list[int]] = []  # the last two runs of tokens that are whole characters
        self._output = self._after(prompt_token_ids[-_CONTEXT:])

    def add(self, token_id: int) -> str:
        """Return what the next token adds. Mutates."""
        self._output.append([token_id])
        text = self._output.stable_text if self._stop else self._output.text
        piece, self._size = text[self._size :], len(text)
        self._open.append(token_id)
        if not piece:
            return piece
        # after invalid bytes, the decoder may still hold some of them back
        self._whole = [] if "\ufffd" in piece else [*self._whole[-1:], self._open]
        self._open = []
        if self._size > _LONG and len(self._whole) == 2 and self._nothing_held():
            self._output = self._after([token for tokens in self._whole for token in tokens])
            self._size, self._whole = 0, []
        return piece

    def _nothing_held(self) -> bool:
        return not self._stop or self._size == len(self._output.text)

    def _after(self, context: Sequence[int]) -> Output:
        """An output without text that follows `context`, tokens that end with a character."""
        return Output(
            0,
            context,
            decoder=self._decoder,
            skip_special_tokens=self._skip_special_tokens,
            stop=self._stop,
            min_tokens=_NEVER,
        )
