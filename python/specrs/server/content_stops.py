"""Stop strings in the content of a message. Knows no token and no parser.

Reasoning and calls may hold a stop string; it ends a completion only where the content has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrs.server.parsers.base import Content, Event


class ContentStops:
    """Looks for stop strings in contents. One that a call interrupts is none."""

    def __init__(self, strings: Sequence[str], *, include: bool) -> None:
        """`include`: the content ends after the stop string, not before it."""
        self.found: str | None = None
        """The stop string that ended the content."""
        self.active = True
        """Whether text that comes now may complete a stop string."""
        self.content = ""
        """All content so far, with the stop string."""
        self._strings = strings
        self._include = include
        self._begin = 0  # of the content since the last call
        self._told = 0

    def filter(self, events: Sequence[Event], *, final: bool) -> list[Event]:
        """The events that may be told: content up to the stop string, and nothing after it. Mutates.

        What may become a stop string is held back; `final`: no more will come.
        """
        told: list[Event] = []
        for event in events:
            if self.found is not None:
                break
            if isinstance(event, Content):
                told += self._add(event.text)
            else:
                told += self._tell(len(self.content))
                told.append(event)
                self._begin = len(self.content)
        if final and self.found is None:
            told += self._tell(len(self.content))
        return told

    def _add(self, text: str) -> list[Event]:
        before = len(self.content)
        self.content += text
        if self.active:
            places = []
            for i, stop in enumerate(self._strings):
                place = self.content.find(stop, max(self._begin, before + 1 - len(stop)))
                if place >= 0:
                    places.append((place + len(stop), place, i))
            if places:
                # the one that ends first; among those the longest
                end, place, i = min(places)
                self.found, self.content = self._strings[i], self.content[:end]
                return self._tell(end if self._include else place)
        return self._tell(len(self.content) - self._held())

    def _held(self) -> int:
        """Characters at the end that may begin a stop string."""
        if self._include:
            return 0
        longest = min(max(map(len, self._strings)) - 1, len(self.content) - self._begin)
        ends = (self.content[-n:] for n in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._strings)), 0)

    def _tell(self, end: int) -> list[Event]:
        text = self.content[self._told : end]
        self._told = max(self._told, end)
        return [Content(text)] if text else []
