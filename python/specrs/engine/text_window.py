"""Computes the text that each token adds to an output. The cost does not grow with the output."""

from __future__ import annotations

from collections.abc import Sequence

from specrs.core import Output, TokenDecoder

_NEVER = 2**31 - 1
"""Value of `min_tokens` with which no stop string ends a text. Text that may be the beginning of a stop string is still
held back."""


class TextWindow:
    """End of a text that grows token by token.

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
        """Create an empty text after a prompt. The last tokens of the prompt decide whether the text begins with a
        blank.

        Args:
            decoder: the tokenizer's decoder; None for no text.
            prompt_token_ids: tokens before the text.
            skip_special_tokens: True if special tokens have no text.
            stop: strings whose beginnings are held back. They do not end the text.
        """
        self._end = 0  # of the text that was returned, in bytes
        self._output = Output(
            0,
            prompt_token_ids,
            decoder=decoder,
            skip_special_tokens=skip_special_tokens,
            stop=list(stop),
            min_tokens=_NEVER,
        )

    def add(self, token_id: int) -> str:
        """Append a token and return the text that it adds."""
        self._output.append([token_id])
        piece, self._end = self._output.stable_text_from(self._end)
        return piece
