"""Makes JSON schemas from a seed. Every schema can be satisfied, and every text of it has a bounded length. Uses no
grammar library.

Bounded: strings, arrays and objects have maxima, numbers have ranges and digits by `multipleOf`, and white space is the
caller's to forbid. So a random text ends, and a model cannot go on for ever.
"""

from __future__ import annotations

import random
from typing import Any

PATTERNS = ("^[a-z]{1,6}$", "^[A-Z][a-z]{0,4}-[0-9]{2}$", "^(red|green|blue)(ish)?$", "^#[0-9a-f]{6}$")
FORMATS = ("date", "uuid", "ipv4")
NAMES = ("name", "size", "tags", "left", "right", "id", "on", "value", "properties", "a b", "é", 'q"q')


def make_schema(seed: int) -> dict[str, Any]:
    """Return the schema of a seed. Its root is usually an object or an array."""
    rng = random.Random(seed)
    kind = rng.choice((_object, _object, _object, _array, _any_of, _tuple, _string, _integer))
    schema = kind(rng, 3)
    if rng.random() < 0.2:
        return {"$defs": {"part": _leaf(rng)}, "type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}
    return schema


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0:
        return _leaf(rng)
    kinds = (_object, _array, _tuple, _any_of, _string, _integer, _number, _enum, _const, _literal)
    return rng.choice(kinds)(rng, depth - 1)


def _leaf(rng: random.Random) -> dict[str, Any]:
    return rng.choice((_string, _integer, _number, _enum, _const, _literal))(rng, 0)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 3))
    required = [name for name in names if rng.random() < 0.6]
    properties = {name: _any(rng, depth) for name in names}
    rng.shuffle(required)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [_any(rng, depth) for _ in range(rng.randint(1, 2))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    choice = rng.randrange(4)
    if choice == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if choice == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    keyword = rng.choice(("minimum", "exclusiveMinimum"))
    return {"type": "integer", keyword: low, "maximum": low + rng.choice((1, 7, 250, 10**6))}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 40), "multipleOf": 0.25}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", 'a"b\\', "日本", 7, -1.5, True, None, [1, "x"], {"k": []}], rng.randint(1, 4))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["fixed", 42, None, False, {"a": [1]}])}


def _literal(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(("boolean", "null"))}
