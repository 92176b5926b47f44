"""Checks the headers of a request before its body is read. Checks no keys."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from specrs.errors import short
from specrs.server.errors import ADD_HEADER, APIError
from specrs.server.limits import HTTPLimits


class HeaderCheck:
    """Middleware that rejects requests whose headers are too long or give both Content-Length and Transfer-Encoding,
    and POST requests with a body whose content type is not JSON."""

    def __init__(self, app: ASGIApp, limits: HTTPLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on to the application. Answers 400, 415 or 431 itself if headers are invalid, name another
        content type or are too large."""
        fault = self._fault(scope) if scope["type"] == "http" else None
        if fault is None:
            await self._app(scope, receive, send)
        else:
            await fault.response()(scope, receive, send)

    def _fault(self, scope: Scope) -> APIError | None:
        headers = scope["headers"]
        close = {"Connection": "close"}
        # h11 bounds only a header that comes in parts
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(n) + len(v) + 4 for n, v in headers)
        if size > self._limits.max_header_size:
            return APIError(431, f"The header is longer than {self._limits.max_header_size} bytes.", headers=close)
        names = [name for name, _ in headers]
        if b"content-length" in names and b"transfer-encoding" in names:
            # a proxy before this server may have read the other one, and see another request in the rest
            return APIError(400, "Content-Length and Transfer-Encoding are given; one is allowed.", headers=close)
        kinds = [value for name, value in headers if name == b"content-type"]
        lengths = {value.strip() for name, value in headers if name == b"content-length"}
        has_body = b"transfer-encoding" in names or lengths - {b"0"}
        # clients name a type for the empty body of /start_profile and its like, too
        wrong = [kind for kind in kinds if not _is_json(kind)]
        if scope["method"] == "POST" and has_body and wrong:
            came = f"Content-Type={short(wrong[0].decode('latin-1'))}"
            return APIError(415, f"{came}: must be application/json; {ADD_HEADER}.")
        return None


def _is_json(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == b"application/json"
