"""What parsers of tool calls share: events, and text that is read piece by piece. Knows no format.

Serving projects have such parsers (vLLM's and SGLang's in Python, crates of smg and Dynamo), each tied to types
of tokenizers and requests of its own; these read text alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; what follows of `Arguments` is its own, until the next one begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments, which are JSON text as far as the model wrote JSON."""

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
        """`functions`: those that the request offers. Without any, every name is taken for a function's."""
        self._functions = {function.name: function for function in functions}
        self._buffer = ""  # read, and not yet decided on
        self._space = ""  # white space at the end of the content, dropped where a call follows
        self._events: list[Event] = []
        self._called = False

    def feed(self, text: str) -> list[Event]:
        """What `text`, which follows on what was fed before, shows."""
        self._buffer += text
        while self._step(final=False):
            continue
        return self._take_events()

    def finish(self) -> list[Event]:
        """What is left, now that the text has ended."""
        while self._step(final=True):
            continue
        if not self._called and self._space:
            self._events.append(Content(self._space))
        self._space = ""
        return self._take_events()

    @abstractmethod
    def _step(self, *, final: bool) -> bool:
        """Decide on a part of the buffer and remove it; False if that needs more text. `final`: no more will come.

        A decision must not hang on where the buffer ends, unless `final`.
        """

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _say(self, text: str) -> None:
        """`text` is content."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._events.append(Content(kept))

    def _offers(self, name: str) -> bool:
        """Whether `name` may be called. Each parser asks before it calls `_call`."""
        return not self._functions or name in self._functions

    def _call(self, name: str) -> None:
        """A call of `name` begins."""
        self._called, self._space = True, ""
        self._events.append(CallStart(name))

    def _argue(self, text: str) -> None:
        """`text` is the next piece of its arguments."""
        if text:
            self._events.append(Arguments(text))

    def _take_until(self, *markers: str, final: bool) -> tuple[str, str | None]:
        """The text before the first of `markers`, and which; both leave the buffer. None: as far as none can begin."""
        text, marker, self._buffer = split_at(self._buffer, *markers, final=final)
        return text, marker

    def _skip_space(self) -> None:
        self._buffer = self._buffer.lstrip()

    def _starts_with(self, marker: str, *, final: bool) -> bool | None:
        """Whether the buffer does; None if it may, once more has come."""
        if self._buffer.startswith(marker):
            return True
        return None if not final and marker.startswith(self._buffer) else False

    def _skip_marker(self, marker: str, *, final: bool) -> bool:
        """Drop white space and, where it follows, `marker`; False: it may follow, once more has come."""
        self._skip_space()
        follows = self._starts_with(marker, final=final)
        if follows:
            self._buffer = self._buffer[len(marker) :]
        return follows is not None


def split_at(text: str, *markers: str, final: bool) -> tuple[str, str | None, str]:
    """The text before the first of `markers`, which one it is, and the text behind it.

    None: there is none so far; then the last part is the end of the text, which may be the beginning of one. No marker
    may begin inside another.
    """
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    if found:
        place, marker = min(found)
        return text[:place], marker, text[place + len(marker) :]
    held = 0
    if not final:
        longest = min(len(text), max(map(len, markers)) - 1)
        held = next((n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0)
    return text[: len(text) - held], None, text[len(text) - held :]
