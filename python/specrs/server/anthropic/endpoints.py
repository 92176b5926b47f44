"""Answers Anthropic's Messages API by reporting a chat as content blocks and events. Other modules make the chat."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from specrs.errors import InvalidRequestError, SpecrsError
from specrs.inputs import Prompt
from specrs.server.answers import ChatAnswer
from specrs.server.anthropic.blocks import Blocks, Event
from specrs.server.anthropic.conversation import as_chat
from specrs.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from specrs.server.context import Context
from specrs.server.dispositions import warn
from specrs.server.encoding import named_event
from specrs.server.endpoints import check_size, prepare_chat
from specrs.server.errors import APIError, api_error
from specrs.server.generation import Generation
from specrs.server.logs import REQUEST_ID
from specrs.server.tools import MESSAGES_FIELDS, FieldNames

logger = logging.getLogger("specrs")

PING_SECONDS = 10.0
"""Seconds without an event after which a stream sends a ping, so that nothing between server and client gives up."""

CONTEXT_FULL = "model_context_window_exceeded"
"""Stop reason of a message that ended because the context is full, before `max_tokens`."""
STOP_REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use", CONTEXT_FULL)

T = TypeVar("T")


class MessageGeneration(Generation):
    """A chat generation that is reported as a message of Anthropic's API."""

    def __init__(self, context: Context, answer: ChatAnswer, *, num_prompt_tokens: int, fills_context: bool) -> None:
        """`fills_context`: the context ends before `max_tokens`."""
        super().__init__(context, replace(answer, in_pieces=True))
        self._num_prompt_tokens = num_prompt_tokens
        self._limit_reason = CONTEXT_FULL if fills_context else "max_tokens"

    async def whole(self) -> dict[str, Any]:
        """Wait until all has ended, and return the message. Raises `APIError` if the chat failed."""
        chat = await super().whole()
        (choice,) = chat["choices"]
        blocks = Blocks()
        blocks.add(choice["pieces"])
        blocks.close()
        return self._message() | {"content": blocks.done, **self._ending(blocks, choice), "usage": self._end_usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield named server-sent events in Anthropic's order. A failure is an event, too."""
        blocks, ending = Blocks(), dict[str, Any]()
        start = self._message() | {"content": [], "usage": _usage(self._num_prompt_tokens, 0, 0)}
        yield named_event({"type": "message_start", "message": start}) + _PING
        try:
            async with aclosing(_or_pauses(self.choices(), PING_SECONDS)) as news:
                async for choices in news:
                    if choices is None:
                        yield _PING
                        continue
                    events: list[Event] = []
                    for choice in choices:
                        events += blocks.add(choice["pieces"])
                        ending = choice
                    if events:
                        yield b"".join(map(named_event, events))
            closing = blocks.close()
            delta = self._ending(blocks, ending)
            closing += [
                {"type": "message_delta", "delta": delta, "usage": self._end_usage()},
                {"type": "message_stop"},
            ]
            yield b"".join(map(named_event, closing))
        except Exception as fault:
            if not isinstance(fault, (APIError, SpecrsError)):
                logger.exception("a stream failed")
            yield named_event(api_error(fault).anthropic_body(REQUEST_ID.get()))

    def _message(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._answer.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._answer.model,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _ending(self, blocks: Blocks, choice: dict[str, Any]) -> dict[str, Any]:
        """Return why a message ended, from its last choice. Stop strings take precedence over calls before them."""
        if choice["finish_reason"] == "length":
            return {"stop_reason": self._limit_reason, "stop_sequence": None}
        if isinstance(choice["stop_reason"], str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice["stop_reason"]}
        return {"stop_reason": "tool_use" if blocks.has_calls else "end_turn", "stop_sequence": None}

    def _end_usage(self) -> dict[str, int]:
        used = self._usage()
        return _usage(used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"], used["completion_tokens"])


_PING = named_event({"type": "ping"})


def _usage(prompt: int, cached: int, output: int) -> dict[str, int]:
    """Return the `usage` of a message. As in Anthropic's API, `input_tokens` leaves out those from the cache."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


async def _or_pauses(source: AsyncIterator[T], seconds: float) -> AsyncGenerator[T | None]:
    """Yield what `source` yields, and None each time that nothing has come for `seconds`."""

    async def following() -> tuple[T] | None:
        async for item in source:
            return (item,)
        return None

    task = asyncio.ensure_future(following())
    try:
        while True:
            done, _ = await asyncio.wait((task,), timeout=seconds)
            if not done:
                yield None
                continue
            item = task.result()
            if item is None:
                return
            yield item[0]
            task = asyncio.ensure_future(following())
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def messages(context: Context, body: MessagesRequest) -> dict[str, Any] | Generation:
    """Answer `POST /v1/messages`. Returns the message, or a generation that streams it."""
    answer, prompt, fields = await _prepare(context, body)
    with fields.errors():
        size, longest = len(prompt.token_ids), context.llm.limits.max_model_len
        if size >= longest:
            # clients look for these words, and then send fewer messages
            raise InvalidRequestError(
                f"messages: the prompt is too long: {size} tokens > {longest - 1} maximum; send fewer or shorter ones"
            )
        fills_context = body.max_tokens > longest - size
        if fills_context:
            params = replace(answer.asked.params, max_tokens=longest - size)
            answer = replace(answer, asked=replace(answer.asked, params=params))
        check_size(context, answer, [prompt])
        generation = MessageGeneration(context, answer, num_prompt_tokens=size, fills_context=fills_context)
        await generation.start([prompt], context.lora_request(body.model))
    if body.stream:
        return generation
    with generation:
        return await generation.whole()


async def count_tokens(context: Context, body: CountTokensRequest) -> dict[str, Any]:
    """Answer `POST /v1/messages/count_tokens`: the number of tokens that the prompt of a message has."""
    _, prompt, _ = await _prepare(context, body)
    return {"input_tokens": len(prompt.token_ids)}


async def _prepare(context: Context, body: CountTokensRequest) -> tuple[ChatAnswer, Prompt, FieldNames]:
    """Prepare a request of `/v1/messages` or `/v1/messages/count_tokens`. Returns an answer without content yet, the
    prompt, and the names that errors give to the request's fields."""
    chat, places = as_chat(body)
    fields = replace(MESSAGES_FIELDS, messages=places)
    if body.thinking is not None and body.thinking.type != "disabled" and context.tools.reasoning_parser is None:
        warn("thinking: stays in the text, because the server has no --reasoning-parser")
    with fields.errors():
        answer, (prompt,) = await prepare_chat(context, chat, fields)
    return answer, prompt, fields
