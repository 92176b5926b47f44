"""Handles fields of messages and their parts that no chat template reads: drops them with a warning, moves or rejects
them."""

from __future__ import annotations

from typing import Any

from specrs.errors import invalid_request
from specrs.server.dispositions import warn

CACHE_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Keys of messages and parts that mark the end of a prefix to cache. The prefix cache here needs no marks."""
_REPLACED = {"audio": "messages are text alone; leave it out", "function_call": "not implemented; use tool_calls"}


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a chat in the form that templates read. Mutates nothing.

    Cache marks are dropped with a warning. A refusal becomes the content of a message that has none.

    Raises `InvalidRequestError` for the keys `audio` and `function_call`.
    """
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    for name, reason in _REPLACED.items():
        if message.get(name) is not None:
            raise invalid_request(f"messages[{index}][{name!r}]", message[name], reason)
    content = message.get("content")
    if isinstance(content, list):
        parts = [without_marks("messages", part) if isinstance(part, dict) else part for part in content]
        message = {**message, "content": parts}
    elif content is None and isinstance(message.get("refusal"), str):
        message = {**message, "content": message["refusal"]}
    return without_marks("messages", message)


def without_marks(field: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return a message or part without its cache marks. Each kind of mark gives one warning about `field`."""
    for name in sorted(CACHE_MARKS.intersection(given)):
        if given[name] is not None:
            warn(f"{field}: {name} has no effect; cached prefixes are found without it")
    return {key: value for key, value in given.items() if key not in CACHE_MARKS}
