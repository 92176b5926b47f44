"""Learns how texts of one grammar are laid out: which tokens of punctuation and white space follow which. Knows no
grammar and checks nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

CHARACTERS = frozenset(b'{}[]():,"\n\r\t ')
"""Bytes that layout consists of."""
CONTEXT = 2
"""Number of tokens that a guess is made from, at most."""


class Layout:
    """Memory of the layout (white space and punctuation) in earlier outputs of a grammar.

    A schema leaves white space free, and a model writes it the same way each time: `",` and a new line, then two blanks
    and a quote. Only tokens of layout are kept, so that no other content of a text is.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """Start without memory. `bytes_of` returns the bytes of a token."""
        self._bytes_of = bytes_of
        self._known: dict[int, bool] = {}  # whether a token is layout
        # What followed one or two tokens of layout, and all that was seen: the latest comes last.
        self._following: dict[tuple[int, ...], dict[int, None]] = {}
        self._seen: dict[int, None] = {}

    def learn(self, tokens: Sequence[int], first: int) -> None:
        """Learn from `tokens[first:]`, each after the tokens before it."""
        for i in range(first, len(tokens)):
            if not self._is_layout(tokens[i]):
                continue
            _put_last(self._seen, tokens[i])
            for start in range(i - 1, max(i - CONTEXT, 0) - 1, -1):
                if not self._is_layout(tokens[start]):
                    break
                _put_last(self._following.setdefault(tuple(tokens[start:i]), {}), tokens[i])

    def guesses(self, before: Sequence[int]) -> Iterable[int]:
        """Return the tokens that followed the end of `before`: those after more equal tokens first, then the latest."""
        for length in range(min(CONTEXT, len(before)), 0, -1):
            yield from reversed(self._following.get(tuple(before[len(before) - length :]), {}))

    def latest(self) -> Iterator[int]:
        """Return all tokens of layout that were seen, the latest first."""
        return reversed(self._seen)

    def _is_layout(self, token: int) -> bool:
        known = self._known.get(token)
        if known is None:
            made_of = self._bytes_of(token)
            known = self._known[token] = bool(made_of) and CHARACTERS.issuperset(made_of)
        return known


def _put_last(tokens: dict[int, None], token: int) -> None:
    tokens.pop(token, None)
    tokens[token] = None
