"""Reads and parses request bodies: within limits of size and time, large ones in a thread so that the event loop goes
on."""

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
    """Exception that says that the client has closed its connection."""


async def read_body(scope: Scope, receive: Receive, limits: HTTPLimits) -> bytes:
    """Read the whole body. Raises `APIError` 413 if it is too long, 408 if it takes too long, and `Gone` if the client
    disconnects.

    The rest of a body that is too long is not read here. The connection discards it.
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
    """Parse `body` as `model`. Raises `APIError` 400 if it does not fit the model, and 413 if it has more values than
    may be parsed."""
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
    """Raise `APIError` 413 if the body seems to hold more than `MAX_VALUES` values. The estimate counts quotes, and
    commas outside of strings."""
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
