"""Answers as JSON, in one piece or without holding up streams. Knows no endpoint."""

from __future__ import annotations

import json
from typing import Any


def encode(value: object) -> bytes:
    """In one piece, without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


def encode_in_parts(value: Any, depth: int = 0) -> bytes:
    """The same bytes in many short writes: json holds the interpreter, and with it every stream, until it has written
    what it got. Each field of each choice is a write of its own, of log probabilities each 64 positions, half a
    millisecond."""
    if isinstance(value, dict) and depth < 4:  # the answer, a choice, its log probabilities
        fields = (encode(key) + b":" + encode_in_parts(item, depth + 1) for key, item in value.items())
        return b"{" + b",".join(fields) + b"}"
    if isinstance(value, list) and depth < 2:  # the choices
        return b"[" + b",".join(encode_in_parts(item, depth + 1) for item in value) + b"]"
    if isinstance(value, list):
        return b"[" + b",".join(encode(value[i : i + 64])[1:-1] for i in range(0, len(value), 64)) + b"]"
    return encode(value)
