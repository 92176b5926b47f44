"""Tool calls of Qwen3-Coder: `<function=name><parameter=key>value</parameter></function>` between `<tool_call>` tags.

Values are text; what they are as JSON is what the function's schema says. A missing `<tool_call>` or `</parameter>` is
read as if it were there, because the models leave them out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from specrs.server.parsers.base import Function, ToolParser
from specrs.server.parsers.references import property_schema, resolve

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MAX_DEPTH = 8
"""Alternatives inside alternatives that are followed to find a value's type."""


class Qwen3CoderParser(ToolParser):
    """Text and calls; each parameter is told once it is complete."""

    _state = "text"
    _function: Function | None = None
    _key = ""
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

    def _back_to_text(self) -> None:
        """What was read is no call."""
        self._say(self._opening)
        self._state = "text"

    def _as_json(self, text: str) -> str:
        text = text.removeprefix("\n").removesuffix("\n")
        schema = None if self._function is None else _schema_of(self._function.parameters, self._key)
        kinds = types_of(schema, schema or {})
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


def split_value(text: str) -> tuple[str, str | None, str]:
    """A value, the tag that ends it, and what follows; None: it has not ended."""
    places = [(place, tag) for tag in (END_PARAMETER, PARAMETER, END_FUNCTION) if (place := text.find(tag)) >= 0]
    if not places:
        return "", None, text
    place, tag = min(places)
    return text[:place], tag, text[place + len(tag) :]


def is_json(kinds: set[str]) -> bool:
    """Whether a value of these JSON types is written as JSON. Text stands for itself, and so does what is not known."""
    return bool(kinds) and "string" not in kinds


def types_of(schema: Any, root: dict[str, Any]) -> set[str]:
    """The JSON types that `schema` of the document `root` allows; empty if it names none.

    Follows references and alternatives; `enum` and `const` have the types of their values. A malformed `type` names
    none.
    """
    found: set[str] = set()
    for part in alternatives(schema, root):
        words = words_of(part)
        found |= named_types(part) if words is None else {_JSON_TYPES[type(word)] for word in words}
    return found


def named_types(schema: dict[str, Any]) -> set[str]:
    """The names in the keyword `type`; empty without it or if it is malformed."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    return {kind for kind in kinds if isinstance(kind, str)} if isinstance(kinds, list) else set()


def words_of(schema: dict[str, Any]) -> list[Any] | None:
    """The values of `enum` or `const` that `type` allows; None without such a keyword or if it is malformed."""
    words = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(words, list):
        return None
    kinds = named_types(schema)
    return [word for word in words if not kinds or _has_type(word, kinds)]


_JSON_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


def _schema_of(parameters: dict[str, Any], key: str) -> dict[str, Any] | None:
    """The schema of one parameter; None if it is not known or cannot be read."""
    properties = parameters.get("properties")
    if not isinstance(properties, dict) or key not in properties:
        return None
    try:
        return property_schema(parameters, key)
    except (ValueError, RecursionError):
        return None


def _has_type(value: Any, kinds: set[str]) -> bool:
    kind = _JSON_TYPES[type(value)]
    whole = kind == "number" and value.is_integer()
    return kind in kinds or (kind == "integer" and "number" in kinds) or (whole and "integer" in kinds)


def _word(text: str, schema: dict[str, Any]) -> str | None:
    """`text` as JSON if it writes a value of `enum` or `const` that is no string; None otherwise."""
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


def alternatives(schema: Any, root: dict[str, Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    """Schemas that stand for `schema`, without references and alternatives of their own."""
    schema = resolve(schema, root)
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return
    inner = [part for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list) for part in schema[key]]
    if not inner or "type" in schema:
        yield schema
    for part in inner:
        yield from alternatives(part, root, depth + 1)
