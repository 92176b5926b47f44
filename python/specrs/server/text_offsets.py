"""Computes where each token begins in a text, in characters. Generates nothing."""

from __future__ import annotations

from collections.abc import Sequence

from specrs.engine.text_window import TextWindow
from specrs.tokenizer import Tokenizer

_SKIPPED = 8
"""Maximum number of characters of a prompt that are searched for a token's text, if a normalizer has changed the text
before."""


class TextOffsets:
    """Offsets of a completion's tokens: the number of characters of the text before each of them."""

    def __init__(self, window: TextWindow, start: int) -> None:
        """Start at the first token. `start` is the number of characters before the completion, if the text includes the
        prompt."""
        self._window = window
        self._next = start

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens, `[len(token_ids)]`. Mutates."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._next)
            self._next += len(self._window.add(token_id))
        return offsets


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Return where each token of a prompt begins in its text, `[len(token_ids)]`.

    Special tokens that the text does not show, such as a BOS token, have no width. If a normalizer has changed the
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
