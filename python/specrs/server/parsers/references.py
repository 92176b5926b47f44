"""Makes the schema of a single argument, which is a property of a function's parameters, a document that can be read
alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

from specrs.structured.schemas import DATA_KEYWORDS, MAP_KEYWORDS, subschemas

_PLACE = "#/$defs/parameters"


def property_schema(parameters: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of the argument `name` as a document. If it has references, the document contains all of
    `parameters`.

    A name that is not in `properties` gets `additionalProperties`, or a schema that allows no value if
    `patternProperties` may apply to it. References are rewritten as pointers from the document's root; `$id` and
    `$anchor` are left out.

    Raises `ValueError` if `$id` or a reference is no address, and `RecursionError` if the schema nests too deep.
    """
    draft = {"$schema": parameters["$schema"]} if "$schema" in parameters else {}
    properties = parameters.get("properties", {})
    place = f"properties/{_escaped(name)}" if name in properties else "additionalProperties"
    schema = properties[name] if name in properties else additional_schema(parameters)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict) or not any("$ref" in inner for inner in subschemas(schema)):
        return draft | schema if isinstance(schema, dict) else {"enum": []}
    targets = {uri: _PLACE + pointer for uri, pointer in _addresses(parameters, "", "")}
    moved = _moved(parameters, "", targets)
    return draft | {"$defs": {"parameters": moved}, "$ref": f"{_PLACE}/{place}"}


def additional_schema(parameters: dict[str, Any]) -> Any:
    """Return the schema of arguments that `properties` does not name: `additionalProperties`, or False if there are
    `patternProperties`."""
    return False if parameters.get("patternProperties") else parameters.get("additionalProperties", True)


def target(reference: str, root: dict[str, Any]) -> Any:
    """Return the schema that `reference` points to, such as `#/$defs/Point`; None if it points to nothing.

    `root` is a document from `property_schema`, in which all references are pointers from the root.
    """
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = _unescaped(part)
        if isinstance(found, list):
            found = found[int(key)] if _is_index(key) and int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found


def _is_index(key: str) -> bool:
    # Python reads no integer of more than 4300 digits
    return key.isdecimal() and len(key) < 10


def _addresses(schema: Any, base: str, pointer: str, *, names: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (absolute address, pointer from the root) for all resources and anchors of `schema`."""
    if isinstance(schema, list):
        for i, item in enumerate(schema):
            yield from _addresses(item, base, f"{pointer}/{i}")
    if not isinstance(schema, dict):
        return
    if not names:
        if isinstance(schema.get("$id"), str):
            base = urldefrag(urljoin(base, schema["$id"])).url
        if isinstance(schema.get("$id"), str) or pointer == "":
            yield base, pointer
        if isinstance(schema.get("$anchor"), str):
            yield f"{base}#{schema['$anchor']}", pointer
    for key, value in schema.items():
        if names or key not in DATA_KEYWORDS:
            yield from _addresses(value, base, f"{pointer}/{_escaped(key)}", names=not names and key in MAP_KEYWORDS)


def _moved(schema: Any, base: str, targets: dict[str, str], *, names: bool = False) -> Any:
    if isinstance(schema, list):
        return [_moved(item, base, targets) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if not names and isinstance(schema.get("$id"), str):
        base = urldefrag(urljoin(base, schema["$id"])).url
    moved = {}
    for key, value in schema.items():
        if not names and key in ("$id", "$anchor", "$schema") and isinstance(value, str):
            continue
        if not names and key == "$ref" and isinstance(value, str):
            moved[key] = _target(value, base, targets)
        elif not names and key in DATA_KEYWORDS:
            moved[key] = value
        else:
            moved[key] = _moved(value, base, targets, names=not names and key in MAP_KEYWORDS)
    return moved


def _target(reference: str, base: str, targets: dict[str, str]) -> str:
    """Return the pointer that a reference has in the new document. A reference that leads nowhere in it is
    unchanged."""
    address, fragment = urldefrag(urljoin(base, reference) if not reference.startswith("#") else base + reference)
    if fragment and not fragment.startswith("/"):
        return targets.get(f"{address}#{fragment}", reference)
    return targets[address] + fragment if address in targets else reference


def _escaped(key: str) -> str:
    return quote(key.replace("~", "~0").replace("/", "~1"))


def _unescaped(part: str) -> str:
    return unquote(part).replace("~1", "/").replace("~0", "~")
