"""Parser of tool calls of Qwen3-Coder: `<function=name><parameter=key>value</parameter></function>` between
`<tool_call>` tags.

Values are text; the function's schema says what JSON they stand for. A tag inside a string of such JSON ends nothing. A
missing `<tool_call>` or `</parameter>` is tolerated, because the models leave them out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set
from typing import Any

from specrs.server.parsers.alternatives import alternatives, types_of, words_of
from specrs.server.parsers.base import Function, ToolParser
from specrs.server.parsers.references import property_schema

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_TAG = re.compile("|".join((END_PARAMETER, PARAMETER, END_FUNCTION)))
"""Pattern of the tags that end a parameter's value."""
_STRING_OR_TAG = re.compile(rf'"(?:[^"\\\n]|\\[^\n]?)*(?P<end>"?)|(?P<tag>{_TAG.pattern})')
"""A JSON string on one line, with `end` if it is closed, or a tag."""


class Qwen3CoderParser(ToolParser):
    """Parser of text and calls. Each parameter is reported once it is complete."""

    _state = "text"
    _function: Function | None = None
    _key = ""
    _schema: dict[str, Any] | None = None  # of the parameter
    _kinds: frozenset[str] = frozenset()  # JSON types of the parameter
    _told = 0  # parameters of the call
    _opening = ""  # the tags before the name

    def _step(self, *, final: bool) -> bool:
        advance: bool = getattr(self, f"_in_{self._state}")(final=final)
        return advance

    def _in_text(self, *, final: bool) -> bool:
        text, marker = self._take_until(OPEN, FUNCTION, final=final)
        self._say(text)
        if marker is not None:
            self._opening, self._state = marker, "open" if marker == OPEN else "name"
        return marker is not None

    def _in_open(self, *, final: bool) -> bool:
        text = self._buffer.lstrip()
        marker = next((marker for marker in (OPEN, FUNCTION) if text.startswith(marker)), None)
        if marker is not None:
            size = len(self._buffer) - len(text) + len(marker)
            self._opening, self._buffer = self._opening + self._buffer[:size], self._buffer[size:]
            self._state = "open" if marker == OPEN else "name"
            return True
        if not final and any(marker.startswith(text) for marker in (OPEN, FUNCTION)):
            return False
        self._back_to_text()
        return True

    def _in_name(self, *, final: bool) -> bool:
        name, end, rest = self._buffer.partition(">")
        if not end and not final:
            return False
        name = name.strip()
        if not end or len(name.split()) != 1 or not self._offers(name):
            self._back_to_text()
            return True
        self._call(name)
        self._buffer, self._state, self._told = rest, "body", 0
        self._function = self._functions.get(name)
        return True

    def _in_body(self, *, final: bool) -> bool:
        _, marker = self._take_until(PARAMETER, END_FUNCTION, CLOSE, final=final)
        if marker is not None:
            self._follow(marker)
        elif final:
            self._end()
        return marker is not None

    def _in_key(self, *, final: bool) -> bool:
        key, end, rest = self._buffer.partition(">")
        if end:
            self._key, self._buffer, self._state = key.strip(), rest, "value"
            self._schema = None if self._function is None else _schema_of(self._function.parameters, self._key)
            self._kinds = frozenset(types_of(self._schema, self._schema or {}))
        return bool(end)

    def _in_value(self, *, final: bool) -> bool:
        text, marker, rest = split_value(self._buffer, quoted=is_json(self._kinds), final=final)
        if marker is None:
            return False
        self._buffer = rest
        self._argue(("{" if self._told == 0 else ", ") + f"{json.dumps(self._key)}: {self._as_json(text)}")
        self._told += 1
        self._follow(marker)
        return True

    def _in_close(self, *, final: bool) -> bool:
        if not self._skip_marker(CLOSE, final=final):
            return False
        self._state = "text"
        return True

    def _follow(self, marker: str) -> None:
        if marker == PARAMETER:
            self._state = "key"
        elif marker == END_PARAMETER:
            self._state = "body"
        else:
            self._end()
            self._state = "close" if marker == END_FUNCTION else "text"

    def _end(self) -> None:
        self._argue("}" if self._told else "{}")
        self._state = "text"

    def _back_to_text(self) -> None:
        """Treat the text that was read as content, because it is no call."""
        self._say(self._opening)
        self._state = "text"

    def _as_json(self, text: str) -> str:
        text = text.removeprefix("\n").removesuffix("\n")
        schema, kinds = self._schema, self._kinds
        if "null" in kinds and text.strip() == "null":
            return "null"
        if is_json(kinds):
            for written in (text, text.strip().lower() if "boolean" in kinds else text):
                try:
                    return json.dumps(json.loads(written), ensure_ascii=False, allow_nan=False)
                except (ValueError, RecursionError):
                    continue
        elif schema is not None:
            word = _word(text, schema)
            if word is not None:
                return word
        return json.dumps(text, ensure_ascii=False)


def split_value(text: str, *, quoted: bool, final: bool) -> tuple[str, str | None, str]:
    """Split `text` into a parameter's value, the tag that ends it, and the rest. The tag is None if the value has not
    ended.

    With `quoted`, a tag inside a JSON string of the value does not end it. Strings must then end on their line and the
    value must be JSON; otherwise the first tag ends the value. `final` says that no more text follows.
    """
    first = _TAG.search(text)
    if first is None:
        return "", None, text
    end: re.Match[str] | None = _tag_after_strings(text, final=final) if quoted else first
    if end is None and final:
        end = first
    if end is None:
        return "", None, text
    if end.start() != first.start() and not _is_json_text(text[: end.start()]):
        end = first
    return text[: end.start()], end[0], text[end.end() :]


def _tag_after_strings(text: str, *, final: bool) -> re.Match[str] | None:
    """Return the first tag outside of JSON strings, or the first tag of all if a string does not end. None if that
    depends on text to come."""
    for found in _STRING_OR_TAG.finditer(text):
        if found["tag"]:
            return _TAG.match(text, found.start())
        if not found["end"]:
            is_open = found.end() == len(text) and not final
            return None if is_open else _TAG.search(text)
    return None


def _is_json_text(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def is_json(kinds: Set[str]) -> bool:
    """Return True if a value of the JSON types `kinds` is written as JSON. Strings and values of unknown type are
    written as plain text."""
    return bool(kinds) and "string" not in kinds


def _schema_of(parameters: dict[str, Any], key: str) -> dict[str, Any] | None:
    """Return the schema of the parameter `key`; None if there is none or it cannot be read."""
    if not isinstance(parameters.get("properties", {}), dict):
        return None
    try:
        return property_schema(parameters, key)
    except (ValueError, RecursionError):
        return None


def _word(text: str, schema: dict[str, Any]) -> str | None:
    """Return `text` as JSON if it is a value of `enum` or `const` other than a string; otherwise None."""
    words = [word for part in alternatives(schema, schema) for word in words_of(part) or ()]
    if text in [word for word in words if isinstance(word, str)]:
        return None
    try:
        # as text, because 1, 1.0 and True are equal
        written = json.dumps(json.loads(text), sort_keys=True, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    others = (word for word in words if not isinstance(word, str))
    return written if any(written == json.dumps(word, sort_keys=True) for word in others) else None
