"""What becomes of fields of a request's body that have no effect here: taken with a warning, or rejected with a reason.

The declarations stand at the fields themselves, as metadata of the models in `protocol` and `responses_protocol`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from logging import getLogger
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

logger = getLogger("specrs")

WARNINGS: ContextVar[list[str]] = ContextVar("warnings")
"""Warnings about the request that the current task serves. Its answer carries them in the header `X-Warning`."""
_MAX_HEADER = 1000
"""Characters of the header. Proxies bound all headers of an answer together, often to 4 KiB."""
_MAX_GIVEN = 100
"""Warnings about one request. The header has no place for as many."""
_MAX_LOGGED = 1000
"""Different warnings that are logged, each once; clients send the same fields with every request."""
_logged: set[str] = set()


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Metadata of a field that is taken and changes nothing. Values other than null and `silent` give a warning.

    `reason` completes the warning "field: has no effect; ...".
    """

    reason: str
    silent: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """Metadata of a field of which nothing is implemented. Values other than null and `allowed` are an error.

    `reason` completes the error "field=value: not implemented; ..." and says what to do instead.
    """

    reason: str
    allowed: tuple[object, ...] = ()

    def check(self, given: object) -> object:
        """The value itself. Raises `PydanticCustomError` unless it is allowed."""
        # 0 equals False, and 1 True
        if given is None or any(type(given) is type(value) and given == value for value in self.allowed):
            return given
        raise PydanticCustomError("not_implemented", "not implemented; {reason}", {"reason": self.reason})

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A schema whose only check is `check`."""
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The allowed values."""
        return {"enum": [None, *self.allowed]}


@cache
def dispositions(model: type[BaseModel]) -> Mapping[str, NoEffect | Rejected]:
    """The fields of a model that have no effect, by their names in JSON."""
    return {
        field.alias or name: entry
        for name, field in model.model_fields.items()
        for entry in field.metadata
        if isinstance(entry, (NoEffect, Rejected))
    }


def unused(body: BaseModel, at: str = "") -> Iterator[str]:
    """A warning for each field of `body`, and of the models in it, that was given and has no effect.

    A list with `places` gives the index that each of its items had in the body.
    """
    declared = dispositions(type(body))
    for name, field in type(body).model_fields.items():
        value, name = getattr(body, name), field.alias or name
        entry = declared.get(name)
        if isinstance(entry, NoEffect):
            if value is not None and not any(type(value) is type(one) and value == one for one in entry.silent):
                yield f"{at}{name}: has no effect; {entry.reason}"
        elif isinstance(value, BaseModel):
            yield from unused(value, f"{at}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for i, item in zip(getattr(value, "places", range(len(value))), value, strict=True):
                yield from unused(item, f"{at}{name}[{i}].")


def warn(text: str, *, log: bool = True) -> None:
    """Tell the client of a part of its request that has no effect. With `log`, log it the first time."""
    given = WARNINGS.get([])
    if text in given or len(given) == _MAX_GIVEN:
        return
    given.append(text)
    if log and text not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(text)
        logger.warning("%s (logged once)", text)


def warning_header() -> list[tuple[bytes, bytes]]:
    """The header `X-Warning` with the warnings of the current request; empty without any."""
    text = "; ".join(WARNINGS.get([])).encode("ascii", "backslashreplace").decode()
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    text = text if len(text) <= _MAX_HEADER else text[: _MAX_HEADER - 3] + "..."
    return [(b"x-warning", text.encode())] if text else []
