"""Parser of tool calls of Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from specrs.server.parsers.base import Run, ToolParser
from specrs.server.parsers.json_calls import ANY, IN_STRING, STRING_RUN

OPEN, CLOSE = "<|tool_call>", "<tool_call|>"
CALL = "call:"
QUOTE = '<|"|>'
_SPACE = " \t\r\n"


class Gemma4Parser(ToolParser):
    """Parser of text and calls. Arguments stream as JSON."""

    text_marks = (OPEN, CLOSE)
    _opening = ""  # the marks before the name
    _writer: ArgumentsWriter

    def _in_text(self, *, final: bool) -> bool:
        text, marker = self._take_content(final=final)
        self._say(text if marker != CLOSE or self._called else text + CLOSE)
        if marker == OPEN:
            self._opening, self._state = OPEN, "open"
        return marker is not None

    def _in_open(self, *, final: bool) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(OPEN):  # written twice
            size = len(self._buffer) - len(text) + len(OPEN)
            self._opening, self._buffer = self._opening + self._buffer[:size], self._buffer[size:]
            return True
        if not final and (OPEN.startswith(text) or CALL.startswith(text)):
            return False
        if text.startswith(CALL):
            self._state = "name"
        else:
            self._back_to_text()
        return True

    def _in_name(self, *, final: bool) -> bool:
        gathered = self._gather("{", "<", final=final)
        if gathered is None:
            return False
        (text, end), rest = gathered, self._buffer
        self._buffer = text + (end or "") + rest
        name = text.lstrip().removeprefix(CALL).strip()
        if end != "{" or len(name.split()) != 1 or not self._offers(name):
            self._back_to_text()
            return True
        self._call(name)
        self._argue("{")
        self._buffer, self._state, self._writer = rest, "arguments", ArgumentsWriter()
        return True

    def _in_arguments(self, *, final: bool) -> bool:
        place, written, writer = 0, [], self._writer
        while place < len(self._buffer) and not writer.ended:
            found = writer.expected.match(self._buffer, place)
            assert found is not None
            token = found[0]
            if token == CLOSE or (token == "<" and not final and writer.may_be_mark(self._buffer, place)):
                break
            written.append(writer.read(token))
            place = found.end()
        ended = writer.ended or self._buffer.startswith(CLOSE, place)
        if not writer.ended and (ended or final):
            written.append(writer.finish())
        self._argue("".join(written))
        self._buffer = self._buffer[place:]
        if ended:
            self._state = "close"
        return ended

    def _find_run(self) -> Run | None:
        if self._state == "arguments" and not self._buffer:
            return self._writer.run
        return super()._find_run()

    def _back_to_text(self) -> None:
        """Treat the marks that were read as content, because they begin no call."""
        self._say(self._opening)
        self._state = "text"

    def _in_close(self, *, final: bool) -> bool:
        if not self._skip_marker(CLOSE, final=final):
            return False
        self._state = "text"
        return True


class _Tokens(NamedTuple):
    """Tokens at one place: marks, runs of characters that are all alike, and single characters."""

    marks: tuple[str, ...]
    pattern: re.Pattern[str]


def _tokens(run: str, *marks: str) -> _Tokens:
    return _Tokens(marks, re.compile("|".join([*map(re.escape, marks), run, "."]), re.DOTALL))


_SINGLE = _tokens(".", QUOTE, CLOSE)
_NAME = _tokens("[^:<]+", QUOTE, CLOSE)
_WORD = _tokens(r"[^,}\]<]+", QUOTE, CLOSE)
_QUOTED = _tokens("[^<]+", QUOTE)
_JSON = _Tokens((), IN_STRING)
_TOKENS = {
    **dict.fromkeys(("key", "colon", "item", "value"), _SINGLE),
    **{"name": _NAME, "word": _WORD, "next": _WORD, "quoted": _QUOTED, "string": _QUOTED},
    **{"json": _JSON, "json_key": _JSON},
}
"""Tokens by the state of an `ArgumentsWriter`."""
_as_json = json.JSONEncoder(ensure_ascii=False).encode
_QUOTED_RUN = Run("arguments", re.compile(r'[<"\\\x00-\x1f]'))
"""Run of text that is the same in a string of this format and in one of JSON."""


class ArgumentsWriter:
    """Translator of an object of arguments to JSON, token by token. A token is a mark of the format, a single
    character, or a run of characters that are treated alike.

    The object's first brace was read before. Keys have no quotes, strings stand between `<|"|>`, and everything else is
    as in JSON. JSON's own strings are accepted, too. A word that is no JSON value becomes a string.
    """

    def __init__(self) -> None:
        """Start after the first brace."""
        self.ended = False
        self._brackets = ["{"]
        self._counts = [0]  # items of each open bracket
        self._state = "key"
        self._text: list[str] = []  # of a key or a word
        self._escaped = False

    @property
    def expected(self) -> re.Pattern[str]:
        """Pattern of the next token."""
        return ANY if self._escaped else _TOKENS[self._state].pattern

    @property
    def run(self) -> Run | None:
        """Run of arguments that the text to come may belong to."""
        if self._state == "string":
            return _QUOTED_RUN
        return STRING_RUN if self._state == "json" and not self._escaped else None

    def may_be_mark(self, text: str, place: int) -> bool:
        """Return True if `text` from `place` is the beginning of a mark that would be a token."""
        rest = text[place : place + len(CLOSE)]
        return any(mark.startswith(rest) for mark in _TOKENS[self._state].marks)

    def read(self, token: str) -> str:
        """Read `token` and return the JSON text that it adds."""
        written: str = getattr(self, "_in_" + self._state)(token)
        return written

    def finish(self) -> str:
        """Return the rest of the JSON: that of the last word, which ends with the text."""
        return self._word() if self._state == "word" else ""

    def _in_key(self, token: str) -> str:
        if token in _SPACE or token == ",":
            return ""
        if token in "}]":
            return self._close(token)
        self._text, self._escaped = [], False
        self._state = {QUOTE: "quoted", '"': "json_key"}.get(token, "name")
        return self._in_name(token) if self._state == "name" else ""

    def _in_quoted(self, token: str) -> str:
        if token == QUOTE:
            self._state = "colon"
            return self._key("".join(self._text))
        self._text.append(token)
        return ""

    def _in_json_key(self, token: str) -> str:
        if token == '"' and not self._escaped:
            self._state = "colon"
            return self._key(_decoded("".join(self._text)))
        self._escaped = token == "\\" and not self._escaped
        self._text.append(token)
        return ""

    def _in_colon(self, token: str) -> str:
        if token == ":":
            self._state = "value"
        return ""

    def _in_name(self, token: str) -> str:
        if token == ":":
            self._state = "value"
            return self._key("".join(self._text).strip())
        self._text.append(token)
        return ""

    def _in_item(self, token: str) -> str:
        if token in _SPACE or token == ",":
            return ""
        return self._close(token) if token in "}]" else self._comma() + self._in_value(token)

    def _in_value(self, token: str) -> str:
        if token in _SPACE:
            return ""
        if token in (QUOTE, '"'):
            self._state, self._escaped = "string" if token == QUOTE else "json", False
            return '"'
        if token in "{[":
            self._brackets.append(token)
            self._counts.append(0)
            self._state = "key" if token == "{" else "item"
            return token
        self._state, self._text = "word", []
        return self._in_word(token)

    def _in_string(self, token: str) -> str:
        if token == QUOTE:
            self._state = "next"
            return '"'
        return _as_json(token)[1:-1]

    def _in_json(self, token: str) -> str:
        if self._escaped:
            self._escaped = False
        elif token == "\\":
            self._escaped = True
        elif token == '"':
            self._state = "next"
        return token

    def _in_word(self, token: str) -> str:
        if token not in ",}]":
            self._text.append(token)
            return ""
        self._state = "next"
        return self._word() + self._in_next(token)

    def _in_next(self, token: str) -> str:
        if token == ",":
            self._state = "key" if self._brackets[-1] == "{" else "item"
        return self._close(token) if token in "}]" else ""

    def _word(self) -> str:
        text = "".join(self._text)
        try:
            return json.dumps(json.loads(text), allow_nan=False)
        except (ValueError, RecursionError):
            return json.dumps(text.strip(), ensure_ascii=False) if text.strip() else "null"

    def _key(self, name: str) -> str:
        return f"{self._comma()}{json.dumps(name, ensure_ascii=False)}: "

    def _comma(self) -> str:
        self._counts[-1] += 1
        return ", " if self._counts[-1] > 1 else ""

    def _close(self, token: str) -> str:
        bracket = self._brackets.pop()
        self._counts.pop()
        self._state = "next"
        self.ended = not self._brackets
        return "}" if bracket == "{" else "]"


def _decoded(text: str) -> str:
    """Return the text of a JSON string without its quotes. Text that is no JSON is returned unchanged."""
    try:
        decoded: str = json.loads(f'"{text}"')
    except ValueError:
        return text
    return decoded
