"""ASGI application of the server: its routes, its check of API keys, and the handling that all endpoints share."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import inspect
import json
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specrs.errors import SpecrsError
from specrs.server import info, protocol
from specrs.server.anthropic.betas import beta_warnings
from specrs.server.anthropic.protocol import MessagesRequest
from specrs.server.body import Gone, parse, read_body
from specrs.server.context import Context, CORSSettings, Shared
from specrs.server.dispositions import WARNINGS, unused, warn, warning_header
from specrs.server.encoding import encode, encode_in_parts
from specrs.server.endpoints import Result
from specrs.server.errors import APIError, api_error, unavailable
from specrs.server.generation import Generation
from specrs.server.headers import HeaderCheck
from specrs.server.limits import MAX_REQUEST_ID_LENGTH
from specrs.server.logs import REQUEST_ID
from specrs.server.metrics import CONTENT_TYPE, render
from specrs.server.models import Models
from specrs.server.openapi import openapi
from specrs.server.page import page_route
from specrs.server.paths import is_anthropic, route_path
from specrs.server.pooling_protocol import PoolingBody
from specrs.server.response_store import OWNER
from specrs.server.responses_protocol import ResponsesRequest
from specrs.server.routes import POSTS
from specrs.server.stored_responses import stored_routes

logger = logging.getLogger("specrs")

ResultT = TypeVar("ResultT")
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_LENGTH}}}")
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def build_app(models: Models[Context], shared: Shared) -> Starlette:
    """Build the ASGI application of a server."""
    document = json.dumps(openapi(shared.version, models.names)).encode()

    async def described(_: Request) -> Response:
        return Response(document, media_type="application/json")

    async def health(_: Request) -> Response:
        try:
            check_open(models, shared)
        except (APIError, SpecrsError) as fault:
            return api_error(fault).response()
        return Response()

    async def metrics(_: Request) -> Response:
        return Response(await render(shared.metrics), headers={"content-type": CONTENT_TYPE})

    def profiling(path: str, act: Callable[[], Awaitable[None]]) -> Route:
        async def endpoint(_: Request) -> Response:
            try:
                await act()
            except (APIError, SpecrsError) as fault:
                return api_error(fault).response()
            return Response()

        return Route(path, endpoint, methods=["POST"])

    def get(path: str, answer: Callable[..., Any], *, of_model: bool = False) -> Route:
        """Make a GET route. `answer` takes the path's parameters and returns the JSON answer, or an awaitable of it.
        With `of_model`, it is also given the loaded model that the query's `model` names."""

        async def endpoint(request: Request) -> Response:
            try:
                asked = [models.find_loaded(request.query_params.get("model"))] if of_model else []
                found = answer(*asked, **request.path_params)
                content = await found if inspect.isawaitable(found) else found
            except (APIError, SpecrsError) as fault:
                return api_error(fault).response()
            return Response(json.dumps(content).encode(), media_type="application/json")

        return Route(path, endpoint, methods=["GET"])

    profiler = None if models.reloads else models.loaded[0].profiler
    extra = []
    if profiler is not None:
        extra = [profiling("/start_profile", profiler.start), profiling("/stop_profile", profiler.stop)]
    if shared.ui:
        extra.append(page_route())
    app = Starlette(
        routes=[
            *extra,
            Route("/health", health, methods=["GET"]),
            Route("/ping", health, methods=["GET", "POST"]),
            Route("/metrics", metrics, methods=["GET"]),
            get("/version", lambda: {"version": shared.version}),
            Route("/openapi.json", described, methods=["GET"]),
            get("/v1/models", partial(info.models, models, shared)),
            get("/v1/models/{name:path}", partial(info.model, models, shared)),
            get("/load", partial(info.load, models)),
            get("/v1/loads", partial(info.loads, models, shared)),
            *(get(path, info.model_info, of_model=True) for path in ("/model_info", "/get_model_info")),
            *(get(path, info.server_info, of_model=True) for path in ("/server_info", "/get_server_info")),
            *(Route(row.path, PostEndpoint(models, shared, row.body, row.handle), methods=["POST"]) for row in POSTS),
            *stored_routes(shared),
        ],
        middleware=[
            *_cors(shared.cors),
            Middleware(HeaderCheck, limits=shared.limits),
            Middleware(KeyCheck, keys=shared.api_keys, ui=shared.ui),
        ],
        exception_handlers={HTTPException: _http_exception, Exception: _exception},
    )
    app.router.redirect_slashes = False  # a redirect would go where the client's Host header says
    return app


def _cors(settings: CORSSettings) -> list[Middleware]:
    if not settings.origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=settings.methods,
            allow_headers=settings.headers,
            allow_credentials=settings.credentials,
            expose_headers=["X-Request-Id", "X-Warning"],
        )
    ]


class KeyCheck:
    """Middleware that rejects requests without a valid API key, if the server has keys. `/health`, `/ping` and the chat
    page need no key; the page asks the user for it."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], *, ui: bool = False) -> None:
        self._app = app
        self._open = {"/health", "/ping", *(["/"] if ui else [])}
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 if its key is missing or wrong."""
        path = route_path(scope) if scope["type"] == "http" else ""
        closed = scope["type"] == "http" and self._digests and path not in self._open
        if closed and not self._knows(scope):
            error = APIError(401, "The API key is missing or wrong.", headers={"WWW-Authenticate": "Bearer"})
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        """Return True if one of the two headers has a valid key: `Authorization` in OpenAI's API, `x-api-key` in
        Anthropic's. A header that is there twice does not count. The digest of the valid key owns the responses that
        the request stores."""
        scheme, _, key = (_only_value(scope, b"authorization") or b"").partition(b" ")
        given = [_digest(key.strip())] if scheme.lower() == b"bearer" else []
        if (other := _only_value(scope, b"x-api-key")) is not None:
            given.append(_digest(other))
        # every key is compared, whole, whatever the others said
        known = [digest for one in given for digest in self._digests if hmac.compare_digest(one, digest)]
        OWNER.set(known[0] if known else b"")
        return bool(known)


class PostEndpoint:
    """ASGI endpoint that reads a body, calls its handler and sends the answer. It stops when the client disconnects."""

    def __init__(
        self,
        models: Models[Context],
        shared: Shared,
        body: type[protocol.Body],
        handle: Callable[..., Awaitable[Result]],
    ) -> None:
        self._models = models
        self._shared = shared
        self._body = body
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. The answer has the request's `X-Request-Id`, or a new one, as header and in its id.

        The header `X-Warning` names fields of the request that have no effect.
        """
        shared = self._shared
        name = _request_id(scope)
        REQUEST_ID.set(name)
        WARNINGS.set([])
        if shared.tracing is not None:
            shared.tracing.take_parent(scope["headers"])

        anthropic = is_anthropic(route_path(scope))
        for warning in beta_warnings(scope["headers"]) if anthropic else ():
            warn(warning)

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                ids = [(header, name.encode()) for header in (b"x-request-id", *([b"request-id"] if anthropic else []))]
                message["headers"] = [*message["headers"], *ids, *warning_header()]
            await send(message)

        try:
            check_open(self._models, shared)
            body = await parse(self._body, await read_body(scope, receive, shared.limits), shared.in_thread)
        except Gone:
            return
        except (APIError, SpecrsError) as fault:
            await api_error(fault).response()(scope, receive, tell)
            return
        if isinstance(body, (protocol.SamplingBody, ResponsesRequest, MessagesRequest, PoolingBody)):
            name = body.request_id = body.request_id or name
            REQUEST_ID.set(name)
        for warning in unused(body):
            warn(warning)
        await _while_connected(receive, self._answer(body, scope, receive, tell))

    async def _answer(self, body: protocol.Body, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as held:
            try:
                context = await held.enter_async_context(self._models.lease(body.model))
                result = await self._handle(context, body)
            except (APIError, SpecrsError) as fault:
                if not isinstance(fault, APIError) and api_error(fault).status == 500:
                    logger.error("a request failed: %s", fault)
                await api_error(fault).response()(scope, receive, send)
                return
            await self._send(result, body, scope, receive, send)

    async def _send(self, result: Result, body: protocol.Body, scope: Scope, receive: Receive, send: Send) -> None:
        if not isinstance(result, Generation):
            large = body.has_large_answer
            encoded = await self._shared.in_thread(partial(encode_in_parts, result)) if large else encode(result)
            await Response(encoded, media_type="application/json")(scope, receive, send)
            return
        with result:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            async for chunk in result.events():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`. Cancel it if the client disconnects."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.wait((task, watch))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def check_open(models: Models[Context], shared: Shared) -> None:
    """Raise an error if the server accepts no more requests: the one that broke its engine, or a 503 `APIError`."""
    if models.error is not None:
        raise models.error
    if shared.draining:
        raise unavailable("The server is shutting down.")


async def _http_exception(_: Request, fault: Exception) -> Response:
    assert isinstance(fault, HTTPException)
    return APIError(fault.status_code, f"{fault.detail}.", headers=fault.headers).response()


async def _exception(_: Request, fault: Exception) -> Response:
    return api_error(fault).response()


def _request_id(scope: Scope) -> str:
    """Return the client's `X-Request-Id` if it has allowed characters and length, otherwise a new id."""
    given = (_only_value(scope, b"x-request-id") or b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _only_value(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of a header. None if it is missing or there more than once."""
    values: list[bytes] = [value for header, value in scope["headers"] if header == name]
    return values[0] if len(values) == 1 else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
