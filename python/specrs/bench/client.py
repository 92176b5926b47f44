"""Streams one request from an OpenAI-compatible server and notes when each chunk arrived. Knows no load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specrs.bench.datasets import Sample
from specrs.bench.records import RequestRecord
from specrs.errors import short

if TYPE_CHECKING:
    import aiohttp

SIX_HOURS = 6 * 60 * 60
BACKENDS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""For each backend, the path of its endpoint. `vllm` is another name of `openai`, as in vLLM."""


class ServerGone(Exception):
    """Exception that says that no server answers at the address any more."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Server and endpoint of requests, and the fields that all requests share. `sampling` holds the sampling parameters
    that the user set; the server chooses the others."""

    base_url: str
    endpoint: str
    model: str
    chat: bool
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = False

    @property
    def url(self) -> str:
        """Address that requests go to: base URL and endpoint."""
        return self.base_url.rstrip("/") + self.endpoint

    def payload(self, sample: Sample) -> dict[str, Any]:
        """Return the JSON body of the request for `sample`."""
        body: dict[str, Any] = {"model": self.model}
        if self.chat:
            body["messages"] = [{"role": "user", "content": sample.prompt}]
            body["max_completion_tokens"] = sample.output_len
        else:
            body["prompt"] = sample.prompt if isinstance(sample.prompt, str) else list(sample.prompt)
            body["max_tokens"] = sample.output_len
        body |= {"stream": True, "stream_options": {"include_usage": True}, **self.sampling}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body


def session(max_concurrency: int | None) -> aiohttp.ClientSession:
    """Return a client that opens up to `max_concurrency` connections; None: any number. The caller closes it."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=max_concurrency or 0, keepalive_timeout=60)
    headers = {}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    timeout = aiohttp.ClientTimeout(total=SIX_HOURS, sock_connect=30)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)


async def send(
    client: aiohttp.ClientSession,
    target: Target,
    sample: Sample,
    record: RequestRecord,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> None:
    """Stream one request and record its events in `record`. After a failure, `record` keeps what came before.

    Raises `ServerGone` if no server answers; `record.error` then has the reason, too.
    """
    import aiohttp

    record.start, record.error = clock(), "cut off"
    try:
        async with client.post(target.url, json=target.payload(sample)) as response:
            if response.status != 200:
                reason = error_message(await response.text()) or response.reason
                record.error = f"HTTP {response.status}: {reason}"
                return
            record.error = "the stream ended before [DONE]"
            async for arrived, message in _messages(response, clock):
                if message == "[DONE]":
                    record.error = None
                else:
                    _read(message, arrived, record)
    except aiohttp.ClientConnectorError as error:
        record.error = f"no connection: {error}"
        raise ServerGone(record.error) from None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        record.error = f"connection lost after {len(record.events)} chunks: {error or type(error).__name__}"
    except _Malformed as error:
        record.error = str(error)
    if record.error is None and not record.events:
        record.error = "the stream had no chunk with a choice"


class _Malformed(Exception):
    """Exception for a message that is no OpenAI chunk, or that reports an error."""


def _read(message: str, arrived: int, record: RequestRecord) -> None:
    try:
        data = json.loads(message)
    except json.JSONDecodeError:
        raise _Malformed(f"a chunk is not JSON: {short(message)}") from None
    if not isinstance(data, dict):
        raise _Malformed(f"a chunk is no JSON object: {short(message)}")
    if "error" in data:
        raise _Malformed(f"the server reported: {error_message(message)}")
    if choices := data.get("choices"):
        record.events.append(arrived)
        choice = choices[0]
        record.text += (choice["delta"].get("content") if "delta" in choice else choice.get("text")) or ""
    if usage := data.get("usage"):
        record.output_tokens = usage.get("completion_tokens") or 0
        record.input_tokens = usage.get("prompt_tokens") or record.input_tokens


async def _messages(response: aiohttp.ClientResponse, clock: Callable[[], int]) -> AsyncIterator[tuple[int, str]]:
    """Yield the data of each server-sent event, with the time at which the network delivered its end."""
    buffer = b""
    async for chunk in response.content.iter_any():
        arrived = clock()
        buffer += chunk.replace(b"\r", b"")
        *events, buffer = buffer.split(b"\n\n")
        for event in events:
            for message in _data(event):
                yield arrived, message


def _data(event: bytes) -> Iterator[str]:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    if lines:  # an event of comments alone keeps the connection alive and says nothing
        yield b"\n".join(lines).decode("utf-8", errors="replace")


def error_message(text: str) -> str:
    """Return the message of an error body, in OpenAI's form or not, cut to a length that fits in a line."""
    try:
        data = json.loads(text)
        message = data["error"]["message"] if isinstance(data["error"], dict) else data["error"]
    except (json.JSONDecodeError, KeyError, TypeError):
        message = text
    return " ".join(str(message).split())[:300]


async def wait_ready(
    client: aiohttp.ClientSession, target: Target, timeout_seconds: float, pause: float = 1.0
) -> str | None:
    """Ask the server for one token until it answers. Return None if it did, otherwise the last failure after
    `timeout_seconds` (0: one try)."""
    sample = Sample("Hi", 1)  # none of the prompts that are measured: a server may remember it
    deadline = time.monotonic() + timeout_seconds
    while True:
        record = RequestRecord()
        with contextlib.suppress(ServerGone):
            await send(client, target, sample, record)
        if record.success:
            return None
        if time.monotonic() + pause > deadline:
            return record.error
        await asyncio.sleep(pause)
