"""A grammar as a small automaton over token ids, with the interface of `specrs.structured`. Holds no tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Automaton:
    """Stand-in for a `Grammar`: a table of states with the token ids that each allows. State 0 is the start."""

    following: tuple[dict[int, int], ...]
    """For each state, the tokens that may come next and the states that they lead to."""
    complete: frozenset[int]
    """States in which the text may end."""

    def matcher(self, stop_ids: Sequence[int]) -> AutomatonMatcher:
        """Return a new matcher at the start state, as `Grammar.matcher` does."""
        return AutomatonMatcher(self, frozenset(stop_ids))

    def allowed(self, tokens: Sequence[int], stop_ids: frozenset[int]) -> set[int]:
        """Return the tokens that may follow `tokens`, which contain no stop id."""
        state = 0
        for token in tokens:
            state = self.following[state][token]
        return {*self.following[state], *(stop_ids if state in self.complete else ())}


class AutomatonMatcher:
    """Stand-in for a `GrammarMatcher`: has its methods and follows an `Automaton`."""

    def __init__(self, automaton: Automaton, stop_ids: frozenset[int]) -> None:
        self.error: str | None = None
        self._automaton, self._stop_ids = automaton, stop_ids
        self._states: list[int | None] = [0]  # None: the text has ended

    def fill_mask(self, out: NDArray[np.int32]) -> None:
        """Write the tokens that may come next as bits into `out`, as `GrammarMatcher.fill_mask` does."""
        state, allowed = self._states[-1], self._stop_ids
        if state is not None:
            following = self._automaton.following[state]
            allowed = frozenset(following) | (self._stop_ids if state in self._automaton.complete else frozenset())
        bits = np.zeros(len(out) * 32, dtype=np.uint8)
        bits[sorted(allowed)] = 1
        out[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def drafts(self, most: int) -> list[int]:
        """Return up to `most` tokens, each the only one that may come next. Stop where the text may end, or where
        several tokens may come. Stands in for `GrammarMatcher.drafts`."""
        state, forced = self._states[-1], list[int]()
        while state is not None and state not in self._automaton.complete and len(forced) < most:
            following = self._automaton.following[state]
            if len(following) != 1 or self._stop_ids.intersection(following):
                break
            [(token, state)] = following.items()
            forced.append(token)
        return forced

    def accept(self, token_id: int) -> bool:
        """Advance by a token. Return False without a change if it may not come next. Stands in for
        `GrammarMatcher.accept`."""
        state = self._states[-1]
        if token_id in self._stop_ids:
            if state not in (None, *self._automaton.complete) and token_id not in self._automaton.following[state]:
                return False
            self._states.append(None)
            return True
        if state is None or token_id not in self._automaton.following[state]:
            return False
        self._states.append(self._automaton.following[state][token_id])
        return True

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, as `GrammarMatcher.rollback` does."""
        del self._states[len(self._states) - num_tokens :]
