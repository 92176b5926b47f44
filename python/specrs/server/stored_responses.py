"""Endpoints that read and delete stored responses, and the conversation that a new response continues."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specrs.errors import SpecrsError, invalid_request, short
from specrs.server.context import Context, Shared
from specrs.server.dispositions import warn
from specrs.server.encoding import encode, encode_in_parts
from specrs.server.errors import APIError, api_error
from specrs.server.input_items import item_type
from specrs.server.limits import MAX_MESSAGES
from specrs.server.message_fields import CACHE_MARKS
from specrs.server.response_store import OWNER, Link, MissingResponse, ResponseStore, StoredResponse, Texts
from specrs.server.responses_protocol import ResponsesRequest

MAX_PAGE = 100
"""Maximum number of items in one answer of `GET /v1/responses/{id}/input_items`, as in OpenAI's API."""
DEFAULT_PAGE = 20
_FLAGS = "--responses-store-bytes, --responses-store-seconds"
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
"""Beginnings of ids, by type of item."""
_GONE = f"was never stored, or was deleted or evicted ({_FLAGS})"


@dataclass(frozen=True, slots=True)
class Earlier:
    """The conversation that a new response continues. Empty for the first response of a conversation."""

    previous: Link | None = None
    items: Sequence[dict[str, Any]] = ()
    """Input and output items of all its responses, in order."""


@dataclass(frozen=True, slots=True)
class Place:
    """Owner and links of a response that will be stored when it has ended, unless `stored` is false.

    `input_items`: JSON list of the items of the response's own input.
    """

    store: ResponseStore
    stored: bool
    owner: bytes = b""
    previous: Link | None = None
    input_items: bytes = b"[]"

    def put(self, response: dict[str, Any]) -> None:
        """Store a response that has ended, if it is to be stored."""
        if self.stored:
            head = encode({key: value for key, value in response.items() if key != "output"})
            texts = Texts(head, self.input_items, encode(response["output"]))
            self.store.put(self.owner, response["id"], texts, self.previous)


async def earlier_items(context: Context, body: ResponsesRequest) -> Earlier:
    """Return the conversation that `body` continues.

    Raises `InvalidRequestError` if the server stores nothing or the conversation has too many responses, and `APIError`
    if a part of it is not stored (404) or it is longer than a body may be (413).
    """
    given, limits = body.previous_response_id, context.shared.limits
    if given is None:
        return Earlier()
    if not context.shared.responses.enabled:
        needs = f"this server stores no responses ({_FLAGS}); send all earlier items in input"
        raise invalid_request("previous_response_id", given, needs)
    try:
        chain = context.shared.responses.conversation(OWNER.get(), given)
    except MissingResponse as fault:
        if fault.needed_by is None:
            cause = f"there is no such response; it {_GONE}"
        else:
            cause = f"{short(fault.needed_by)} continues {short(fault.response_id)}, which {_GONE}"
        raise _refused(404, given, f"{cause}; send all earlier items in input") from None
    if len(chain) >= MAX_MESSAGES:
        raise invalid_request("previous_response_id", given, f"continues {MAX_MESSAGES} responses, the most allowed")
    size = sum(len(one.texts.input_items) + len(one.texts.output) for one in chain)
    if size > limits.max_body_size:
        cause = f"its conversation has {size} bytes; must be at most --max-body-size={limits.max_body_size}"
        raise _refused(413, given, cause)

    def read() -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for one in chain:
            items += json.loads(one.texts.input_items)
            items += json.loads(one.texts.output)
        return items

    return Earlier(chain[-1].link, await context.shared.in_thread(read))


async def new_place(context: Context, body: ResponsesRequest, earlier: Earlier) -> Place:
    """Return where the response to `body`, whose input is valid, is stored when it has ended."""
    store = context.shared.responses
    if not store.enabled or body.store is False:
        if body.store:
            warn(f"store: has no effect; this server stores no responses ({_FLAGS})", log=False)
        return Place(store, stored=False)
    items = await context.shared.in_thread(lambda: encode_in_parts(stored_items(body.input)))
    return Place(store, True, OWNER.get(), earlier.previous, items)


def stored_items(given: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the `input` of a Responses request in the form in which it is stored and listed. The items are valid.

    Each item has a type and an id, a message's text is a part, and there are no cache marks.
    """
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    return [_stored(item) for item in items]


def _stored(item: dict[str, Any]) -> dict[str, Any]:
    kind, own = item_type(item), item.get("id")
    new_id = f"{_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"
    stored = {**_unmarked(item), "id": own if own and isinstance(own, str) else new_id, "type": kind}
    if kind == "message" and isinstance(item["content"], str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        stored["content"] = [{"type": part, "text": item["content"]}]
    for name in ("content", "output"):
        parts = stored.get(name)
        if isinstance(parts, list):
            stored[name] = [_unmarked(one) if isinstance(one, dict) else one for one in parts]
    return stored


def _unmarked(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in CACHE_MARKS}


def _refused(status: int, given: str, cause: str) -> APIError:
    return APIError(status, f"previous_response_id={short(given)}: {cause}.", param="previous_response_id")


def stored_routes(shared: Shared) -> list[Route]:
    """Return the routes of stored responses."""

    async def one(request: Request) -> Response:
        if request.method == "DELETE":
            return _delete(shared, request)
        return _retrieve(shared, request)

    async def items(request: Request) -> Response:
        return await _input_items(shared, request)

    return [
        Route("/v1/responses/{id}", _answering(one), methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/input_items", _answering(items), methods=["GET"]),
    ]


def _answering(handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handle(request)
        except (APIError, SpecrsError) as fault:
            return api_error(fault).response()

    return endpoint


def _retrieve(shared: Shared, request: Request) -> Response:
    query = _query(request, ("stream",))
    if query.get("stream", "false") != "false":
        needs = "not implemented; a stored response is sent whole, so leave it out"
        raise invalid_request("stream", query["stream"], needs)
    texts = _found(shared, request).texts
    return _json(texts.head[:-1] + b',"output":' + texts.output + b"}")


def _delete(shared: Shared, request: Request) -> Response:
    _query(request, ())
    response_id = _found(shared, request).link[0]
    shared.responses.delete(OWNER.get(), response_id)
    return _json(encode({"id": response_id, "object": "response", "deleted": True}))


async def _input_items(shared: Shared, request: Request) -> Response:
    query = _query(request, ("limit", "order", "after"))
    given, order, after = query.get("limit", str(DEFAULT_PAGE)), query.get("order", "desc"), query.get("after")
    limit = int(given) if given.isascii() and given.isdigit() and len(given) <= 3 else 0
    if not 1 <= limit <= MAX_PAGE:
        raise invalid_request("limit", given, f"must be an integer from 1 to {MAX_PAGE}")
    if order not in ("asc", "desc"):
        raise invalid_request("order", order, "must be asc or desc")
    stored = _found(shared, request)

    def page() -> bytes:
        items = json.loads(stored.texts.input_items)
        if order == "desc":
            items.reverse()
        start = 0
        if after is not None:
            places = [i for i, item in enumerate(items) if item["id"] == after]
            if not places:
                raise invalid_request("after", after, "must be the id of an item of this response's input")
            start = places[0] + 1
        shown = items[start : start + limit]
        return encode_in_parts(
            {
                "object": "list",
                "data": shown,
                "first_id": shown[0]["id"] if shown else None,
                "last_id": shown[-1]["id"] if shown else None,
                "has_more": start + limit < len(items),
            }
        )

    return _json(await shared.in_thread(page))


def _query(request: Request, known: Collection[str]) -> dict[str, str]:
    """Return the query parameters. Raises `InvalidRequestError` for one that is not in `known`.

    `include` asks for parts that no item here has. It is ignored.
    """
    query = {name: value for name, value in request.query_params.items() if name not in ("include", "include[]")}
    for name, value in query.items():
        if name not in known:
            raise invalid_request(name[:100], value, f"unknown query parameter; known: {', '.join(known) or 'none'}")
    return query


def _found(shared: Shared, request: Request) -> StoredResponse:
    response_id = request.path_params["id"]
    try:
        return shared.responses.get(OWNER.get(), response_id)
    except MissingResponse:
        cause = f"it {_GONE}" if shared.responses.enabled else f"this server stores no responses ({_FLAGS})"
        raise APIError(404, f"The response {short(response_id)} does not exist; {cause}.", param="id") from None


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
