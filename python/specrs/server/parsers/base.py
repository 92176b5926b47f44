"""Base of the tool call parsers: their events, and a buffer for text that arrives in pieces. Knows no format.

Other serving projects have such parsers, too (vLLM and SGLang in Python, smg and Dynamo in Rust). Each is tied to its
own tokenizer and request types; the parsers here read only text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, TypeAlias

NEVER = re.compile(r"(?!)")
"""Pattern that no text has."""
_NOT_SPACE = re.compile(r"\S")


# Events are not frozen: a frozen dataclass takes three times as long to make, and every token makes one.
@dataclass(slots=True)
class Content:
    """Event: text that belongs to no tool call."""

    text: str


@dataclass(slots=True)
class CallStart:
    """Event: a tool call begins. `Arguments` events that follow belong to it, until the next call begins."""

    name: str


@dataclass(slots=True)
class Arguments:
    """Event: a piece of a call's arguments. The pieces of a call together are JSON text, if the model generated
    JSON."""

    text: str


Event: TypeAlias = Content | CallStart | Arguments


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a request offers. `parameters`: a JSON schema. `place`: the field of the request that has it."""

    name: str
    parameters: dict[str, Any]
    place: str = "tools"


@dataclass(frozen=True, slots=True)
class Run:
    """Effect of text that cannot change a parser's state, because the pattern `deciding` is nowhere in it.

    `kind`: the text is "content" or "arguments", or it is "kept" for the next step. `character`: the one that
    `deciding` matches; None if it matches several.
    """

    kind: Literal["content", "arguments", "kept"]
    deciding: re.Pattern[str]
    character: str | None = None


class ToolParser:
    """Reads the text of one completion in pieces.

    However the text is cut into pieces, the contents add up to the same text, and the calls are the same, with the same
    arguments. What begins like a call and is none becomes content; so does a call of a function that is not offered.
    White space next to calls is dropped. Arguments that the text ends in are given out as far as they are written.

    A parser is a state machine. The method `_in_NAME` interprets the buffer in the state NAME. In the state "text",
    everything is content up to one of `text_marks`.
    """

    text_marks: ClassVar[tuple[str, ...]] = ()
    """Marks that end content. A mark either begins a call, or ends a call whose opening mark is missing."""
    _state = "text"

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        """Start with an empty buffer. `functions` are those that the request offers. If there are none, any name counts
        as a function."""
        self._functions = {function.name: function for function in functions}
        self._buffer = ""  # read, and not yet decided on
        self._kept: list[str] = []  # text after the buffer that a run has kept
        self._gathered: list[str] = []  # text that `_gather` has searched
        self._awaited: tuple[str, ...] = ()  # marks that `_gather` looks for
        self._space: list[str] = []  # white space at the end of the content, dropped where a call follows
        self._events: list[Event] = []
        self._called = False
        self._run: Run | None = None

    def feed(self, text: str) -> list[Event]:
        """Read `text`, which follows what was fed before, and return the new events."""
        run = self._run
        if run is not None and run.deciding.search(text) is None and text:
            if run.kind == "arguments":
                return [Arguments(text)]
            if run.kind == "content":
                if not self._space and not text[-1].isspace():
                    return [Content(text)]
                self._say(text)
                return self._take_events()
            self._kept.append(text)
            return []
        self._take_steps(text, final=False)
        self._run = self._find_run()
        return self._take_events()

    @property
    def deciding_character(self) -> str | None:
        """The character without which the next text is content, unless the text is empty or ends in white space. Such
        text need not be fed. None: all text must be fed."""
        run = self._run
        return None if run is None or run.kind != "content" or self._space else run.character

    def finish(self) -> list[Event]:
        """Return the last events, now that the text has ended."""
        self._take_steps("", final=True)
        self._run = None
        if not self._called and self._space:
            self._events.append(Content("".join(self._space)))
        self._space = []
        return self._take_events()

    def _take_steps(self, text: str, *, final: bool) -> None:
        """Add `text` to the buffer and interpret as much of it as possible."""
        if self._kept:
            text = "".join((*self._kept, text))
            self._kept = []
        self._buffer += text
        while self._step(final=final):
            continue

    def _step(self, *, final: bool) -> bool:
        """Interpret a part of the buffer and remove it. Return False if that needs more text. `final`: no more text
        follows.

        Unless `final`, the result must not depend on where the buffer ends.
        """
        advance: bool = getattr(self, "_in_" + self._state)(final=final)
        return advance

    def _find_run(self) -> Run | None:
        """Return the run that the next text may belong to, now that the buffer needs more text. None: every text has to
        be interpreted."""
        if self._buffer:
            # white space alone decides nothing, in any state
            return Run("kept", _NOT_SPACE) if self._buffer.isspace() else None
        if self._state == "text":
            return run_until("content", *self.text_marks)
        return run_until("kept", *self._awaited) if self._gathered else None

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _say(self, text: str) -> None:
        """Add an event that `text` is content."""
        kept = text.rstrip()
        if kept:
            self._events.append(Content("".join((*self._space, kept))))
            self._space = []
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])

    def _offers(self, name: str) -> bool:
        """Return True if the function `name` may be called. Parsers check it before they call `_call`."""
        return not self._functions or name in self._functions

    def _call(self, name: str) -> None:
        """Add an event that a call of `name` begins."""
        self._called, self._space = True, []
        self._events.append(CallStart(name))

    def _argue(self, text: str) -> None:
        """Add an event that `text` is the next piece of the call's arguments."""
        if text:
            self._events.append(Arguments(text))

    def _take_all(self) -> str:
        """Remove the whole buffer and return it."""
        text, self._buffer = self._buffer, ""
        return text

    def _take_content(self, *, final: bool) -> tuple[str, str | None]:
        """Remove the text before the first of `text_marks`, and the mark, from the buffer. Return both. Without a mark,
        return the text that cannot belong to one, and None."""
        return self._take_until(*self.text_marks, final=final)

    def _take_until(self, *markers: str, final: bool) -> tuple[str, str | None]:
        """Remove the text before the first of `markers`, and the marker, from the buffer. Return both. Without a
        marker, return the text that cannot belong to one, and None."""
        text, marker, self._buffer = split_at(self._buffer, *markers, final=final)
        return text, marker

    def _gather(self, *markers: str, final: bool) -> tuple[str, str | None] | None:
        """Remove the text before the first of `markers`, and the marker, from the buffer. Return both, or None if the
        marker may still come. If the text ends without a marker, the returned marker is None.

        The text may have arrived in any number of pieces, none of which is searched twice.
        """
        text, marker = self._take_until(*markers, final=final)
        self._gathered.append(text)
        if marker is None and not final:
            self._awaited = markers
            return None
        text, self._gathered = "".join(self._gathered), []
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
    found = _pattern_of(markers, not final).search(text)
    if found is None:
        return text, None, ""
    start = found.start()
    if found.lastgroup is None:
        return text[:start], found[0], text[found.end() :]
    return text[:start], None, text[start:]


@cache
def first_characters(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of a character that one of `markers` begins with."""
    characters = sorted({re.escape(marker[0]) for marker in markers})
    return re.compile(f"[{''.join(characters)}]") if characters else NEVER


@cache
def run_until(kind: Literal["content", "arguments", "kept"], *markers: str) -> Run:
    """Return the run of text of `kind` that goes on until one of `markers` may begin."""
    first = {marker[0] for marker in markers}
    return Run(kind, first_characters(markers), min(first) if len(first) == 1 else None)


def beginnings(markers: Sequence[str]) -> str:
    """Return the pattern of the beginning of one of `markers`, but not all of it, at the end of a text."""

    def beginning(marker: str) -> str:
        rest = f"(?:{beginning(marker[1:])})?" if len(marker) > 2 else ""
        return re.escape(marker[0]) + rest

    longer = [marker for marker in markers if len(marker) > 1]
    return rf"(?:{'|'.join(map(beginning, longer))})\Z" if longer else NEVER.pattern


@cache
def _pattern_of(markers: tuple[str, ...], with_beginnings: bool) -> re.Pattern[str]:
    """Return the pattern of `markers`, and of what may become one at the end of the text, which has a group."""
    whole = "|".join(map(re.escape, markers))
    return re.compile(f"{whole}|(?P<part>{beginnings(markers)})" if with_beginnings else whole)
