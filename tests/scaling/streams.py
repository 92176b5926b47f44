"""Many streamed requests at once, and how each of them ended. Holds no tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TIMEOUT = 120.0
MANY = 100
"""Maximum tokens of a stream that must still be running when the client has read its first tokens."""


@dataclass
class Outcome:
    """Outcome of one request as its client saw it. `end`: `done`, `status` (an HTTP error, or an error as an event),
    `cut` (the connection broke), `early` (no [DONE])."""

    prompt: str
    name: str = ""
    """The client's name for the request: its `X-Request-Id`."""
    end: str = ""
    status: int = 0
    error: str = ""
    text: str = ""
    marks: set[str] = field(default_factory=set)

    @property
    def failed(self) -> bool:
        return self.end != "done"


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    outcome: Outcome,
    body: Mapping[str, Any],
    seen: Callable[[Outcome], None] | None = None,
) -> Outcome:
    """Run one streamed completion and fill in its `outcome`. Ends the test after TIMEOUT. `seen` is called after each
    chunk."""
    try:
        async with session.post(
            f"{url}/v1/completions",
            json={"model": "pair", "prompt": outcome.prompt, "stream": True, **body},
            headers={"X-Request-Id": outcome.name},
        ) as answer:
            outcome.status = answer.status
            if answer.status != 200:
                outcome.end, outcome.error = "status", await answer.text()
                return outcome
            async for line in answer.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    outcome.end = "done"
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    outcome.end, outcome.error = "status", json.dumps(chunk)
                    return outcome
                outcome.marks.add(chunk["id"].rpartition("@")[2])
                outcome.text += "".join(choice["text"] for choice in chunk["choices"])
                if seen is not None:
                    seen(outcome)
    except aiohttp.ClientError as fault:
        outcome.end, outcome.error = "cut", repr(fault)
    if not outcome.end:
        outcome.end = "early"
    return outcome


async def run_streams(
    url: str,
    prompts: Sequence[str],
    concurrency: int,
    body: Mapping[str, Any] | Callable[[str], Mapping[str, Any]],
    at: Callable[[int, list[Outcome]], Awaitable[None]] | None = None,
    seen: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Run all prompts, `concurrency` at a time. `body` may depend on the prompt. `at` is called after each request with
    the number of ended ones and all outcomes; `seen` after each chunk of a stream."""
    left = iter([Outcome(prompt, f"stream-{i}") for i, prompt in enumerate(prompts)])
    outcomes: list[Outcome] = []
    timeout = aiohttp.ClientTimeout(total=TIMEOUT)

    async def work(session: aiohttp.ClientSession) -> None:
        for outcome in left:
            given = body(outcome.prompt) if callable(body) else body
            outcomes.append(await stream(session, url, outcome, given, seen))
            if at is not None:
                await at(len(outcomes), outcomes)

    async with (
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(concurrency):
            group.create_task(work(session))
    return outcomes


class Kill:
    """Kills a server in the middle of a stream: the first of `prompts`, which are asked for MANY tokens, that has
    received some of them from that server."""

    def __init__(
        self,
        prompts: Sequence[str],
        body: Mapping[str, Any],
        kill: Callable[[], None],
        is_victims: Callable[[Outcome], bool] = lambda _: True,
    ) -> None:
        self._prompts, self._body = frozenset(prompts), body
        self._kill, self._is_victims = kill, is_victims
        self.during: Outcome | None = None
        """The stream during which the server was killed."""

    def body(self, prompt: str) -> Mapping[str, Any]:
        """Return the body of a prompt's request, for `run_streams`."""
        return {**self._body, "max_tokens": MANY} if prompt in self._prompts else self._body

    def seen(self, outcome: Outcome) -> None:
        if self.during is None and outcome.prompt in self._prompts and self._is_victims(outcome):
            self.during = outcome
            self._kill()
