"""Parser of tool calls of Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`."""

from __future__ import annotations

import json

from specrs.server.parsers.base import ToolParser

OPEN, CLOSE = "<|tool_call>", "<tool_call|>"
CALL = "call:"
QUOTE = '<|"|>'
_SPACE = " \t\r\n"


class Gemma4Parser(ToolParser):
    """Parser of text and calls. Arguments stream as JSON."""

    _state = "text"
    _opening = ""  # the marks before the name
    _writer: ArgumentsWriter

    def _step(self, *, final: bool) -> bool:
        advance: bool = getattr(self, f"_in_{self._state}")(final=final)
        return advance

    def _in_text(self, *, final: bool) -> bool:
        text, marker = self._take_until(OPEN, CLOSE, final=final)
        self._say(text if marker != CLOSE or self._called else text + CLOSE)
        if marker == OPEN:
            self._opening, self._state = OPEN, "name"
        return marker is not None

    def _in_name(self, *, final: bool) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(OPEN):  # written twice
            size = len(self._buffer) - len(text) + len(OPEN)
            self._opening, self._buffer = self._opening + self._buffer[:size], self._buffer[size:]
            return True
        if not final and (OPEN.startswith(text) or CALL.startswith(text)):
            return False
        place = next((place for place, char in enumerate(text) if char in "{<"), None)
        if text.startswith(CALL) and place is None and not final:
            return False
        name = text[len(CALL) : place].strip() if place is not None and text.startswith(CALL) else ""
        if place is None or text[place] != "{" or len(name.split()) != 1 or not self._offers(name):
            self._say(self._opening)
            self._state = "text"
            return True
        self._call(name)
        self._argue("{")
        self._buffer, self._state, self._writer = text[place + 1 :], "arguments", ArgumentsWriter()
        return True

    def _in_arguments(self, *, final: bool) -> bool:
        place, written = 0, []
        while place < len(self._buffer) and not self._writer.ended:
            token = self._buffer[place]
            if token == "<":
                marks = self._writer.marks
                found = next((mark for mark in marks if self._buffer.startswith(mark, place)), None)
                if found is None and not final and any(mark.startswith(self._buffer[place:]) for mark in marks):
                    break
                token = found or token
            if token == CLOSE:
                break
            written.append(self._writer.read(token))
            place += len(token)
        ended = self._writer.ended or self._buffer.startswith(CLOSE, place)
        if not self._writer.ended and (ended or final):
            written.append(self._writer.finish())
        self._argue("".join(written))
        self._buffer = self._buffer[place:]
        if ended:
            self._state = "close"
        return ended

    def _in_close(self, *, final: bool) -> bool:
        if not self._skip_marker(CLOSE, final=final):
            return False
        self._state = "text"
        return True


class ArgumentsWriter:
    """Translator of an object of arguments to JSON, token by token. A token is a character or a mark of the format.

    The object's first brace was read before. Keys have no quotes, strings stand between `<|"|>`, and everything else is
    as in JSON. JSON's own strings are accepted, too. A word that is no JSON value becomes a string.
    """

    def __init__(self) -> None:
        """Start after the first brace."""
        self.ended = False
        self._brackets = ["{"]
        self._counts = [0]  # items of each open bracket
        self._state = "key"
        self._text = ""  # of a key or a word
        self._closing = ""  # quote of a key
        self._escaped = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that count as one token at this place."""
        if self._state == "json" or (self._state == "quoted" and self._closing == '"'):
            return ()
        return (QUOTE,) if self._state in ("string", "quoted") else (QUOTE, CLOSE)

    def read(self, token: str) -> str:
        """Read `token` and return the JSON text that it adds."""
        written: str = getattr(self, f"_in_{self._state}")(token)
        return written

    def finish(self) -> str:
        """Return the JSON text of the word that the text ends in."""
        return self._word() if self._state == "word" else ""

    def _in_key(self, token: str) -> str:
        if token in _SPACE or token == ",":
            return ""
        if token in "}]":
            return self._close(token)
        self._text, self._closing, self._escaped = "", token, False
        self._state = "quoted" if token in (QUOTE, '"') else "name"
        return "" if self._state == "quoted" else self._in_name(token)

    def _in_quoted(self, token: str) -> str:
        if token == self._closing and not self._escaped:
            self._state = "colon"
            return self._key(_decoded(self._text) if token == '"' else self._text)
        self._escaped = self._closing == '"' and token == "\\" and not self._escaped
        self._text += token
        return ""

    def _in_colon(self, token: str) -> str:
        if token == ":":
            self._state = "value"
        return ""

    def _in_name(self, token: str) -> str:
        if token == ":":
            self._state = "value"
            return self._key(self._text.strip())
        self._text += token
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
        self._state, self._text = "word", ""
        return self._in_word(token)

    def _in_string(self, token: str) -> str:
        if token == QUOTE:
            self._state = "next"
            return '"'
        return json.dumps(token, ensure_ascii=False)[1:-1]

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
            self._text += token
            return ""
        self._state = "next"
        return self._word() + self._in_next(token)

    def _in_next(self, token: str) -> str:
        if token == ",":
            self._state = "key" if self._brackets[-1] == "{" else "item"
        return self._close(token) if token in "}]" else ""

    def _word(self) -> str:
        try:
            return json.dumps(json.loads(self._text), allow_nan=False)
        except (ValueError, RecursionError):
            return json.dumps(self._text.strip(), ensure_ascii=False) if self._text.strip() else "null"

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
