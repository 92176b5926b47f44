"""Finds stop strings in the content of a message. Handles no tokens and parses no text.

Reasoning and tool calls may contain a stop string. Only one in the content ends the completion.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrs.server.parsers.base import Content, Event


class ContentStops:
    """Finder of stop strings in the content of a completion. A stop string that a tool call interrupts does not
    count."""

    def __init__(self, strings: Sequence[str], *, include: bool) -> None:
        """Create a finder of the stop strings `strings`. With `include`, the content ends after the stop string,
        otherwise before it."""
        self.found: str | None = None
        """Stop string that ended the content. None: none was found yet."""
        self.active = True
        """Set by the caller. False: a stop string that the next text completes does not count, as before
        `min_tokens`."""
        self._strings = strings
        self._include = include
        self._longest = max(map(len, strings), default=1)
        self._pieces: list[str] = []
        # positions count characters from the start of the content
        self._length = 0
        self._begin = 0  # of the content since the last call
        self._told = 0
        self._window = ""  # the end of the content: what is not sent yet, and what may be a part of a stop string
        self._window_start = 0

    @property
    def content(self) -> str:
        """Content of the message so far, including the stop string."""
        return "".join(self._pieces)[: self._length]

    def filter(self, events: Sequence[Event], *, final: bool) -> list[Event]:
        """Return the events that may be sent: content up to the stop string, and nothing after it. Mutates this finder.

        Text that may be the beginning of a stop string is held back, unless `final` says that no more text follows.
        """
        told: list[Event] = []
        for event in events:
            if self.found is not None:
                break
            if isinstance(event, Content):
                told += self._add(event.text)
            else:
                told += self._tell(self._length)
                told.append(event)
                self._begin = self._length
        if final and self.found is None:
            told += self._tell(self._length)
        return told

    def _add(self, text: str) -> list[Event]:
        before = self._length
        self._pieces.append(text)
        self._length += len(text)
        kept = max(before - self._told, self._longest - 1)
        self._window = self._window[-kept:] + text if kept else text
        self._window_start = self._length - len(self._window)
        if self.active:
            places = []
            for i, stop in enumerate(self._strings):
                first = max(self._begin, before + 1 - len(stop)) - self._window_start
                place = self._window.find(stop, max(0, first))
                if place >= 0:
                    places.append((place + len(stop), place, i))
            if places:
                # the one that ends first; among those the longest
                end, place, i = min(places)
                self.found, self._length = self._strings[i], self._window_start + end
                return self._tell(self._window_start + (end if self._include else place))
        return self._tell(self._length - self._held())

    def _held(self) -> int:
        """Return the number of characters at the end of the content that are held back, because they may begin a stop
        string."""
        if self._include:
            return 0
        longest = min(self._longest - 1, self._length - self._begin)
        ends = (self._window[-n:] for n in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._strings)), 0)

    def _tell(self, end: int) -> list[Event]:
        if end <= self._told:
            return []
        text = self._window[self._told - self._window_start : end - self._window_start]
        self._told = end
        return [Content(text)]
