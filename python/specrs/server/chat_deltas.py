"""Splits the deltas of a chat into pieces that belong to one output item each. Used by APIs that answer in items."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that a delta adds to one item. `call` is the tool call that begins with this piece; None if the piece
    continues a call or belongs to no call."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    call: dict[str, Any] | None = None


def pieces(delta: dict[str, Any]) -> Iterator[Piece]:
    """Yield the pieces of one delta in OpenAI's format. Arguments of a call that began in an earlier delta come first,
    because they were written before other text."""
    calls = list(delta.get("tool_calls") or ())
    while calls and "id" not in calls[0]:
        yield Piece("call", calls.pop(0)["function"]["arguments"])
    if delta.get("reasoning_content"):
        yield Piece("reasoning", delta["reasoning_content"])
    if delta.get("content"):
        yield Piece("content", delta["content"])
    for call in calls:
        yield Piece("call", call["function"]["arguments"], call if "id" in call else None)


def message_pieces(message: dict[str, Any]) -> Iterator[Piece]:
    """Yield the pieces of a whole message. Its calls come last."""
    yield from pieces({key: message.get(key) for key in ("reasoning_content", "content")})
    yield from pieces({"tool_calls": message.get("tool_calls")})
