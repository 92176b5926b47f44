"""Declares request fields that have no effect here: either accepted with a warning, or rejected with a reason.

The declarations are metadata of the fields of the models in `protocol` and `responses_protocol`.
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
"""Maximum number of characters of the header `X-Warning`. Proxies limit all headers of an answer together, often to 4
KiB."""
_MAX_GIVEN = 100
"""Maximum number of warnings about one request. The header cannot hold more."""
_MAX_LOGGED = 1000
"""Maximum number of different warnings that are logged, each once. Clients send the same fields with every request."""
_logged: set[str] = set()


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Metadata of a field that is accepted and has no effect. Values other than null and `silent` give a warning.

    `reason` completes the warning "field: has no effect; ...".
    """

    reason: str
    silent: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """Metadata of a field that is not implemented. Values other than null and `allowed` are an error.

    `reason` completes the error "field=value: not implemented; ..." and says what to do instead.
    """

    reason: str
    allowed: tuple[object, ...] = ()

    def check(self, given: object) -> object:
        """Return `given` unchanged. Raises `PydanticCustomError` unless it is null or an allowed value."""
        # 0 equals False, and 1 True
        if given is None or any(type(given) is type(value) and given == value for value in self.allowed):
            return given
        raise PydanticCustomError("not_implemented", "not implemented; {reason}", {"reason": self.reason})

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a pydantic schema that accepts any value that passes `check`."""
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema of the field: its allowed values."""
        return {"enum": [None, *self.allowed]}


@cache
def dispositions(model: type[BaseModel]) -> Mapping[str, NoEffect | Rejected]:
    """Return the fields of `model` that have no effect, by their JSON names."""
    return {
        field.alias or name: entry
        for name, field in model.model_fields.items()
        for entry in field.metadata
        if isinstance(entry, (NoEffect, Rejected))
    }


def unused(body: BaseModel, at: str = "") -> Iterator[str]:
    """Yield a warning for each field that was given and has no effect, in `body` and the models inside it. `at` is the
    path of `body`.

    A list with `places` gives the index that each of its items had in the request.
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
        elif isinstance(value, list):
            for i, item in zip(getattr(value, "places", range(len(value))), value, strict=True):
                if isinstance(item, BaseModel):
                    yield from unused(item, f"{at}{name}[{i}].")


def warn(text: str, *, log: bool = True) -> None:
    """Add a warning for the client about a part of its request that has no effect. With `log`, also log it the first
    time."""
    given = WARNINGS.get([])
    if text in given or len(given) == _MAX_GIVEN:
        return
    given.append(text)
    if log and text not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(text)
        logger.warning("%s (logged once)", text)


def warning_header() -> list[tuple[bytes, bytes]]:
    """Return the header `X-Warning` with the warnings of the current request. Empty if there are none."""
    text = "; ".join(WARNINGS.get([])).encode("ascii", "backslashreplace").decode()
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    text = text if len(text) <= _MAX_HEADER else text[: _MAX_HEADER - 3] + "..."
    return [(b"x-warning", text.encode())] if text else []
