"""Reads tool calls that are written as JSON objects, so that arguments stream as they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from specrs.server.parsers.base import Run, ToolParser

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_SCALARS = "-0123456789tfn"


def _ordinary(characters: str) -> re.Pattern[str]:
    """Return the pattern of the longest text without `characters`, or else of one character."""
    return re.compile(f"[^{re.escape(characters)}]+|.", re.DOTALL)


ANY = re.compile(".", re.DOTALL)
"""Pattern of a single character."""
_IN_SPACE = re.compile(f"[{_SPACE}]+|.", re.DOTALL)
_CHARACTERS = r'(?:[^"\\]++|\\.)'
IN_STRING = re.compile(f"{_CHARACTERS}++|.", re.DOTALL)
"""Pattern of the next token inside a JSON string: characters and whole escapes, or else a quote or a backslash at the
end of the text."""
_IN_BRACKETS = _ordinary('"[]{}<')
_IN_SCALAR = _ordinary(",}]<" + _SPACE)
STRING_RUN = Run("arguments", re.compile(rf"\A{_CHARACTERS}*+(?!\Z)", re.DOTALL))
"""Run of characters and whole escapes inside a JSON string that is an argument, or a part of one."""

Reader = Generator[re.Pattern[str], str, str]
"""Generator that reads text bit by bit. It yields a pattern and receives the text that matches it: a run of characters
that it treats alike, or a single character. It returns the first character that it does not accept, or "" if it
accepted all."""


class Feeder:
    """Feeder of text, which arrives in pieces, to a `Reader`."""

    def __init__(self, reader: Reader) -> None:
        """Start `reader`."""
        self._reader = reader
        self._expected = next(reader)
        self.ended = False
        """True after the value, and after an error."""
        self.failed = False
        """True if the text is not a value that the reader accepts."""

    @property
    def in_string(self) -> bool:
        """True inside a JSON string, before a character that is not escaped."""
        return self._expected is IN_STRING and not self.ended

    def feed(self, text: str) -> int:
        """Read `text` and return the number of characters that were read. After `ended`, nothing is read. A character
        that leads to an error is not read."""
        place = 0
        try:
            while place < len(text) and not self.ended:
                found = self._expected.match(text, place)
                assert found is not None
                place = found.end()
                self._expected = self._reader.send(found[0])
        except StopIteration:
            self.ended = True
        except (ValueError, RecursionError):
            self.ended = self.failed = True
            place -= 1  # errors are due to single characters
        return place


class CallReader:
    """Reader of one call: an object with `name` and `arguments` or `parameters`, in either order. Other keys are
    skipped.

    The call is announced once its name is known and its arguments begin. Arguments that are an object are returned as
    they are written. Arguments in a string are the string's text. Missing or null arguments are `{}`.
    """

    def __init__(self, offers: Callable[[str], bool] = lambda _: True) -> None:
        """Start a call. `offers(name)` returns True if the function may be called. An object with another name is no
        call."""
        self._offers = offers
        self._raw: list[str] = []
        self.ended = False  # the object is complete, or is no such object
        self.name: str | None = None
        self.announced = False
        self._arguments: list[str] = []  # not taken yet
        self._has_arguments = False
        self._in_arguments = False
        self._streams = False
        self._feeder = Feeder(self._object())

    @property
    def raw(self) -> str:
        """Text of the call that was read so far; empty once the call is announced."""
        return "".join(self._raw)

    @property
    def in_string(self) -> bool:
        """True inside a JSON string that is a part of the arguments of an announced call."""
        return self.announced and self._in_arguments and self._feeder.in_string

    def feed(self, text: str) -> int:
        """Read `text` and return the number of characters that were read. After `ended`, nothing is read.

        A character that cannot stand at its place in a call's object is not read, because it may begin the mark after
        the object.
        """
        if self.ended:
            return 0
        count = self._feeder.feed(text)
        if not self.announced:
            self._raw.append(text[:count])
        if self._feeder.failed:
            self.finish()
        else:
            self.ended = self._feeder.ended
            self._announce(at_end=self.ended)
        return count

    def finish(self) -> None:
        """End the object where it is. If the arguments are complete, the last brace may be missing."""
        self.ended = True
        self._announce(at_end=self._has_arguments)

    def take(self) -> str:
        """Return the arguments that were read since the last call of `take`."""
        if not self.announced:
            return ""
        text, self._arguments = "".join(self._arguments), []
        return text

    def _announce(self, *, at_end: bool = False) -> None:
        if self.name is not None and (self._streams or at_end) and not self.announced:
            self.announced = True
            self._raw = []
            if not self._has_arguments:
                self._arguments = ["{}"]

    def _object(self) -> Reader:
        if (yield from _after_space()) != "{":
            raise ValueError
        char = yield from _after_space()
        while char != "}":
            if char != '"':
                raise ValueError
            key = yield from _decoded(char)
            if (yield from _after_space()) != ":":
                raise ValueError
            first = yield from _after_space()
            if key == "name":
                name = yield from _decoded(first)
                if not name or not self._offers(name):
                    raise ValueError
                self.name, char = name, ""
            elif key in _ARGUMENTS and not self._has_arguments:
                char = yield from self._read_arguments(first)
            else:
                char = yield from value(first, lambda _: None)
            if char == "" or char in _SPACE:
                char = yield from _after_space()
            if char == ",":
                char = yield from _after_space()
            elif char != "}":
                raise ValueError
        return ""

    def _read_arguments(self, first: str) -> Reader:
        if first == "{":
            self._has_arguments = self._streams = self._in_arguments = True
            char = yield from value(first, self._add)
            self._in_arguments = False
            return char
        parts: list[str] = []
        char = yield from value(first, parts.append)
        found = json.loads("".join(parts))
        text = found if isinstance(found, str) else "" if found is None else "".join(parts)
        self._has_arguments = True
        self._add(text or "{}")
        return char

    def _add(self, text: str) -> None:
        self._arguments.append(text)


def value(first: str, tell: Callable[[str], None]) -> Reader:
    """Read one JSON value that begins with `first`. `tell` is called with each piece of it. Brackets are counted, not
    matched.

    Raises `ValueError` if no value begins with `first`, and at a `<` outside of strings, which begins a mark.
    """
    tell(first)
    return (yield from _rest(first, tell))


def _rest(first: str, tell: Callable[[str], None]) -> Reader:
    """Read a JSON value after its first character `first`."""
    if first == '"':
        yield from _string(tell)
    elif first in "[{":
        depth = 1
        while depth:
            text = yield _IN_BRACKETS
            if text == "<":
                raise ValueError
            tell(text)
            if text == '"':
                yield from _string(tell)
            else:
                depth += (text in "[{") - (text in "]}")
    elif first in _SCALARS:
        while True:
            text = yield _IN_SCALAR
            if text in ",}]" or text in _SPACE:
                return text
            if text == "<":
                raise ValueError
            tell(text)
    else:
        raise ValueError
    return ""


def _string(tell: Callable[[str], None]) -> Generator[re.Pattern[str], str, None]:
    """Read the rest of a string, including its closing quote."""
    text = ""
    while text != '"':
        text = yield IN_STRING
        tell(text)
        if text == "\\":
            tell((yield ANY))


def _decoded(first: str) -> Generator[re.Pattern[str], str, str]:
    """Read a string that begins with `first`, and return it decoded."""
    if first != '"':
        raise ValueError
    parts = [first]
    yield from _string(parts.append)
    text: str = json.loads("".join(parts))
    return text


def _after_space() -> Reader:
    text = " "
    while text[0] in _SPACE:
        text = yield _IN_SPACE
    return text


class JSONCallParser(ToolParser):
    """Base of the parsers whose calls are JSON objects. Knows no markers."""

    _reader: CallReader | None = None
    _value: Feeder | None = None

    def _begin_call(self) -> None:
        """Start to read the beginning of the buffer as a call."""
        self._reader = CallReader(self._offers)

    def _read_call(self, *, final: bool) -> bool:
        """Continue to read the current call. Return False if it may continue in text to come."""
        reader = self._reader
        assert reader is not None
        announced = reader.announced
        self._buffer = self._buffer[reader.feed(self._buffer) :]
        if final and not reader.ended:
            reader.finish()
        if reader.announced and not announced:
            assert reader.name is not None
            self._call(reader.name)
        self._argue(reader.take())
        return reader.ended

    def _begin_arguments(self) -> None:
        """Start to read an object of arguments, whose name the format has elsewhere. Removes its first brace."""
        self._argue("{")
        self._buffer = self._buffer.lstrip().removeprefix("{")
        self._value = Feeder(value("{", lambda _: None))

    def _read_object(self) -> bool:
        """Continue to read an object of arguments. Return False if it may continue in text to come.

        It ends after its last brace, or before a `<` outside of strings.
        """
        assert self._value is not None
        count = self._value.feed(self._buffer)
        ended = self._value.ended
        self._argue(self._buffer[:count])
        self._buffer = self._buffer[count:]
        if ended:
            self._value = None
        return ended

    def _find_run(self) -> Run | None:
        reader = self._value or self._reader
        return STRING_RUN if reader is not None and reader.in_string else super()._find_run()

    def _drop_braces(self) -> None:
        """Drop surplus closing braces after a call, which the model generated without opening braces for them."""
        rest = self._buffer.lstrip("}" + _SPACE)
        dropped = self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = self._buffer[dropped.rfind("}") + 1 :]

    def _give_up(self) -> str:
        """Stop reading the current call. Return its text so far, or "" if the call was already reported."""
        assert self._reader is not None
        raw, self._reader = self._reader.raw, None
        return raw
