"""What each token adds to a text, and where it begins there, in characters. Generates nothing."""

from __future__ import annotations

from collections.abc import Sequence

from specrs.core import Output, TokenDecoder
from specrs.tokenizer import Tokenizer

_CONTEXT = 8
"""Tokens before a text that the decoder looks at."""
_LONG = 1000
"""Characters of a text that are kept; what is before them changes nothing that follows."""
_SKIPPED = 8
"""Characters of a prompt that a token may be searched in, where a normalizer has changed those before it."""


class TokenPieces:
    """The text that each token of a completion adds, as tokens come.

    A token that ends within a character adds nothing; the token that completes the character adds it.
    """

    def __init__(
        self, decoder: TokenDecoder | None, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        """`prompt_token_ids`: what the completion follows on. `decoder`: None for no text."""
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._size = 0  # of the text that `_output` has, in characters
        self._last: list[int] = []  # tokens, each of which added whole characters
        self._restart(prompt_token_ids)

    def add(self, token_id: int) -> str:
        """What the next token adds. Mutates."""
        self._output.append([token_id])
        text = self._output.text
        piece, self._size = text[self._size :], len(text)
        self._last = [*self._last[1 - _CONTEXT :], token_id] if piece and "\ufffd" not in piece else []
        if self._size > _LONG and len(self._last) == _CONTEXT:
            self._restart(self._last)
        return piece

    def _restart(self, context: Sequence[int]) -> None:
        """Go on after `context`, whose text is not kept: to read all text after each token takes quadratic time."""
        self._output = Output(0, context, decoder=self._decoder, skip_special_tokens=self._skip_special_tokens)
        self._size = 0


class TextOffsets:
    """Where each token of a completion begins: the number of characters of the text before it."""

    def __init__(self, pieces: TokenPieces, start: int) -> None:
        """`start`: characters before the completion, those of a prompt that is part of the text."""
        self._pieces = pieces
        self._next = start
        self._offsets: list[int] = []

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of all tokens so far, `[len(token_ids)]`, of which the last call's are known. Mutates."""
        for token_id in token_ids[len(self._offsets) :]:
            self._offsets.append(self._next)
            self._next += len(self._pieces.add(token_id))
        return self._offsets


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Where each token of a prompt begins in its text, `[len(token_ids)]`.

    Special tokens that the text does not show, such as a BOS token, have no width. Where a normalizer has changed the
    text, a token begins where its own text next occurs.
    """
    decoded = TokenPieces(tokenizer.decoder, (), skip_special_tokens=False)
    pieces = [decoded.add(token_id) for token_id in token_ids]
    special = set(tokenizer.hf.all_special_ids)
    first = next((i for i, token_id in enumerate(token_ids) if token_id not in special), None)
    if first is not None and _leading_spaces("".join(pieces[first:])) > _leading_spaces(text):
        pieces[first] = pieces[first].removeprefix(" ")  # sentencepiece puts one before a text
    offsets, end = [], 0
    for token_id, piece in zip(token_ids, pieces, strict=True):
        skipped = 0 if token_id in special else _SKIPPED
        place = text.find(piece, end, end + len(piece) + skipped)
        offsets.append(end if place < 0 else place)
        end = end if place < 0 else place + len(piece)
    return offsets


def _leading_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))
