"""Grammars that the server composes: a Lark text that contains JSON schemas of one request. Compiles nothing.

`StructuredOutputsParams` is what a user may ask for. A server has several schemas if tools are offered together with a
response format. Its errors have to say which field of the body a schema came from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from specrs.errors import InvalidRequestError, invalid
from specrs.structured.params import MAX_SPECIFICATION_LENGTH, StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """One JSON schema of a composed grammar. `field`: the field of the request that it came from.

    `schema`: JSON text. `closed`: objects that do not say otherwise allow only the properties that they list.
    """

    field: str
    schema: str
    closed: bool = False


@dataclass(frozen=True, kw_only=True)
class ComposedGrammar(StructuredOutputsParams):
    """A grammar in Lark's syntax. Immutable; `disable_any_whitespace` and `whitespace_pattern` apply to all of it.

    `lark`: rules from `start` on. The rule `schema_i` stands for `parts[i]`. White space may stand between any two
    terminals. `sources`: schemas that the rules write part by part. An error in the rules, or in a part with the same
    field, names the source. `checked`: fields of `sources` whose schemas must also compile by themselves.

    Raises `InvalidRequestError` if the schemas are too long.
    """

    lark: str = ""
    parts: tuple[SchemaPart, ...] = ()
    sources: tuple[SchemaPart, ...] = ()
    checked: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        length = sum(len(part.schema) for part in self.parts)
        if length > MAX_SPECIFICATION_LENGTH:
            raise InvalidRequestError(
                f"{self._whole}: {length} characters of schemas; must be at most {MAX_SPECIFICATION_LENGTH}"
            )

    def specification(self) -> str:
        """Everything that a compiler needs, as JSON."""
        values: dict[str, Any] = {
            "lark": self.lark,
            "parts": [[part.field, part.schema, part.closed] for part in self.parts],
            "sources": [[part.field, part.schema, part.closed] for part in self.sources],
            "checked": self.checked,
            "disable_any_whitespace": self.disable_any_whitespace,
            "whitespace_pattern": self.whitespace_pattern,
        }
        return json.dumps(values, sort_keys=True)

    def refusal(self, why: str, field: str | None = None) -> InvalidRequestError:
        """Return the error for `field`, the field of a schema or an option; None: for the whole grammar."""
        schemas = {part.field: json.loads(part.schema) for part in (*self.parts, *self.sources)}
        if field is None and len(schemas) > 1:
            return InvalidRequestError(f"{self._whole}: {why}")
        name = field or self._whole
        if name in schemas:
            return invalid(InvalidRequestError, name, schemas[name], why)
        return invalid(InvalidRequestError, f"structured_outputs.{name}", getattr(self, name, None), why)

    @property
    def _whole(self) -> str:
        fields = {part.field for part in (*self.parts, *self.sources)}
        return fields.pop() if len(fields) == 1 else "tools"
