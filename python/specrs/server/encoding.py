"""Encodes answers as JSON, either in one piece or in parts that let streams go on in between. Knows no endpoint."""

from __future__ import annotations

import json
from typing import Any


def encode(value: object) -> bytes:
    """Encode `value` as JSON in one piece, without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


def named_event(event: dict[str, Any]) -> bytes:
    """Encode a server-sent event that has its `type` as name, too."""
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + encode(event) + b"\n\n"


def encode_in_parts(value: Any, depth: int = 0) -> bytes:
    """Encode `value` as `encode` does, in many short parts.

    The json module blocks the interpreter, and with it every stream, until it has encoded its whole argument. So each
    field of each choice is written separately. Log probabilities are written 64 positions at a time, which takes half a
    millisecond each.
    """
    if isinstance(value, dict) and depth < 4:  # the answer, a choice, its log probabilities
        fields = (encode(key) + b":" + encode_in_parts(item, depth + 1) for key, item in value.items())
        return b"{" + b",".join(fields) + b"}"
    if isinstance(value, list) and depth < 2:  # the choices
        return b"[" + b",".join(encode_in_parts(item, depth + 1) for item in value) + b"]"
    if isinstance(value, list):
        return b"[" + b",".join(encode(value[i : i + 64])[1:-1] for i in range(0, len(value), 64)) + b"]"
    return encode(value)
