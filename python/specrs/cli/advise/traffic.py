"""Reads traffic: a log of requests, a line of JSON each, or a built-in sample. Runs no model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrs.errors import InvalidConfigError, SpecrsError, invalid_config
from specrs.tokenizer import Tokenizer

_SHOWN = 5
"""Number of wrong lines that an error message names."""


@dataclass(frozen=True)
class LoggedRequest:
    """One request of the traffic, as token ids."""

    prompt: list[int]
    completion: list[int] | None = None
    """The answer that was logged; None if there is none."""
    max_tokens: int | None = None
    """Maximum number of tokens of the answer; None if the request names none."""


def read_traffic(path: Path, tokenizer: Tokenizer) -> list[LoggedRequest]:
    """Return the requests of a JSON lines file. Empty lines are skipped.

    A line is the body of a request to `/v1/chat/completions` or `/v1/completions`, or `{"prompt": ..., "completion":
    ...}`. Sampling parameters are ignored, because drafters are compared on greedy text.

    Raises `InvalidConfigError` for a file that cannot be read or has no request, and for wrong lines, which are named.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as fault:
        raise invalid_config("--traffic", str(path), f"cannot be read: {fault.strerror}") from None
    found: list[LoggedRequest] = []
    wrong: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found += requests_of(_parsed(line), tokenizer)
        except (SpecrsError, ValueError) as fault:
            wrong.append((number, str(fault)))
    if wrong:
        number, reason = wrong[0]
        also = ", ".join(str(other) for other, _ in wrong[1:_SHOWN]) + (", ..." if len(wrong) > _SHOWN else "")
        more = f"; also wrong, {len(wrong) - 1} in all: {also}" if len(wrong) > 1 else ""
        raise invalid_config("--traffic", str(path), f"line {number} is wrong: {reason}{more}")
    if not found:
        raise invalid_config("--traffic", str(path), "has no request; must have a line of JSON for each")
    return found


def requests_of(body: object, tokenizer: Tokenizer) -> list[LoggedRequest]:
    """Return the requests of one line's JSON: one, or one for each prompt of a list.

    Raises `ValueError` or a `SpecrsError` if it is none.
    """
    if not isinstance(body, Mapping):
        raise ValueError('must be a JSON object, such as {"prompt": "..."}')
    if ("messages" in body) == ("prompt" in body):
        raise ValueError("must have either messages or prompt")
    limit = body.get("max_completion_tokens")
    if limit is None:
        limit = body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError(f"max_tokens={limit!r}: must be an integer of at least 1")
    answer = body.get("completion")
    if answer is not None and (not isinstance(answer, str) or not answer):
        raise ValueError(f"completion={answer!r}: must be a text that is not empty")
    completion = None if answer is None else tokenizer.encode(answer, add_special_tokens=False)
    prompts = [_chat(body, tokenizer)] if "messages" in body else _prompts(body["prompt"], tokenizer)
    if completion is not None and len(prompts) > 1:
        raise ValueError("completion: allowed with one prompt; put each prompt on a line of its own")
    return [LoggedRequest(prompt, completion, limit) for prompt in prompts]


def sample(tokenizer: Tokenizer, *, bundled: bool) -> list[LoggedRequest]:
    """Return the built-in sample: questions and tasks for a model with a chat template, else beginnings of code."""
    if bundled or not tokenizer.chat_template:
        from specrs.pair.prompts import PROMPTS

        return [LoggedRequest(tokenizer.encode(prompt)) for prompt in PROMPTS]
    from specrs.cli.demo.chats import CHATS

    chats = [{"messages": [{"role": "user", "content": chat}]} for chat in CHATS]
    return [request for chat in chats for request in requests_of(chat, tokenizer)]


def spread(requests: Sequence[LoggedRequest], count: int) -> list[LoggedRequest]:
    """Return `count` requests at equal distances, in their order; all of them if there are fewer."""
    count = min(count, len(requests))
    return [requests[i * len(requests) // count] for i in range(count)]


def that_fit(requests: Sequence[LoggedRequest], max_tokens: int, most: int) -> list[LoggedRequest]:
    """Return the requests whose prompt and answer have at most `most` tokens, the context of the model.

    Raises `InvalidConfigError` if none fits.
    """
    fitting = [one for one in requests if len(one.prompt) + tokens_of(one, max_tokens) <= most]
    if not fitting:
        raise InvalidConfigError(
            f"traffic: no request fits into the model's {most} tokens; use shorter prompts or fewer --max-tokens"
        )
    return fitting


def tokens_of(request: LoggedRequest, max_tokens: int) -> int:
    """Return the number of tokens to generate for a request, at most `max_tokens`."""
    return max_tokens if request.max_tokens is None else min(max_tokens, request.max_tokens)


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except UnicodeDecodeError as fault:
        raise ValueError(f"is no UTF-8: {fault.reason}") from None
    except json.JSONDecodeError as fault:
        raise ValueError(f"is no JSON: {fault.msg} at column {fault.colno}") from None


def _chat(body: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    messages = body["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise ValueError("messages: must be a list of at least one message")
    text = tokenizer.render_chat(
        messages, tools=body.get("tools"), chat_template_kwargs=body.get("chat_template_kwargs")
    )
    return tokenizer.encode(text, add_special_tokens=False)


def _prompts(given: object, tokenizer: Tokenizer) -> list[list[int]]:
    one = given if isinstance(given, list) and not any(isinstance(item, int) for item in given) else [given]
    return [_prompt(item, tokenizer) for item in one] or [_prompt("", tokenizer)]


def _prompt(given: object, tokenizer: Tokenizer) -> list[int]:
    if isinstance(given, str):
        ids = tokenizer.encode(given)
    elif isinstance(given, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in given):
        ids = given
        if any(not 0 <= one < tokenizer.vocab_size for one in ids):
            raise ValueError(f"prompt: token ids must be from 0 to {tokenizer.vocab_size - 1}")
    else:
        raise ValueError("prompt: must be a text, a list of token ids, or a list of these")
    if not ids:
        raise ValueError("prompt: must not be empty")
    return ids
