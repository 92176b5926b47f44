"""Reader of tool calls whose arguments are written one by one between tags, as `<parameter=key>value</parameter>`.
Knows no format.

Values are text; the function's schema says what JSON they stand for. A tag inside a string of such JSON ends nothing.
Tags around a call and at the end of a value may be missing, because models leave them out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from specrs.server.parsers.alternatives import alternatives, types_of, words_of
from specrs.server.parsers.base import Function, ToolParser
from specrs.server.parsers.references import property_schema


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of one format. Texts between the tags of a call, before a value and after it are white space.

    `opens`: tags that may lead to a call, in any number. `inside`: the same, but only after one of `opens`. `function`
    and `end_name` enclose the function's name, `key` and `end_key` the name of a parameter. `value`: opening tag of a
    value; "" if the value follows the name at once. `wrapped`: values stand on lines of their own.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    function: str
    end_name: str
    end_function: str
    key: str
    end_key: str
    end_value: str
    value: str = ""
    inside: tuple[str, ...] = ()
    wrapped: bool = False

    @property
    def of_values(self) -> tuple[str, ...]:
        """Tags that end a value."""
        return self.end_value, self.key, self.end_function


class TaggedCallParser(ToolParser):
    """Parser of text and calls with the tags `tags`. Each parameter is reported once it is complete."""

    tags: ClassVar[Tags]
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
        text, marker = self._take_until(*self.tags.opens, self.tags.function, final=final)
        self._say(text)
        if marker is not None:
            self._opening, self._state = marker, "name" if marker == self.tags.function else "open"
        return marker is not None

    def _in_open(self, *, final: bool) -> bool:
        text = self._buffer.lstrip()
        markers = (*self.tags.opens, *self.tags.inside, self.tags.function)
        marker = next((marker for marker in markers if text.startswith(marker)), None)
        if marker is not None:
            size = len(self._buffer) - len(text) + len(marker)
            self._opening, self._buffer = self._opening + self._buffer[:size], self._buffer[size:]
            self._state = "name" if marker == self.tags.function else "open"
            return True
        if not final and any(marker.startswith(text) for marker in markers):
            return False
        self._back_to_text()
        return True

    def _in_name(self, *, final: bool) -> bool:
        name, end, rest = self._buffer.partition(self.tags.end_name)
        if not end and not final:
            return False
        self._begin(name.strip() if end else "", rest)
        return True

    def _begin(self, name: str, rest: str) -> None:
        """Begin a call of `name`, which `rest` of the buffer follows. If there is no such function, it is content."""
        if len(name.split()) != 1 or not self._offers(name):
            self._back_to_text()
            return
        self._call(name)
        self._buffer, self._state, self._told = rest, "body", 0
        self._function = self._functions.get(name)

    def _in_body(self, *, final: bool) -> bool:
        _, marker = self._take_until(self.tags.key, self.tags.end_function, *self.tags.closes, final=final)
        if marker is not None:
            self._follow(marker)
        elif final:
            self._end()
        return marker is not None

    def _in_key(self, *, final: bool) -> bool:
        key, end, rest = self._buffer.partition(self.tags.value or self.tags.end_key)
        if end:
            if self.tags.value:
                key = key.partition(self.tags.end_key)[0]
            self._key, self._buffer, self._state = key.strip(), rest, "value"
            self._schema = None if self._function is None else _schema_of(self._function.parameters, self._key)
            self._kinds = frozenset(types_of(self._schema, self._schema or {}))
        return bool(end)

    def _in_value(self, *, final: bool) -> bool:
        text, marker, rest = split_value(self._buffer, self.tags, quoted=is_json(self._kinds), final=final)
        if marker is None:
            return False
        self._buffer = rest
        self._argue(("{" if self._told == 0 else ", ") + f"{json.dumps(self._key)}: {self._as_json(text)}")
        self._told += 1
        self._follow(marker)
        return True

    def _in_close(self, *, final: bool) -> bool:
        text = self._buffer.lstrip()
        marker = next((marker for marker in self.tags.closes if text.startswith(marker)), None)
        if marker is not None:
            self._buffer = text[len(marker) :]
            return True
        if any(marker.startswith(text) for marker in self.tags.closes):
            if not final:
                return False
            self._buffer = ""  # a token limit cut it off
        self._state = "text"
        return True

    def _follow(self, marker: str) -> None:
        if marker == self.tags.key:
            self._state = "key"
        elif marker == self.tags.end_value:
            self._state = "body"
        else:
            self._end()
            self._state = "close"

    def _end(self) -> None:
        self._argue("}" if self._told else "{}")
        self._state = "text"

    def _back_to_text(self) -> None:
        """Treat the text that was read as content, because it is no call."""
        self._say(self._opening)
        self._state = "text"

    def _as_json(self, text: str) -> str:
        if self.tags.wrapped:
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


@cache
def _patterns(tags: Tags) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the pattern of a tag that ends a value, and that of a JSON string on one line or such a tag. A string has
    the group `end` if it is closed, a tag the group `tag`."""
    tag = "|".join(map(re.escape, tags.of_values))
    return re.compile(tag), re.compile(rf'"(?:[^"\\\n]|\\[^\n]?)*(?P<end>"?)|(?P<tag>{tag})')


def split_value(text: str, tags: Tags, *, quoted: bool, final: bool) -> tuple[str, str | None, str]:
    """Split `text` into a parameter's value, the tag of `tags` that ends it, and the rest. The tag is None if the value
    has not ended.

    With `quoted`, a tag inside a JSON string of the value does not end it. Strings must then end on their line and the
    value must be JSON; otherwise the first tag ends the value. `final` says that no more text follows.
    """
    first = _patterns(tags)[0].search(text)
    if first is None:
        return "", None, text
    end: re.Match[str] | None = _tag_after_strings(text, tags, final=final) if quoted else first
    if end is None and final:
        end = first
    if end is None:
        return "", None, text
    if end.start() != first.start() and not _is_json_text(text[: end.start()]):
        end = first
    return text[: end.start()], end[0], text[end.end() :]


def _tag_after_strings(text: str, tags: Tags, *, final: bool) -> re.Match[str] | None:
    """Return the first tag outside of JSON strings, or the first tag of all if a string does not end. None if that
    depends on text to come."""
    tag, string_or_tag = _patterns(tags)
    for found in string_or_tag.finditer(text):
        if found["tag"]:
            return tag.match(text, found.start())
        if not found["end"]:
            is_open = found.end() == len(text) and not final
            return None if is_open else tag.search(text)
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
