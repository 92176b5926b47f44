"""A small OpenAI-compatible server that streams given chunks, in a thread or as a program of its own.

A *script* says what a request gets: chunks of given numbers of tokens, then how the stream ends. Acceptance counters
count every chunk after the first as a draft of K tokens. The server keeps what it sent, for tests to compare with.
"""

import argparse
import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

POSITION = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="%d"} %d'


@dataclass
class Script:
    """Script of the answer to one request.

    `end`: done, cut (the connection breaks), die (and the port is closed), silent (no [DONE]), error, garbage, or
    an HTTP status instead of a stream.
    """

    chunks: list[int] = field(default_factory=lambda: [1, 2, 2])
    end: str | int = "done"
    usage: bool = True
    gap: float = 0.0
    bundled: bool = False
    """All chunks in one write, as a busy network delivers them."""


@dataclass
class FakeServer:
    """Server whose `script` gives the answer to each request by its number, in the order in which requests arrive. A
    request for one token is a readiness probe: it gets one token, and has no number."""

    script: Callable[[int], Script] = lambda number: Script()
    k: int = 0
    base_url: str = ""
    metrics: bool = True
    profiler: bool = True
    model: str = "fake"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)
    profiled: list[str] = field(default_factory=list)
    drafts: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=lambda: [0] * 8)
    running: int = 0
    most_running: int = 0
    on_death: Callable[[], None] = lambda: None

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        if self.profiler:
            app.router.add_post("/start_profile", self._profile)
            app.router.add_post("/stop_profile", self._profile)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model}]})

    async def _profile(self, request: web.Request) -> web.Response:
        self.profiled.append(request.path)
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.metrics:
            return web.Response(status=404)
        lines = [
            "# HELP vllm:spec_decode_num_drafts_total Drafts.",
            f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {self.drafts}.0',
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {self.drafts * self.k}.0',
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {self.accepted}.0',
            'vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e9',
            *(POSITION % (i, count) for i, count in enumerate(self.per_position[: self.k])),
        ]
        return web.Response(text="\n".join(lines if self.k else lines[:1]) + "\n")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if (body.get("max_tokens") or body.get("max_completion_tokens")) == 1:
            script = Script([1])  # the question whether anybody is there
        else:
            script = self.script(len(self.bodies))
            self.bodies.append(body)
            self.sent.append(script.chunks)
        if isinstance(script.end, int):
            error = {"error": {"message": f"refused with {script.end}", "type": "BadRequestError"}}
            return web.json_response(error, status=script.end)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(request, script)
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, script: Script) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = request.path.endswith("/chat/completions")
        parts = [b": a comment keeps the connection open\n\n"]
        for i, tokens in enumerate(script.chunks):
            text = "x " * tokens
            choice = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
            parts.append(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            if i and self.k:
                self.drafts += 1
                self.accepted += tokens - 1
                for position in range(tokens - 1):
                    self.per_position[position] += 1
        if script.usage:
            usage = {"prompt_tokens": 7, "completion_tokens": sum(script.chunks)}
            parts.append(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\r\n\r\n")
        parts += {
            "done": [b"data: [DONE]\n\n"],
            "error": [b'data: {"error": {"message": "out of luck"}}\n\n'],
            "garbage": [b"data: {not json\n\n"],
        }.get(str(script.end), [])
        for part in [b"".join(parts)] if script.bundled else parts:
            # a message in two writes must stay one message
            await response.write(part[: len(part) // 2])
            await response.write(part[len(part) // 2 :])
            await asyncio.sleep(script.gap)
        if script.end in ("cut", "die"):
            assert request.transport is not None
            request.transport.abort()
            if script.end == "die":
                self.on_death()
            return response
        await response.write_eof()
        return response


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """Run the server on a free port, in a thread of its own, and stop it at the end. A script with the end `die` closes
    the port."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(server.app())

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.base_url = site.name
        server.on_death = lambda: asyncio.ensure_future(site.stop()) and None

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def main() -> None:
    """Run the fake server as a program. With `--die-once FILE` it ends within a request at K > 0 and creates FILE; if
    FILE exists, it goes on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--speculative-config", default="{}")
    parser.add_argument("--die-once", type=Path)
    parser.add_argument("--gap-ms", type=float, default=1.0, help="between two chunks")
    parser.add_argument("--broken", action="store_true")
    arguments = parser.parse_args()
    if arguments.broken:
        print("no weights here")
        sys.exit(3)
    k = json.loads(arguments.speculative_config).get("num_speculative_tokens", 0)
    print(f"K = {k}", flush=True)
    chunk = max(1, (k + 1) // 2 + 1) if k else 1

    def script(number: int) -> Script:
        dies = k > 0 and number == 4 and arguments.die_once is not None and not arguments.die_once.exists()
        if dies:
            arguments.die_once.touch()
        return Script([1] + [chunk] * 4, end="die" if dies else "done", gap=0.001 * arguments.gap_ms)

    server = FakeServer(script, k=k, on_death=lambda: os._exit(1))
    web.run_app(server.app(), host="127.0.0.1", port=arguments.port, print=None)


if __name__ == "__main__":
    main()
