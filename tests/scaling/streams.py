"""Many streamed requests at once, and how each of them ended. Holds no tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TIMEOUT = 120.0


@dataclass
class Outcome:
    """What a client saw of one request. `end`: `done`, `status`, `cut` (the connection broke), `early` (no [DONE])."""

    prompt: str
    end: str = ""
    status: int = 0
    error: str = ""
    text: str = ""
    marks: set[str] = field(default_factory=set)

    @property
    def failed(self) -> bool:
        return self.end != "done"


async def stream(session: aiohttp.ClientSession, url: str, prompt: str, body: dict[str, Any]) -> Outcome:
    """One completion; it ends within TIMEOUT, or the test does."""
    outcome = Outcome(prompt)
    try:
        async with session.post(
            f"{url}/v1/completions", json={"model": "pair", "prompt": prompt, "stream": True, **body}
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
    except aiohttp.ClientError as fault:
        outcome.end, outcome.error = "cut", repr(fault)
    if not outcome.end:
        outcome.end = "early"
    return outcome


async def run_streams(
    url: str,
    prompts: Sequence[str],
    concurrency: int,
    body: dict[str, Any],
    at: Callable[[int, list[Outcome]], Awaitable[None]] | None = None,
) -> list[Outcome]:
    """All prompts, so many at a time; `at` is told how many have ended, and all outcomes so far, behind each."""
    left = iter(prompts)
    outcomes: list[Outcome] = []
    timeout = aiohttp.ClientTimeout(total=TIMEOUT)

    async def work(session: aiohttp.ClientSession) -> None:
        for prompt in left:
            outcomes.append(await stream(session, url, prompt, body))
            if at is not None:
                await at(len(outcomes), outcomes)

    async with (
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(concurrency):
            group.create_task(work(session))
    return outcomes
