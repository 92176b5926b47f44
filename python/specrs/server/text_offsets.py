"""Where each token begins in a text, in characters. Generates nothing."""

from __future__ import annotations

from collections.abc import Sequence

from specrs.engine.text_window import TextWindow
from specrs.tokenizer import Tokenizer

_SKIPPED = 8
"""Characters of a prompt that a token may be searched in, where a normalizer has changed those before it."""


class TextOffsets:
    """Where each token of a completion begins: the number of characters of the text before it."""

    def __init__(self, window: TextWindow, start: int) -> None:
        """`start`: characters before the completion, those of a prompt that is part of the text."""
        self._window = window
        self._next = start

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the tokens that come next, `[len(token_ids)]`. Mutates."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._next)
            self._next += len(self._window.add(token_id))
        return offsets


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Where each token of a prompt begins in its text, `[len(token_ids)]`.

    Special tokens that the text does not show, such as a BOS token, have no width. Where a normalizer has changed the
    text, a token begins where its own text next occurs.
    """
    decoded = TextWindow(tokenizer.decoder, (), skip_special_tokens=False)
    pieces = [decoded.add(token_id) for token_id in token_ids]
    special = set(tokenizer.all_special_ids)
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
