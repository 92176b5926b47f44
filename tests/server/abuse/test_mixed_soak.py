"""Requests of every kind at once, some cut off on the way, while other clients measure pauses of their own streams.

`SPECRS_SOAK_SECONDS` sets the time; `make soak` asks for ten minutes.
"""

import asyncio
import json
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from lora.adapters import Spec, write_adapter
from specrs.pair import TARGET

from server.harness import Server, serving
from server.raw_streams import RawStream, raw_stream
from server.test_tools import TEMPLATE, TOOLS, WEATHER, joined

SECONDS = float(os.environ.get("SPECRS_SOAK_SECONDS", "30"))
MOST_PAUSE = float(os.environ.get("SPECRS_MOST_PAUSE", "0.25"))
WORKERS, WATCHERS = 12, 4
CUT = 0.1
GROWTH = (32 if SECONDS >= 300 else 384) * 2**20
"""Maximum growth of resident memory in bytes, from the second to the last quarter of the run. A short run still fills
its caches."""
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "How warm is it in Rome?"}]

Ask = tuple[str, dict[str, Any], Callable[[RawStream], bool]]
"""Path, body, and a function that returns whether the answer is what was asked for."""


def ids(random: random.Random, count: int) -> list[int]:
    """Return a prompt that shares nothing with others."""
    return [random.randrange(5, 1500) for _ in range(count)]


def text(found: RawStream) -> str:
    return "".join(choice["text"] for chunk in found.chunks for choice in chunk["choices"])


def generated(count: int) -> Callable[[RawStream], bool]:
    return lambda found: found.chunks[-1]["usage"]["completion_tokens"] == count


def plain(random: random.Random) -> Ask:
    length = random.choice([8, 100, 400])
    return COMPLETIONS, {"prompt": "def add(", "max_tokens": length, "temperature": 0.7}, generated(length)


def long_prompt(random: random.Random) -> Ask:
    return COMPLETIONS, {"prompt": ids(random, 1900), "max_tokens": 20}, generated(20)


def log_probabilities(random: random.Random) -> Ask:
    body = {"prompt": ids(random, 1000), "max_tokens": 4, "echo": True, "logprobs": 5}

    def told(found: RawStream) -> bool:
        choices = [choice for chunk in found.chunks for choice in chunk["choices"] if choice["logprobs"]]
        return sum(len(choice["logprobs"]["token_logprobs"]) for choice in choices) == 1004

    return COMPLETIONS, body, told


def completions(random: random.Random) -> Ask:
    return COMPLETIONS, {"prompt": "import ", "max_tokens": 40, "n": 4, "temperature": 1.0}, generated(160)


def grammar(random: random.Random) -> Ask:
    number, (choice, fits) = (
        random.randrange(100, 1000),
        random.choice(
            [
                ({"regex": r"[a-c]{3,9};"}, lambda text: text.endswith(";") and set(text[:-1]) <= set("abc")),
                ({"choice": ["yes", "no", "perhaps"]}, lambda text: text in ("yes", "no", "perhaps")),
                ({"json": WEATHER}, lambda text: not jsonschema.validate(json.loads(text), WEATHER)),
            ]
        ),
    )
    body = {"prompt": f"x{number} = ", "max_tokens": 120, "ignore_eos": False, "structured_outputs": choice}

    def held(found: RawStream) -> bool:
        ends = [choice["finish_reason"] for chunk in found.chunks for choice in chunk["choices"]]
        return "length" in ends or bool(fits(text(found)))

    return COMPLETIONS, body, held


def tool(random: random.Random) -> Ask:
    named = {"type": "function", "function": {"name": "weather"}}
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": named, "max_tokens": 120, "ignore_eos": False}

    def called(found: RawStream) -> bool:
        message = joined([chunk for chunk in found.chunks if chunk["choices"]])
        (name, arguments), *more = message["calls"]
        if message["finish_reason"] != "length":
            jsonschema.validate(json.loads(arguments), WEATHER)
        return name == "weather" and not more

    return CHAT, body, called


def chat(random: random.Random) -> Ask:
    return CHAT, {"messages": MESSAGES * random.randrange(1, 30), "max_tokens": 60}, generated(60)


def response(random: random.Random) -> Ask:
    body = {"input": "How warm is it in Rome?", "max_output_tokens": 60}
    return RESPONSES, body, lambda found: found.chunks[-1]["response"]["usage"]["output_tokens"] <= 60


def adapter(random: random.Random) -> Ask:
    name = random.choice(ADAPTERS)
    return COMPLETIONS, {"model": name, "prompt": ids(random, 40), "max_tokens": 60}, generated(60)


ADAPTERS = ["one", "two", "three"]
KINDS: list[Callable[[random.Random], Ask]] = [
    plain,
    long_prompt,
    log_probabilities,
    completions,
    grammar,
    tool,
    chat,
    response,
]
EVERYWHERE = {"ignore_eos": True, "stream_options": {"include_usage": True}}


@dataclass
class Tally:
    """Counts of how requests ended."""

    whole: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    failures: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


async def one_request(
    port: int, kinds: list[Callable[[random.Random], Ask]], random: random.Random, tally: Tally
) -> None:
    kind = random.choice(kinds)
    path, body, holds = kind(random)
    cut_after = random.randrange(1, 8) if random.random() < CUT else None
    everywhere = {} if path == RESPONSES else EVERYWHERE
    found = await raw_stream(port, path, {**everywhere, **body}, cut_after=cut_after)
    if found.cut:
        tally.cut += 1
    elif found.error is not None or not found.whole or not holds(found):
        tally.failures.append(f"{kind.__name__}: {found.error or found.chunks[-3:]}")
    else:
        tally.whole[kind.__name__] += 1


async def load(server: Server, kinds: list[Callable[[random.Random], Ask]], tally: Tally) -> None:
    """Keep `WORKERS` requests going, and record the server's memory."""
    end = time.monotonic() + SECONDS

    async def worker(seed: int) -> None:
        own = random.Random(seed)
        while time.monotonic() < end:
            await one_request(server.port, kinds, own, tally)

    async def watch() -> None:
        while time.monotonic() < end:
            tally.memory.append((await asyncio.to_thread(server.metrics))["process_resident_memory_bytes"])
            await asyncio.sleep(SECONDS / 100)

    await asyncio.gather(watch(), *map(worker, range(WORKERS)))


def stream_until_told(port: int, pipe: Connection) -> None:
    """Run in a process of its own: keep `WATCHERS` plain streams going until told to end, and send the longest pause of
    each through `pipe`."""
    pauses: list[float] = []
    body = {**EVERYWHERE, "prompt": "class Stack:", "max_tokens": 300, "temperature": 0}

    async def watcher() -> None:
        while not pipe.poll():
            pauses.append((await raw_stream(port, COMPLETIONS, body)).longest_pause)

    async def watchers() -> None:
        await asyncio.gather(*(watcher() for _ in range(WATCHERS)))

    pipe.send(None)
    asyncio.run(watchers())
    pipe.send(pauses)


@pytest.mark.parametrize("adapters", [(), ADAPTERS], ids=["native", "adapters"])
def test_mixed_soak(adapters: list[str], tmp_path: Path) -> None:
    """Run the mixed load without adapters, and with three of which two can run at once."""
    kinds = [*KINDS, adapter] if adapters else KINDS
    loras: tuple[str, ...] = ()
    for seed, name in enumerate(adapters):
        folder = write_adapter(tmp_path / name, TARGET, Spec(("q_proj", "down_proj")), seed=seed)
        loras += (f"{name}={folder}",)
    if loras:
        loras = ("--enable-lora", "--max-loras", "2", "--lora-modules", *loras)
    flags = ("--max-model-len", "2048", "--max-num-seqs", "32", "--num-gpu-blocks-override", "4096")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", TEMPLATE)
    with serving(*flags, *tools, *loras, "--disable-uvicorn-access-log") as server:
        for kind in kinds:  # what is loaded and compiled at the first use is no pause of a running server
            path, body, _ = kind(random.Random(1))
            server.post(
                path, {**body, "max_tokens": 8} if path != RESPONSES else {"input": "x", "max_output_tokens": 8}
            )
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=stream_until_told, args=(server.port, theirs))
        process.start()
        tally = Tally()
        try:
            ours.recv()
            asyncio.run(load(server, kinds, tally))
            ours.send(None)
            pauses = sorted(ours.recv())
        finally:
            process.join()
        after = server.wait_until_idle()
        quarter = max(1, len(tally.memory) // 4)
        quarters = [sum(tally.memory[i * quarter : (i + 1) * quarter]) / quarter / 2**20 for i in range(4)]
        print(
            f"{SECONDS:g} s: {dict(tally.whole)}, {tally.cut} cut off; longest pauses of {len(pauses)} streams: median "
            f"{pauses[len(pauses) // 2]:.3f} s, 90 % {pauses[len(pauses) * 9 // 10]:.3f} s, all {pauses[-1]:.3f} s; "
            f"memory by quarters {', '.join(f'{mean:.0f}' for mean in quarters)} MiB"
        )
        assert tally.failures == []
        assert set(tally.whole) == {kind.__name__ for kind in kinds}
        assert tally.cut > 0
        assert after["vllm:kv_cache_usage_perc"] == 0
        assert after['vllm:request_success_total{finished_reason="error"}'] == 0
        assert (quarters[3] - quarters[1]) * 2**20 < GROWTH
        assert pauses[-1] <= MOST_PAUSE, f"a stream paused {pauses[-1]:.3f} s"
