"""Calls that a request demands: the JSON schema that holds the text to them, and its parsers.

`tool_choice` "required": a list of `{"name", "parameters"}`. A named one: its arguments, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrs.server.parsers.base import Function, ToolParser
from specrs.server.parsers.json_calls import CallReader, JSONCallParser

_DATA = ("const", "enum", "default", "examples")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class RequiredParser(JSONCallParser):
    """The list. Text that leaves it, which no grammar allows, becomes content."""

    _left = False

    def _step(self, *, final: bool) -> bool:
        if self._reader is not None:
            if not self._read_call():
                return False
            self._left = not self._reader.announced
            self._say(self._give_up())
            return True
        if not self._left:
            self._buffer = self._buffer.lstrip("[], \t\r\n")
            if self._buffer.startswith("{"):
                self._reader = CallReader()
                return True
            self._left = bool(self._buffer)
        self._say(self._buffer)
        self._buffer = ""
        return False


class NamedParser(ToolParser):
    """All text is the arguments of the one function."""

    def _step(self, *, final: bool) -> bool:
        if not self._called:
            (name,) = self._functions
            self._call(name)
        self._argue(self._buffer)
        self._buffer = ""
        return False


def required_schema(functions: Sequence[Function], *, parallel: bool) -> dict[str, Any]:
    """The schema of a list of calls of any of `functions`; of one call unless `parallel`."""
    calls, definitions = [], {}
    for i, function in enumerate(functions):
        definitions[f"tool{i}"] = _moved(function.parameters, f"#/$defs/tool{i}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "parameters": {"$ref": f"#/$defs/tool{i}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    bound = {} if parallel else {"maxItems": 1}
    return {"$defs": definitions, "type": "array", "items": {"anyOf": calls}, "minItems": 1, **bound}


def _moved(schema: Any, place: str, *, names: bool = False) -> Any:
    """`schema` as it reads at `place` of another document: its references to itself point there.

    `names`: its keys are names of schemas, and no keywords.
    """
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if not names and key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        elif not names and key in _DATA:
            moved[key] = value
        else:
            moved[key] = _moved(value, place, names=not names and key in _BY_NAME)
    return moved
