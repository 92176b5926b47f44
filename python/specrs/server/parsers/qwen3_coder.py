"""Tool calls of Qwen3-Coder: `<function=name><parameter=key>value</parameter></function>` between `<tool_call>` tags.

Values are text; what they are as JSON is what the function's schema says. A missing `<tool_call>` or `</parameter>` is
read as if it were there, because the models leave them out.
"""

from __future__ import annotations

import json
from typing import Any

from specrs.server.parsers.base import Function, ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


class Qwen3CoderParser(ToolParser):
    """Text and calls; each parameter is told once it is complete."""

    _state = "text"
    _function: Function | None = None
    _key = ""
    _told = 0  # parameters of the call

    def _step(self, *, final: bool) -> bool:
        advance: bool = getattr(self, f"_in_{self._state}")(final=final)
        return advance

    def _in_text(self, *, final: bool) -> bool:
        text, marker = self._take_until(OPEN, FUNCTION, final=final)
        self._say(text)
        if marker is not None:
            self._state = "open" if marker == OPEN else "name"
        return marker is not None

    def _in_open(self, *, final: bool) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(FUNCTION):
            self._buffer, self._state = text[len(FUNCTION) :], "name"
            return True
        if not final and FUNCTION.startswith(text):
            return False
        self._say(OPEN)
        self._state = "text"
        return True

    def _in_name(self, *, final: bool) -> bool:
        name, end, rest = self._buffer.partition(">")
        if not end and not final:
            return False
        if not end or len(name.split()) != 1:
            self._say(FUNCTION)
            self._state = "text"
            return True
        name = name.strip()
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
        return bool(end)

    def _in_value(self, *, final: bool) -> bool:
        text, marker, rest = split_value(self._buffer)
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

    def _as_json(self, text: str) -> str:
        text = text.removeprefix("\n").removesuffix("\n")
        properties = {} if self._function is None else self._function.parameters.get("properties")
        kinds = types_of(properties.get(self._key)) if isinstance(properties, dict) else set()
        if "null" in kinds and text.strip() == "null":
            return "null"
        if kinds and "string" not in kinds:
            for written in (text, text.strip().lower() if "boolean" in kinds else text):
                try:
                    return json.dumps(json.loads(written), ensure_ascii=False, allow_nan=False)
                except (ValueError, RecursionError):
                    continue
        return json.dumps(text, ensure_ascii=False)


def split_value(text: str) -> tuple[str, str | None, str]:
    """A value, the tag that ends it, and what follows; None: it has not ended."""
    places = [(place, tag) for tag in (END_PARAMETER, PARAMETER, END_FUNCTION) if (place := text.find(tag)) >= 0]
    if not places:
        return "", None, text
    place, tag = min(places)
    return text[:place], tag, text[place + len(tag) :]


def types_of(schema: Any) -> set[str]:
    """The JSON types that a schema names, its alternatives' included; empty where it names none."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    found = {kinds} if isinstance(kinds, str) else {kind for kind in kinds or () if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        alternatives = schema.get(key)
        for alternative in alternatives if isinstance(alternatives, list) else ():
            found |= types_of(alternative)
    return found
