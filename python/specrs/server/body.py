"""Bodies of requests: read within a size and a time, parsed into a model, off the event loop where they are large."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import copy_context
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope

from specrs.server.errors import APIError, validation_error
from specrs.server.limits import LARGE_BODY, MAX_VALUES, HTTPLimits

ModelT = TypeVar("ModelT", bound=BaseModel)
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class Gone(Exception):
    """The client closed its connection."""


async def read_body(scope: Scope, receive: Receive, limits: HTTPLimits) -> bytes:
    """The whole body. Raises `APIError` 413 or 408, and `Gone`.

    Of a body that is too long the rest is not read here; the connection drops what still comes.
    """
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"0")
    if len(length) > 18 or int(length) > limits.max_body_size:
        raise _too_long(limits)
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_timeout):
            while True:
                message: MutableMapping[str, Any] = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limits.max_body_size:
                    raise _too_long(limits)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise APIError(
            408, f"The body took more than {limits.body_timeout:g} s.", headers={"Connection": "close"}
        ) from None


async def parse(model: type[ModelT], body: bytes, in_thread: InThread) -> ModelT:
    """The body as `model`. Raises `APIError` 400 for what it is not, and 413 for more values than may be parsed."""
    _check_values(body)
    try:
        if len(body) < LARGE_BODY:
            return model.model_validate_json(body)
        context = copy_context()  # validators may warn
        parsed: ModelT = await in_thread(lambda: context.run(model.model_validate_json, body))
        return parsed
    except ValidationError as fault:
        raise validation_error(fault, model) from None


def _check_values(body: bytes) -> None:
    """Raise `APIError` 413 for a body of too many values: as many commas outside of strings, or as many quotes."""
    values = body.count(b'"')
    if values <= MAX_VALUES and body.count(b",") > MAX_VALUES:
        # with many escapes in its strings it takes as long to tell them apart as to parse them
        values = body.count(b"\\")
        if values <= MAX_VALUES:
            values = _STRING.sub(b"", body).count(b",")
    if values > MAX_VALUES:
        raise APIError(413, f"The body has more than {MAX_VALUES} values.")


def _too_long(limits: HTTPLimits) -> APIError:
    return APIError(413, f"The body is longer than {limits.max_body_size} bytes.")
