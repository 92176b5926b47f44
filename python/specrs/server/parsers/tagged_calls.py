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
from specrs.server.parsers.base import Function, Run, ToolParser, beginnings, first_characters
from specrs.server.parsers.references import property_schema


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of one format. Texts between the tags of a call, before a value and after it are white space.

    `opens`: tags that may lead to a call, in any number. `inside`: the same, but only after one of `opens`. `function`
    and `end_name` enclose the function's name, `key` and `end_key` the name of a parameter. `value`: opening tag of a
    value; "" if the value follows the name directly. `wrapped`: values stand on lines of their own.
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
    _function: Function | None = None
    _key = ""
    _schema: dict[str, Any] | None = None  # of the parameter
    _kinds: frozenset[str] = frozenset()  # JSON types of the parameter
    _json: JSONValue | None = None  # the parameter's value, if it is written as JSON
    _told = 0  # parameters of the call
    _opening = ""  # the tags before the name

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.text_marks = (*cls.tags.opens, cls.tags.function)

    def _in_text(self, *, final: bool) -> bool:
        text, marker = self._take_content(final=final)
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
        gathered = self._gather(self.tags.end_name, final=final)
        if gathered is None:
            return False
        (name, end), rest = gathered, self._buffer
        self._buffer = name + (end or "") + rest
        self._begin("" if end is None else name.strip(), rest)
        return True

    def _begin(self, name: str, rest: str) -> None:
        """Begin a call of the function `name`. `rest` is the part of the buffer after the name. If the request offers
        no such function, the text is content."""
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
        key, end = self._gather(self.tags.value or self.tags.end_key, final=final) or ("", None)
        if end is None:
            return False
        if self.tags.value:
            key = key.partition(self.tags.end_key)[0]
        self._key, self._state = key.strip(), "value"
        self._schema = None if self._function is None else _schema_of(self._function.parameters, self._key)
        self._kinds = frozenset(types_of(self._schema, self._schema or {}))
        self._json = JSONValue(self.tags) if is_json(self._kinds) else None
        return True

    def _in_value(self, *, final: bool) -> bool:
        if self._json is None:
            text, marker = self._gather(*self.tags.of_values, final=final) or ("", None)
        else:
            text, marker, self._buffer = self._json.read(self._buffer, final=final)
        if marker is None:
            return False
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

    def _find_run(self) -> Run | None:
        if self._state == "value" and self._json is not None and not self._buffer:
            return self._json.run
        return super()._find_run()

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


class JSONValue:
    """Reader of a parameter's value that is written as JSON, in text that arrives in pieces. No text is searched twice.

    A tag inside a JSON string of the value does not end it. Strings must then end on their line and the value must be
    JSON; otherwise the first tag ends the value.
    """

    def __init__(self, tags: Tags) -> None:
        """Start before the value. `tags` are those of the format."""
        self._places = _places(tags.of_values)
        self._place = self._places.outside
        self._texts: list[str] = []  # of the value so far
        self._length = 0
        self._first: tuple[int, str] | None = None  # place of the first tag, and the tag

    @property
    def run(self) -> Run:
        """Run of the text that follows, if nothing of what came before is in the buffer."""
        return self._place.run

    def read(self, text: str, *, final: bool) -> tuple[str, str | None, str]:
        """Read `text` and return the value, the tag that ends it, and the text after the tag.

        The tag is None if the value has not ended. The last text is then the end of `text` that has to be read again,
        together with what follows it. `final` says that no more text follows.
        """
        begin = 0
        while (found := self._place.pattern.search(text, begin)) is not None:
            begin = found.end()
            if found["tag"]:
                if self._first is None:
                    self._first = self._length + found.start(), found[0]
                if self._place is not self._places.inside:
                    return self._end(text, found)
                begin = found.start() + 1  # a quote of the tag ends the string
            elif found[0] == '"':
                outside = self._place is self._places.outside
                self._place = self._places.inside if outside else self._places.outside
            elif found[0] == "\n":
                if self._first is not None:
                    return self._end_at_first(text)
                self._place = self._places.broken
        if final and self._first is not None:
            return self._end_at_first(text)
        end = len(text)
        if not final:
            part = self._place.part.search(text, begin)
            end = len(text) if part is None else part.start()
        self._texts.append(text[:end])
        self._length += end
        return "", None, text[end:]

    def _end(self, text: str, tag: re.Match[str]) -> tuple[str, str | None, str]:
        """End the value at `tag` of `text`, unless it is no JSON and there was an earlier tag."""
        assert self._first is not None
        value = "".join((*self._texts, text[: tag.start()]))
        if len(value) != self._first[0] and not _is_json_text(value):
            return self._end_at_first(text)
        return value, tag[0], text[tag.end() :]

    def _end_at_first(self, text: str) -> tuple[str, str | None, str]:
        assert self._first is not None
        place, tag = self._first
        written = "".join((*self._texts, text))
        return written[:place], tag, written[place + len(tag) :]


@dataclass(frozen=True, slots=True)
class _Place:
    """Place in a value: outside of its strings, inside of one, or anywhere if a string did not end on its line.

    `pattern` matches the next token that matters at this place: a tag (group `tag`), a quote, an escape, or the end of
    a line. `part` matches the end of a text that may be the beginning of such a token.
    """

    pattern: re.Pattern[str]
    part: re.Pattern[str]
    run: Run


@dataclass(frozen=True, slots=True)
class _Places:
    outside: _Place
    inside: _Place
    broken: _Place


@cache
def _places(tags: tuple[str, ...]) -> _Places:
    tag, part = f"(?P<tag>{'|'.join(map(re.escape, tags))})", beginnings(tags)
    first = first_characters(tags).pattern

    def place(others: str = "", parts: str = "", deciding: str = "") -> _Place:
        return _Place(re.compile(tag + others), re.compile(part + parts), Run("kept", re.compile(first + deciding)))

    inside = place(r'|\\["\\]|["\n]', r"|\\\Z", r'|["\\\n]')
    return _Places(outside=place('|"', deciding='|"'), inside=inside, broken=place())


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
