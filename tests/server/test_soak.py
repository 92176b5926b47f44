"""64 streams at once, for as long as asked: mixed lengths, a tenth of them cut off, and afterwards nothing is left
running.

`SPECRS_SOAK_SECONDS` sets the time; `make soak` asks for five minutes.
"""

import asyncio
import os
import random
import time
from dataclasses import dataclass, field
from typing import Any

from .harness import Server, serving
from .raw_streams import raw_stream

SECONDS = float(os.environ.get("SPECRS_SOAK_SECONDS", "5"))
STREAMS = 64
WARM_UP = 0.4
"""Share of the time after which memory must stay constant. Before, pools and caches fill."""
GROWTH = 24 * 2**20
"""Maximum growth of mean resident memory in bytes, from the first to the last third of the time after the warm-up."""
PROMPTS = [
    "import os\n",
    "def add(a, b):\n    return",
    "class Stack:\n    def push(self, item):\n",
    "x = [1, 2, 3]\n" * 8,
]


@dataclass
class Tally:
    """Counts of how streams ended."""

    whole: int = 0
    cut: int = 0
    failures: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)


async def one_stream(port: int, random: random.Random, tally: Tally) -> None:
    """Run one request on a connection of its own: read it to its end and check it, or cut it off on the way."""
    length = random.choice([4, 16, 60, 150])
    cut = random.random() < 0.1
    body: dict[str, Any] = {
        "prompt": random.choice(PROMPTS),
        "max_tokens": length,
        "ignore_eos": True,
        "temperature": random.choice([0, 0.8]),
        "num_speculative_tokens": random.choice([0, 2, 5]),
        "stream_options": {"include_usage": True},
    }
    cut_after = random.randrange(1, 12) if cut else None
    found = await raw_stream(port, "/v1/completions", body, cut_after=cut_after)
    if found.error is not None:
        tally.failures.append(found.error)
    elif found.cut:
        tally.cut += 1
    elif not found.whole or found.chunks[-1]["usage"]["completion_tokens"] != length:
        tally.failures.append(f"{length} tokens asked for: {found.chunks[-1:]}, {len(found.chunks)} events")
    else:
        tally.whole += 1


async def load(server: Server, tally: Tally) -> None:
    """Keep `STREAMS` streams going, and record the server's memory."""
    end = time.monotonic() + SECONDS

    async def worker(seed: int) -> None:
        own = random.Random(seed)
        while time.monotonic() < end:
            await one_stream(server.port, own, tally)

    async def watch() -> None:
        start = time.monotonic()
        while time.monotonic() < end:
            metrics = await asyncio.to_thread(server.metrics)
            tally.memory.append((time.monotonic() - start, metrics["process_resident_memory_bytes"]))
            await asyncio.sleep(min(1.0, SECONDS / 20))

    await asyncio.gather(watch(), *(worker(seed) for seed in range(STREAMS)))


def test_soak() -> None:
    # fewer blocks than the requests can fill: some lose theirs, and every block is soon in use once
    flags = ("--max-model-len", "256", "--max-num-seqs", "48", "--num-gpu-blocks-override", "256")
    with serving(*flags, "--disable-uvicorn-access-log") as server:
        files = server.metrics()["process_open_fds"]
        tally = Tally()
        asyncio.run(load(server, tally))
        after = server.wait_until_idle()
        assert tally.failures == []
        assert tally.whole >= STREAMS
        assert tally.cut > 0
        # every block is back, and the next request is served like the first
        assert after["vllm:kv_cache_usage_perc"] == 0
        assert server.complete(prompt="x", max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5
        counted = {
            reason: after[f'vllm:request_success_total{{finished_reason="{reason}"}}']
            for reason in ("stop", "length", "abort", "error")
        }
        assert counted["error"] == 0
        # one that was cut off may have ended before the server saw it
        assert tally.whole <= counted["length"] <= tally.whole + tally.cut
        assert counted["length"] + counted["abort"] == tally.whole + tally.cut
        while server.metrics()["process_open_fds"] > files:
            continue
        settled = [memory for seconds, memory in tally.memory if seconds >= WARM_UP * SECONDS]
        third = max(1, len(settled) // 3)
        early, late = sum(settled[:third]) / third, sum(settled[-third:]) / third
        print(
            f"{tally.whole} streams whole, {tally.cut} cut off in {SECONDS:g} s; "
            f"memory {early / 2**20:.0f} MiB, then {late / 2**20:.0f} MiB"
        )
        assert late - early < GROWTH
