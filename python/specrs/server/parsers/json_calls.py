"""Reads tool calls that are written as JSON objects, character by character, so that arguments stream as they are
written."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator

from specrs.server.parsers.base import ToolParser

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_SCALARS = "-0123456789tfn"

Reader = Generator[None, str, str]
"""Generator that receives characters. It returns the first character that it does not accept, or "" if it took all."""


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
        self.raw = ""  # all that was read, until the call is announced
        self.ended = False  # the object is complete, or is no such object
        self.name: str | None = None
        self.announced = False
        self._arguments: list[str] = []  # not taken yet
        self._streams = False
        self._reader = self._object()
        next(self._reader)

    def feed(self, text: str) -> int:
        """Read `text` and return the number of characters that were read. After `ended`, nothing is read.

        A character that cannot stand at its place in a call's object is not read, because it may begin the mark after
        the object.
        """
        for count, char in enumerate(text):
            if self.ended:
                return count
            try:
                self._reader.send(char)
            except StopIteration:
                self.ended = True
            except (ValueError, RecursionError):
                self.finish()
                return count
            if not self.announced:
                self.raw += char
                self._announce(at_end=self.ended)
        return len(text)

    def finish(self) -> None:
        """End the object where it is. If the arguments are complete, the last brace may be missing."""
        self.ended = True
        self._announce(at_end=bool(self._arguments))

    def take(self) -> str:
        """Return the arguments that were read since the last call of `take`."""
        if not self.announced:
            return ""
        text, self._arguments = "".join(self._arguments), []
        return text

    def _announce(self, *, at_end: bool = False) -> None:
        if self.name is not None and (self._streams or at_end) and not self.announced:
            self.announced = True
            self.raw = ""
            if not self._arguments:
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
            elif key in _ARGUMENTS and not self._arguments:
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
            self._streams = True
            self._add(first)
            return (yield from _rest(first, self._add))
        parts: list[str] = []
        char = yield from value(first, parts.append)
        found = json.loads("".join(parts))
        text = found if isinstance(found, str) else "" if found is None else "".join(parts)
        self._arguments.append(text or "{}")
        return char

    def _add(self, char: str) -> None:
        self._arguments.append(char)


def value(first: str, tell: Callable[[str], None]) -> Reader:
    """Read one JSON value that begins with `first`. `tell` is called with each of its characters. Brackets are counted,
    not matched.

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
            char = yield
            if char == "<":
                raise ValueError
            tell(char)
            if char == '"':
                yield from _string(tell)
            else:
                depth += (char in "[{") - (char in "]}")
    elif first in _SCALARS:
        while True:
            char = yield
            if char in ",}]" or char in _SPACE:
                return char
            if char == "<":
                raise ValueError
            tell(char)
    else:
        raise ValueError
    return ""


def _string(tell: Callable[[str], None]) -> Generator[None, str, None]:
    """Read the rest of a string, including its closing quote."""
    char = ""
    while char != '"':
        char = yield
        tell(char)
        if char == "\\":
            tell((yield))


def _decoded(first: str) -> Generator[None, str, str]:
    """Read a string that begins with `first`, and return it decoded."""
    if first != '"':
        raise ValueError
    parts = [first]
    yield from _string(parts.append)
    text: str = json.loads("".join(parts))
    return text


def _after_space() -> Generator[None, str, str]:
    char = " "
    while char in _SPACE:
        char = yield
    return char


class JSONCallParser(ToolParser):
    """Base of the parsers whose calls are JSON objects. Knows no markers."""

    _reader: CallReader | None = None
    _value: Reader | None = None

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
        self._value = value("{", lambda _: None)
        next(self._value)

    def _read_object(self) -> bool:
        """Continue to read an object of arguments. Return False if it may continue in text to come.

        It ends after its last brace, or before a `<` outside of strings.
        """
        assert self._value is not None
        for count, char in enumerate(self._buffer, 1):
            try:
                self._value.send(char)
            except (StopIteration, ValueError) as end:
                count -= isinstance(end, ValueError)  # the character is no part of them
                self._argue(self._buffer[:count])
                self._buffer, self._value = self._buffer[count:], None
                return True
        self._argue(self._buffer)
        self._buffer = ""
        return False

    def _drop_braces(self) -> None:
        """Drop closing braces after a call, which the model wrote although it had opened fewer."""
        rest = self._buffer.lstrip("}" + _SPACE)
        dropped = self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = self._buffer[dropped.rfind("}") + 1 :]

    def _give_up(self) -> str:
        """Stop reading the current call. Return the text that was read of it, or "" if the call was already
        announced."""
        assert self._reader is not None
        raw, self._reader = self._reader.raw, None
        return raw
