"""Checks the messages of a conversation and converts them to plain dictionaries. Renders nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specrs.errors import UnsupportedRequestError, invalid, invalid_request

_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Content part types, each with the field that holds its text."""


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of `messages` whose contents are strings, without keys that are None.

    Raises `InvalidRequestError` for malformed messages and for an empty list, `UnsupportedRequestError` for contents
    other than text.
    """
    conversation = [_message(i, message) for i, message in enumerate(messages)]
    if not conversation:
        raise invalid_request("messages", messages, "must have at least one message")
    return conversation


def _message(index: int, message: object) -> dict[str, Any]:
    at = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise invalid_request(at, message, "must be a dictionary with a role and a content")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        if not isinstance(content, Sequence):
            raise invalid_request(f"{at}['content']", content, "must be a string or a list of text parts")
        content = "\n".join(_part(f"{at}['content'][{i}]", part) for i, part in enumerate(content))
    # many templates handle a missing key, but not a null
    return {key: value for key, value in {**message, "content": content}.items() if value is not None}


def _part(at: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or "type" not in part:
        raise invalid_request(at, part, "must be a text part: {'type': 'text', 'text': ...}")
    key = _PARTS.get(str(part["type"]))
    if key is None:
        allowed = ", ".join(map(repr, _PARTS))
        raise invalid(UnsupportedRequestError, f"{at}['type']", part["type"], f"not implemented; allowed: {allowed}")
    if not isinstance(part.get(key), str):
        raise invalid_request(f"{at}[{key!r}]", part.get(key), "must be a string")
    return str(part[key])
