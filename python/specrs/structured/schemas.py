"""Prepares JSON schemas for a grammar: removes keywords that grammars ignore, closes objects, and finds the place of an
error.

Compiles nothing itself. Imports only the standard library, because a worker process loads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Values of `format` that the grammar library enforces. With "unknown" it allows any text."""
DATA_KEYWORDS = ("const", "enum", "default", "examples")
"""Keywords whose value is data: keys inside it are not keywords."""
MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas: its keys are names, even if they look like keywords."""
LOCATE_SECONDS = 1.0
"""Maximum seconds to search for the place of an error."""


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield `schema` and every schema inside it that is an object, outer ones first.

    A caller may change the yielded object before it takes the next one.
    """
    if isinstance(schema, list):
        for item in schema:
            yield from subschemas(item)
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in list(schema.items()):
        if key in MAP_KEYWORDS:
            for inner in value.values() if isinstance(value, dict) else ():
                yield from subschemas(inner)
        elif key not in DATA_KEYWORDS:
            yield from subschemas(value)


def close_objects(schema: Any) -> Any:
    """Forbid further properties wherever a schema lists `properties` and has no `additionalProperties`.

    Changes `schema` in place and returns it.
    """
    for inner in subschemas(schema):
        if "properties" in inner:
            inner.setdefault("additionalProperties", False)
    return schema


def drop_ignored(schema: Any) -> list[str]:
    """Remove the keywords that the grammar ignores: `uniqueItems`, `propertyNames` and formats it does not know.

    Without these keywords a schema only allows more texts, because the grammar has no negation. So a generated text can
    violate only the removed keywords. Changes `schema` in place. Returns the removed keywords that could have excluded
    a text, each once, a format with its value.
    """
    ignored: dict[str, None] = {}
    for inner in subschemas(schema):
        if isinstance(inner.get("uniqueItems"), bool) and inner.pop("uniqueItems"):
            ignored["uniqueItems"] = None
        if isinstance(inner.get("propertyNames"), (dict, bool)) and inner.pop("propertyNames") not in (True, {}):
            ignored["propertyNames"] = None
        name = inner.get("format")
        if isinstance(name, str) and name not in FORMATS:
            del inner["format"]
            kinds = inner.get("type", "string")
            if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
                ignored[f"format={name}"] = None
    return list(ignored)


def locate(schema: Any, fails: Callable[[Any], bool]) -> str:
    """Return the place in `schema` without which it compiles, as keywords joined by dots; empty if there is no single
    one.

    `fails` returns True if a schema does not compile. Takes at most about `LOCATE_SECONDS`. Removes values from
    `schema` and puts them back, so the order of its keys changes.
    """
    end = time.monotonic() + LOCATE_SECONDS
    path: list[str] = []
    node = schema
    while isinstance(node, (dict, list)):
        for holder, key, neutral, words in _steps(node, path):
            if time.monotonic() > end:
                return ".".join(path)
            value = holder[key]
            if neutral is None:
                del holder[key]
            else:
                holder[key] = neutral
            repaired = not fails(schema)
            holder[key] = value
            if repaired:
                path += words
                node = value
                break
        else:
            break
    return ".".join(path)


def _steps(node: Any, path: list[str]) -> Iterator[tuple[Any, Any, Any, list[str]]]:
    """Yield the values inside `node`, each as (container, key, replacement, path). The replacement None means to remove
    the value."""
    if isinstance(node, list):
        # an alternative that allows anything would hide a fault of its neighbours
        neutral = {"type": "null"} if path and path[-1] in ("anyOf", "oneOf") else True
        yield from ((node, i, neutral, [str(i)]) for i in range(len(node)))
        return
    for key in MAP_KEYWORDS:
        names = node.get(key)
        if isinstance(names, dict):
            # references still find it
            yield from ((names, name, True, [key, name]) for name in list(names))
    yield from ((node, key, None, [key]) for key in list(node))
