"""Reads what a JSON schema allows for a single value: its types, the values of `enum`, and the lengths of a text.
Validates nothing.

A schema is split into plain schemas, which have no references and no `allOf`, `anyOf` or `oneOf`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from specrs.server.parsers.references import target

MAX_DEPTH = 32
"""Maximum depth of schemas inside schemas."""
MAX_STEPS = 10_000
"""Maximum number of schemas that are visited or merged to split one schema. Values of a merged `enum` count, too."""
_ALTERNATIVES = ("anyOf", "oneOf")
_COMBINING = ("$ref", "allOf", *_ALTERNATIVES)
_JSON_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


def alternatives(schema: Any, root: dict[str, Any]) -> list[dict[str, Any]]:
    """Return plain schemas that together mean `schema` of the document `root`: a value fits `schema` if and only if it
    fits one of them.

    `type`, `enum`, `const`, `minLength` and `maxLength` are exact. Of other keywords only the names are reliable: if
    two schemas with the same keyword are merged, one of the two values is kept. `oneOf` is read as `anyOf`, and
    malformed keywords are ignored. For a schema that is too large, not all alternatives are returned.
    """
    return _Splitter(root).split(schema, (), 0)


def types_of(schema: Any, root: dict[str, Any]) -> set[str]:
    """Return the JSON types that `schema` of the document `root` allows; empty if it names none.

    `enum` and `const` have the types of their values. A malformed `type` names none.
    """
    found: set[str] = set()
    for part in alternatives(schema, root):
        words = words_of(part)
        found |= named_types(part) if words is None else {_JSON_TYPES[type(word)] for word in words}
    return found


def named_types(schema: dict[str, Any]) -> set[str]:
    """Return the type names in the keyword `type`; empty if it is missing or malformed."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    return {kind for kind in kinds if isinstance(kind, str)} if isinstance(kinds, list) else set()


def words_of(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values of `enum` and `const` that `type`, `minLength` and `maxLength` allow.

    None if the schema has neither `enum` nor `const`, or if `enum` is malformed.
    """
    words = _listed(schema)
    if words is None:
        return None
    kinds, (low, high) = named_types(schema), lengths_of(schema)

    def fits(word: Any) -> bool:
        if isinstance(word, str) and not (low <= len(word) and (high is None or len(word) <= high)):
            return False
        return not kinds or _has_type(word, kinds)

    return [word for word in words if fits(word)]


def lengths_of(schema: dict[str, Any]) -> tuple[int, int | None]:
    """Return `minLength` and `maxLength`; 0 and None if they are missing or malformed."""
    low, high = schema.get("minLength"), schema.get("maxLength")
    return (low if type(low) is int and low >= 0 else 0), (high if type(high) is int and high >= 0 else None)


class _Splitter:
    """Splitter of the schemas of one document, which stops after `MAX_STEPS`."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._steps = MAX_STEPS

    def split(self, schema: Any, within: tuple[str, ...], depth: int) -> list[dict[str, Any]]:
        """Return the alternatives of `schema`. `within` are the references that were followed to reach it, `depth` its
        nesting."""
        if schema is True:
            return [{}]
        if not isinstance(schema, dict) or depth > MAX_DEPTH or not self._step():
            return []
        depth += 1
        found: list[dict[str, Any]] = [{key: value for key, value in schema.items() if key not in _COMBINING}]
        reference = schema.get("$ref")
        if isinstance(reference, str):
            # a reference to what it stands in allows no value
            known = reference in within
            inner = [] if known else self.split(target(reference, self._root), (*within, reference), depth)
            found = self._both(found, inner)
        for key in _ALTERNATIVES:
            if isinstance(schema.get(key), list):
                found = self._both(found, [part for one in schema[key] for part in self.split(one, within, depth)])
        for one in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            found = self._both(found, self.split(one, within, depth))
        return found

    def _both(self, first: Iterable[dict[str, Any]], second: list[dict[str, Any]]) -> list[dict[str, Any]]:
        merged = [self._merged(one, other) for one in first for other in second if self._step()]
        return [one for one in merged if one is not None]

    def _merged(self, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any] | None:
        """Return a plain schema for the values that fit both schemas; None if no value does."""
        merged = {**first, **second}
        kinds, others = named_types(first), named_types(second)
        if kinds and others:
            common = kinds & others
            if any("integer" in one and "number" in other for one, other in ((kinds, others), (others, kinds))):
                common.add("integer")
            if not common:
                return None
            merged["type"] = sorted(common)
        elif kinds or others:
            merged["type"] = sorted(kinds or others)
        words, more = _listed(first), _listed(second)
        if words is not None or more is not None:
            merged.pop("const", None)
            merged["enum"] = more if words is None else words if more is None else self._common(words, more)
        bounds = lengths_of(first), lengths_of(second)
        merged["minLength"] = max(low for low, _ in bounds)
        highs = [high for _, high in bounds if high is not None]
        if highs:
            merged["maxLength"] = min(highs)
        return merged

    def _common(self, words: list[Any], more: list[Any]) -> list[Any]:
        if not self._step(len(words) + len(more)):
            return []
        # as text, because 1 and True are equal in Python
        known = {_sorted_text(word) for word in more}
        return [word for word in words if _sorted_text(word) in known]

    def _step(self, count: int = 1) -> bool:
        self._steps -= count
        return self._steps >= 0


def _listed(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values that both `enum` and `const` allow; None if the schema has neither."""
    words, constant = schema.get("enum"), schema.get("const")
    if not isinstance(words, list):
        return [constant] if "const" in schema else None
    if "const" not in schema:
        return words
    return [constant] if _sorted_text(constant) in map(_sorted_text, words) else []


def _sorted_text(word: Any) -> str:
    """Return JSON with sorted keys, which is equal for equal values."""
    return json.dumps(word, sort_keys=True)


def _has_type(value: Any, kinds: set[str]) -> bool:
    kind = _JSON_TYPES[type(value)]
    whole = kind == "number" and value.is_integer()
    return kind in kinds or (kind == "integer" and "number" in kinds) or (whole and "integer" in kinds)
