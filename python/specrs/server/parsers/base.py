"""Base of the tool call parsers: their events, and a buffer for text that arrives in pieces. Knows no format.

Other serving projects have such parsers, too (vLLM and SGLang in Python, smg and Dynamo in Rust). Each is tied to its
own tokenizer and request types; the parsers here read only text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Event: text that belongs to no tool call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Event: a tool call begins. `Arguments` events that follow belong to it, until the next call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Event: a piece of a call's arguments. Together they are JSON text, as far as the model wrote JSON."""

    text: str


Event: TypeAlias = Content | CallStart | Arguments


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a request offers. `parameters`: a JSON schema. `place`: the field of the request that has it."""

    name: str
    parameters: dict[str, Any]
    place: str = "tools"


class ToolParser(ABC):
    """Reads the text of one completion in pieces.

    However the text is cut into pieces, the contents add up to the same text, and the calls are the same, with the same
    arguments. What begins like a call and is none becomes content; so does a call of a function that is not offered.
    White space next to calls is dropped. Arguments that the text ends in are given out as far as they are written.
    """

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        """Start with an empty buffer. `functions` are those that the request offers. If there are none, any name counts
        as a function."""
        self._functions = {function.name: function for function in functions}
        self._buffer = ""  # read, and not yet decided on
        self._space = ""  # white space at the end of the content, dropped where a call follows
        self._events: list[Event] = []
        self._called = False

    def feed(self, text: str) -> list[Event]:
        """Read `text`, which follows what was fed before, and return the new events."""
        self._buffer += text
        while self._step(final=False):
            continue
        return self._take_events()

    def finish(self) -> list[Event]:
        """Return the last events, now that the text has ended."""
        while self._step(final=True):
            continue
        if not self._called and self._space:
            self._events.append(Content(self._space))
        self._space = ""
        return self._take_events()

    @abstractmethod
    def _step(self, *, final: bool) -> bool:
        """Interpret a part of the buffer and remove it. Return False if that needs more text. `final` says that no more
        follows.

        A decision must not depend on where the buffer ends, unless `final`.
        """

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _say(self, text: str) -> None:
        """Add an event that `text` is content."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._events.append(Content(kept))

    def _offers(self, name: str) -> bool:
        """Return True if the function `name` may be called. Parsers check it before they call `_call`."""
        return not self._functions or name in self._functions

    def _call(self, name: str) -> None:
        """Add an event that a call of `name` begins."""
        self._called, self._space = True, ""
        self._events.append(CallStart(name))

    def _argue(self, text: str) -> None:
        """Add an event that `text` is the next piece of the call's arguments."""
        if text:
            self._events.append(Arguments(text))

    def _take_until(self, *markers: str, final: bool) -> tuple[str, str | None]:
        """Remove the text before the first of `markers`, and the marker, from the buffer. Return both. Without a
        marker, return the text that cannot belong to one, and None."""
        text, marker, self._buffer = split_at(self._buffer, *markers, final=final)
        return text, marker

    def _skip_space(self) -> None:
        self._buffer = self._buffer.lstrip()

    def _starts_with(self, marker: str, *, final: bool) -> bool | None:
        """Return whether the buffer begins with `marker`. None if that depends on text to come."""
        if self._buffer.startswith(marker):
            return True
        return None if not final and marker.startswith(self._buffer) else False

    def _skip_marker(self, marker: str, *, final: bool) -> bool:
        """Remove white space and, if it follows, `marker` from the buffer. Return False if the marker may still follow
        in text to come.

        If the text ends inside `marker`, the part of it is removed too, because a token limit cut it off.
        """
        self._skip_space()
        if final and marker.startswith(self._buffer):
            self._buffer = ""
        follows = self._starts_with(marker, final=final)
        if follows:
            self._buffer = self._buffer[len(marker) :]
        return follows is not None


def split_at(text: str, *markers: str, final: bool) -> tuple[str, str | None, str]:
    """Return the text before the first of `markers`, that marker, and the text after it.

    If there is no marker, the marker is None, and the last text is the end of the text that may be the beginning of
    one; it is empty if `final`. No marker may begin inside another.
    """
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    if found:
        place, marker = min(found)
        return text[:place], marker, text[place + len(marker) :]
    held = 0
    if not final:
        tail = text[-max(map(len, markers)) + 1 :]
        starts = [i for marker in markers if (i := _start_of(marker, tail)) >= 0]
        held = len(tail) - min(starts) if starts else 0
    return text[: len(text) - held], None, text[len(text) - held :]


def _start_of(marker: str, tail: str) -> int:
    """Return the first place from which `tail` is the beginning of `marker`, but not all of it; -1 without one."""
    place = tail.find(marker[0])
    while place >= 0 and not (len(tail) - place < len(marker) and marker.startswith(tail[place:])):
        place = tail.find(marker[0], place + 1)
    return place
