"""Errors as clients see them: `{"error": {"message", "type", "param", "code"}}`, or in the form of Anthropic's API on
its paths. They have no file paths and tracebacks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specrs.errors import (
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RankLostError,
    SpecrsError,
    near_names,
    short,
)
from specrs.server.logs import REQUEST_ID
from specrs.server.paths import is_anthropic, route_path

RETRY_AFTER_SECONDS = 1
ADD_HEADER = "with curl, add -H 'Content-Type: application/json'"
"""Remedy in errors about a body that is not sent as JSON. Without this header, `curl -d` sends a form."""
_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowedError",
    HTTPStatus.REQUEST_TIMEOUT: "RequestTimeoutError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "RequestTooLargeError",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "UnsupportedMediaTypeError",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "RequestTooLargeError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
}
_ANTHROPIC_TYPES = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
# The field that a message of `specrs.errors` begins with: `field=value: ...` or `field: ...`.
_FIELD = re.compile(r"([A-Za-z_][\w.]*)(?:\[[^\]=]*\][\w.]*)*(?:=|: )")
_MAX_FIELD = 100
"""Maximum number of characters of a field name in an error."""
_MAX_ERRORS = 3
"""Maximum number of problems of one body that an error message lists."""


class APIError(Exception):
    """Error that is sent to the client as an HTTP response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = HTTPStatus(status)
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """JSON body of the response."""
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": int(self.status)}}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """Return the JSON body of the response in the form of Anthropic's API. `-` stands for a request without id."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error = {"type": kind, "message": self.message}
        return {"type": "error", "error": error, "request_id": None if request_id == "-" else request_id}

    @property
    def encoded(self) -> bytes:
        """JSON body of the response as bytes."""
        return json.dumps(self.body).encode()

    def response(self) -> Response:
        """Return the error as an HTTP response."""
        return _ErrorResponse(self)


class _ErrorResponse(Response):
    """HTTP response of an error, in the form of the API that the request's path belongs to."""

    def __init__(self, error: APIError) -> None:
        super().__init__(error.encoded, int(error.status), error.headers, "application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        if is_anthropic(route_path(scope)):
            content, error = json.dumps(self._error.anthropic_body(REQUEST_ID.get())), self._error
            response = Response(content, int(error.status), error.headers, "application/json")
            await response(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def unavailable(message: str) -> APIError:
    """Return a 503 error whose header says after how many seconds to try again."""
    return APIError(HTTPStatus.SERVICE_UNAVAILABLE, message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def unknown_model(name: str, served: Sequence[str]) -> APIError:
    """Return a 404 error for a model that the server does not have, with the names that it serves."""
    return APIError(404, f"The model `{name[:200]}` does not exist; served: {short([*served])}.", param="model")


def api_error(fault: BaseException) -> APIError:
    """Convert an exception to the error that the client sees. Only errors of the client's own request, and a full
    queue, keep the exception's message."""
    if isinstance(fault, APIError):
        return fault
    if isinstance(fault, InvalidRequestError):
        message = str(fault)
        field = _FIELD.match(message)
        return APIError(HTTPStatus.BAD_REQUEST, message, param=None if field is None else field[1])
    if isinstance(fault, QueueFullError):
        return unavailable(f"The queue is full: {fault}.")
    if isinstance(fault, RankLostError):
        text = f"The engine is not running: rank {fault.rank} of {fault.size} is lost."
        return APIError(HTTPStatus.SERVICE_UNAVAILABLE, text)
    if isinstance(fault, EngineDeadError):
        return APIError(HTTPStatus.SERVICE_UNAVAILABLE, "The engine is not running.")
    if isinstance(fault, SpecrsError):
        return APIError(HTTPStatus.INTERNAL_SERVER_ERROR, "The engine ended this request because of a fault.")
    return APIError(HTTPStatus.INTERNAL_SERVER_ERROR, "Internal error.")


def validation_error(fault: ValidationError, model: type[BaseModel] | None = None) -> APIError:
    """Convert pydantic's errors about a body to an error in specrs' style, field by field.

    `model` is the class that the body was read as. Its field names are suggested for unknown fields.
    """
    known = [field.alias or name for name, field in model.model_fields.items()] if model is not None else []
    # the input, url and context of pydantic's own errors may hold the whole body
    details = _of_branches(fault.errors(include_url=False, include_context=True))[:_MAX_ERRORS]
    first = next((str(part)[:_MAX_FIELD] for part in details[0]["loc"] if isinstance(part, str)), None)
    return APIError(HTTPStatus.BAD_REQUEST, "; ".join(_describe(detail, known) for detail in details), param=first)


def _of_branches(details: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Merge pydantic's errors of several union branches about one value into one. It is the error of the branch whose
    type the value has; if there is none, an error that lists the types of all branches."""
    found: list[ErrorDetails] = []
    rejected: dict[tuple[str | int, ...], list[ErrorDetails]] = {}  # by the union's place: branches of another type
    for detail in details:
        *above, last = detail["loc"] or ("",)
        if _is_branch(last) and detail["type"].endswith("_type"):
            rejected.setdefault(tuple(above), []).append(detail)
        else:
            found.append(detail)
    for place, others in rejected.items():
        if not any(detail["loc"][: len(place)] == place for detail in found):
            first, *more = others
            types = [detail["msg"].removeprefix("Input should be ") for detail in more]
            found.append({**first, "msg": " or ".join([first["msg"], *types])})
    return found


def _describe(detail: ErrorDetails, known: Sequence[str]) -> str:
    kind, loc = detail["type"], detail["loc"]
    *above, last = loc or ("",)
    parts = [part for part in above if not _is_branch(part)]
    if kind == "extra_forbidden" or not _is_branch(last):
        parts.append(last)
    field = ".".join(map(str, parts)) or "body"
    field = field if len(field) <= _MAX_FIELD else field[:_MAX_FIELD] + "..."
    if kind == "extra_forbidden":
        # long names are no typing errors, and take long to compare
        close = near_names(field, known, 1) if len(loc) == 1 and len(field) <= 40 else []
        return f"{field}: unknown field" + (f"; did you mean {close[0]}?" if close else "")
    if kind == "missing":
        return f"{field}: is missing"
    if kind in ("literal_error", "none_required"):
        allowed = detail.get("ctx", {}).get("expected", "None")
        return f"{field}={short(detail['input'])}: not implemented; allowed: {allowed}"
    if kind == "json_invalid":
        fault = detail.get("ctx", {}).get("error", "")
        given = detail["input"]
        text = given.decode(errors="replace") if isinstance(given, bytes) else given
        if "surrogate" in fault or "hex escape" in fault:
            escape = "send both halves of such a pair, as in \\ud83c\\udf89, or the character itself"
            return f"body={short(text)}: has half of a surrogate pair, which is no character: {fault}; {escape}"
        came = f"={short(text)}: is not JSON: {fault}" if text else ": is empty"
        return f'body{came}; send a JSON object, such as {{"max_tokens": 16}}; {ADD_HEADER}'
    return f"{field}={short(detail['input'])}: {detail['msg']}"


def _is_branch(part: str | int) -> bool:
    """Return True if a part of an error location is pydantic's name of a union branch: `str`, `int`, `float`, `bool`, a
    class, or a name with a bracket or hyphen. All other parts are fields or indices."""
    if not isinstance(part, str):
        return False
    return part in ("str", "int", "float", "bool") or "[" in part or "-" in part or part[:1].isupper()
