"""Makes content blocks of Anthropic's API from the pieces of a message, with the events about them. Sends nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from specrs.server.messages import Piece

Event = dict[str, Any]

INVALID_JSON = "INVALID_JSON"
"""Only key of the `input` of a call whose arguments are no JSON object. Its value is the text that the model
generated."""
_TYPES = {"reasoning": "thinking", "content": "text", "call": "tool_use"}
_DELTAS = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}


@dataclass
class Blocks:
    """Content blocks of an answer, in order. At most one block is open at a time."""

    done: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[str, Any] | None = None
    _texts: list[str] = field(default_factory=list)  # of the open block

    def add(self, pieces: Iterable[Piece]) -> list[Event]:
        """Add pieces of a message. Return their events."""
        events: list[Event] = []
        for piece in pieces:
            if not piece.text and piece.call is None:
                continue
            if self._open is None or piece.call is not None or self._open["type"] != _TYPES[piece.kind]:
                events += self.close() + self._start(piece)
            events += self._grow(piece.text)
        return events

    def close(self) -> list[Event]:
        """Close the open block, if there is one. Return its events."""
        block, self._open = self._open, None
        if block is None:
            return []
        text, self._texts = "".join(self._texts), []
        index, events = len(self.done), list[Event]()
        if block["type"] == "tool_use":
            self.done.append({**block, "input": _input(text)})
        elif block["type"] == "thinking":
            signature = _signature(text)
            self.done.append({**block, "thinking": text, "signature": signature})
            events.append(_delta(index, {"type": "signature_delta", "signature": signature}))
        else:
            self.done.append({**block, "text": text})
        return [*events, {"type": "content_block_stop", "index": index}]

    @property
    def has_calls(self) -> bool:
        """True if a closed block is a call of a tool."""
        return any(block["type"] == "tool_use" for block in self.done)

    def _start(self, piece: Piece) -> list[Event]:
        if piece.kind == "call":
            assert piece.call is not None, "arguments follow the call that they belong to"
            name = piece.call["function"]["name"]
            self._open = {"type": "tool_use", "id": piece.call["id"], "name": name, "input": {}}
        elif piece.kind == "reasoning":
            self._open = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            self._open = {"type": "text", "text": ""}
        return [{"type": "content_block_start", "index": len(self.done), "content_block": dict(self._open)}]

    def _grow(self, text: str) -> list[Event]:
        assert self._open is not None
        if not text:
            return []
        self._texts.append(text)
        kind, key = _DELTAS.get(self._open["type"], ("input_json_delta", "partial_json"))
        return [_delta(len(self.done), {"type": kind, key: text})]


def _delta(index: int, delta: dict[str, Any]) -> Event:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _input(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. Arguments that `max_tokens` cut off are no JSON object."""
    try:
        value = json.loads(text if text.strip() else "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}


def _signature(text: str) -> str:
    """Return a value for the field `signature`, which clients expect. It proves nothing, and nothing checks it."""
    return hashlib.sha256(text.encode()).hexdigest()
