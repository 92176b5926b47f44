"""Reads many streams at once, each on a socket of its own, in one event loop, for tests of load. Holds no tests."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

ENDS = ("response.completed", "response.incomplete", "response.failed")
"""The last events of `/v1/responses`, which has no `[DONE]`."""


@dataclass
class RawStream:
    """Result of one stream."""

    chunks: list[Any] = field(default_factory=list)
    longest_pause: float = 0.0  # in seconds, between two chunks
    cut: bool = False
    whole: bool = False  # it came to its end

    @property
    def error(self) -> str | None:
        """Error message that the server sent."""
        return next((str(chunk) for chunk in self.chunks if chunk.get("error")), None)


async def raw_stream(port: int, path: str, body: dict[str, Any], *, cut_after: int | None = None) -> RawStream:
    """Ask for a stream and read it, or break the connection after `cut_after` chunks.

    An answer that is no stream has no chunks.
    """
    encoded = json.dumps({**body, "stream": True}).encode()
    found, last = RawStream(), None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(encoded)}\r\n\r\n"
        writer.write(head.encode() + encoded)
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                found.whole = True
                break
            now = time.monotonic()
            found.longest_pause = max(found.longest_pause, now - (last or now))
            last = now
            found.chunks.append(json.loads(line[6:]))
            if found.chunks[-1].get("type") in ENDS:
                found.whole = True
                break
            if cut_after is not None and len(found.chunks) >= cut_after:
                found.cut = True
                writer.transport.abort()
                break
    finally:
        writer.close()
    return found
