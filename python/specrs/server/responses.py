"""Answers `POST /v1/responses` by reporting a chat as OpenAI's items and events. Other modules make the chat and its
text."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from specrs.errors import SpecrsError
from specrs.server.answers import Answer
from specrs.server.context import Context
from specrs.server.encoding import named_event
from specrs.server.endpoints import check_size, prepare_chat
from specrs.server.errors import APIError, api_error
from specrs.server.generation import Generation
from specrs.server.messages import Piece
from specrs.server.responses_protocol import ResponsesRequest, as_chat, message_places
from specrs.server.stored_responses import Place, earlier_items, new_place
from specrs.server.tools import RESPONSE_FIELDS

logger = logging.getLogger("specrs")

Event = dict[str, Any]

_KINDS = {"reasoning": "reasoning", "content": "message", "call": "function_call"}
"""Types of items by the kind of their pieces."""


@dataclass
class Items:
    """Output items made from a chat's deltas, with the events about them. At most one item is open at a time."""

    done: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[str, Any] | None = None
    _texts: list[str] = field(default_factory=list)  # of the open item

    def add(self, pieces: Iterable[Piece]) -> list[Event]:
        """Add pieces of a message. Return their events."""
        events: list[Event] = []
        for piece in pieces:
            if not piece.text and piece.call is None:
                continue
            events += self._switch(_KINDS[piece.kind], piece.call) + self._grow(piece.text)
        return events

    def close(self, *, cut_off: bool = False) -> list[Event]:
        """Close the open item and return its events. With `cut_off`, its text was cut off and the item is incomplete;
        but a call with all its arguments is complete."""
        item, self._open = self._open, None
        if item is None:
            return []
        text, self._texts = "".join(self._texts), []
        place = self._place(item)
        whole = not cut_off or (item["type"] == "function_call" and _is_json(text))
        finished = self._item(item, text, "completed" if whole else "incomplete")
        self.done.append(finished)
        if item["type"] == "function_call":
            events: list[Event] = [
                {"type": "response.function_call_arguments.done", **place, "arguments": text, "name": item["name"]}
            ]
        else:
            part, name = self._part(item, text)
            events = [
                {"type": f"response.{name}.done", **place, "content_index": 0, "text": text, **_logprobs(name)},
                {"type": "response.content_part.done", **place, "content_index": 0, "part": part},
            ]
        return [
            *events,
            {"type": "response.output_item.done", "output_index": place["output_index"], "item": finished},
        ]

    def _switch(self, kind: str, call: dict[str, Any] | None = None) -> list[Event]:
        if self._open is not None and self._open["type"] == kind and call is None:
            return []
        events = self.close()
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind}
        if call is not None:
            item |= {"call_id": call["id"], "name": call["function"]["name"]}
        self._open = item
        place = self._place(item)
        shown: dict[str, Any] = self._item(item, "", "in_progress")
        if call is None:
            shown |= {"content": []}
        events.append({"type": "response.output_item.added", "output_index": place["output_index"], "item": shown})
        if call is None:
            part, _ = self._part(item, "")
            events.append({"type": "response.content_part.added", **place, "content_index": 0, "part": part})
        return events

    def _grow(self, text: str) -> list[Event]:
        assert self._open is not None
        if not text:
            return []
        self._texts.append(text)
        place = self._place(self._open)
        if self._open["type"] == "function_call":
            return [{"type": "response.function_call_arguments.delta", **place, "delta": text}]
        _, name = self._part(self._open, "")
        return [{"type": f"response.{name}.delta", **place, "content_index": 0, "delta": text, **_logprobs(name)}]

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.done)}

    def _part(self, item: dict[str, Any], text: str) -> tuple[dict[str, Any], str]:
        if item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}, "reasoning_text"
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}, "output_text"

    def _item(self, item: dict[str, Any], text: str, status: str) -> dict[str, Any]:
        if item["type"] == "function_call":
            return {**item, "arguments": text, "status": status}
        rest: Event = {"summary": []} if item["type"] == "reasoning" else {"role": "assistant"}
        return {**item, **rest, "content": [self._part(item, text)[0]], "status": status}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _logprobs(name: str) -> Event:
    return {"logprobs": []} if name == "output_text" else {}


class ResponseGeneration(Generation):
    """A chat generation that is reported as a response."""

    def __init__(self, context: Context, answer: Answer, body: ResponsesRequest, place: Place) -> None:
        super().__init__(context, answer)
        self._body = body
        self._context = context
        self._store_place = place
        self._id = f"resp_{answer.request_id}"
        if place.stored and (place.owner, self._id) in place.store:
            self._id = f"resp_{uuid.uuid4().hex}"  # a client may send the same request id twice

    async def whole(self) -> dict[str, Any]:
        """Wait until all has ended, store the response and return it. Raises `APIError` if the chat failed."""
        chat = await super().whole()
        (choice,) = chat["choices"]
        items = Items()
        items.add(choice["pieces"])
        items.close(cut_off=choice["finish_reason"] == "length")
        response = self._response(items, choice["finish_reason"])
        self._store_place.put(response)
        return response

    async def events(self) -> AsyncIterator[bytes]:
        """Yield numbered server-sent events; the last one has the whole response.

        The response is stored before the last event. A failure is an event, too, and nothing is stored.
        """
        number, items, reason = 0, Items(), None

        def encode(events: list[Event]) -> bytes:
            nonlocal number
            parts = []
            for event in events:
                parts.append(named_event({**event, "sequence_number": number}))
                number += 1
            return b"".join(parts)

        start = self._response(items, None)
        yield encode([{"type": f"response.{word}", "response": start} for word in ("created", "in_progress")])
        try:
            async for choices in self.choices():
                events = []
                for choice in choices:
                    events += items.add(choice["pieces"])
                    reason = choice["finish_reason"] or reason
                if events:
                    yield encode(events)
            closing = items.close(cut_off=reason == "length")
            response = self._response(items, reason)
            self._store_place.put(response)
            yield encode([*closing, {"type": f"response.{response['status']}", "response": response}])
        except Exception as fault:
            if not isinstance(fault, (APIError, SpecrsError)):
                logger.exception("a stream failed")
            error = api_error(fault)
            failed = self._response(items, None) | {
                "status": "failed",
                "error": {"code": "server_error", "message": error.message},
            }
            yield encode([{"type": "response.failed", "response": failed}])

    def _response(self, items: Items, reason: str | None) -> dict[str, Any]:
        body, used, params = self._body, self._usage(), self._answer.asked.params
        status = {None: "in_progress", "length": "incomplete"}.get(reason, "completed")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._answer.model,
            "output": list(items.done),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": self._store_place.stored,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": {"type": "text"}}
            if body.text is None or body.text.format is None
            else body.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": _dumped(body.tool_choice) or ("auto" if body.tools else "none"),
            "tools": [tool.model_dump(by_alias=True, exclude_unset=True) for tool in body.tools or ()],
            "truncation": body.truncation or "disabled",
            "metadata": body.metadata or {},
            "user": body.user,
            "usage": None
            if reason is None
            else {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": used["completion_tokens_details"],
                "total_tokens": used["total_tokens"],
            },
        }


def _dumped(choice: Any) -> Any:
    return choice if choice is None or isinstance(choice, str) else choice.model_dump()


async def responses(context: Context, body: ResponsesRequest) -> dict[str, Any] | Generation:
    """Answer `POST /v1/responses`. Returns the response, or a generation that streams it."""
    earlier = await earlier_items(context, body)
    chat = as_chat(body, earlier.items)
    fields = replace(RESPONSE_FIELDS, messages=message_places(body, earlier.items))
    place = await new_place(context, body, earlier)
    with fields.errors():
        answer, prompts = await prepare_chat(context, chat, fields)
        check_size(context, answer, prompts)
        generation = ResponseGeneration(context, replace(answer, in_pieces=True), body, place)
        await generation.start(prompts, context.lora_request(body.model))
    if body.stream:
        return generation
    with generation:
        return await generation.whole()
