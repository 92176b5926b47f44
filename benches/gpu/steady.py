"""Measures the throughput of an engine under a constant number of requests: a closed loop with refill, of which the
middle counts.

Lengths vary by half around their mean, and the first requests are cut at a random place. So requests do not start and
end together, as they do not on a server.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.sampling import SamplingParams

from gpu.timing import ON_GPU, synchronize

PROMPT, OUTPUT = (150, 200) if ON_GPU else (6, 4)
"""Mean number of tokens of a prompt and of an output, as in the published measurements."""
WAVES = 6
"""Total number of requests, as a multiple of the number that run at once."""


@dataclass
class Steps:
    """Counts of the watched steps."""

    ms: list[float] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    drafts: int = 0
    merged: int = 0
    """Number of steps whose prompt chunks were rows of the verification pass."""
    apart: int = 0
    """Number of steps with a pass of their own for prompt chunks."""

    def watch(self, slot: Any, header: Any, ms: float) -> None:
        """Count a settled step."""
        self.ms.append(ms)
        self.batch.append(header.num_decode)
        self.drafts += int(slot.record_arrays["seq_k"][: header.num_decode].sum())
        self.merged += slot.merged
        self.apart += bool(header.num_prefill) and not slot.merged


class ClosedLoop:
    """Keeps `concurrency` requests running: each that ends is replaced, until `WAVES` times as many have been added."""

    def __init__(self, engine: Engine, concurrency: int) -> None:
        self.engine, self.concurrency = engine, concurrency
        self.rng = random.Random(concurrency)
        self.added, self.tokens, self.spans = 0, 0, list[float]()
        self.live: list[Request] = []
        self.ended = 0

    def fill(self) -> None:
        """Add requests until `concurrency` requests run."""
        while len(self.live) < self.concurrency and self.added < WAVES * self.concurrency:
            first = self.added < self.concurrency
            output = self._length(OUTPUT)
            request = Request(
                1_000_000 * self.concurrency + self.added,
                [self.rng.randrange(self.engine.limits.vocab_size) for _ in range(self._length(PROMPT))],
                SamplingParams(
                    max_tokens=self.rng.randint(1, output) if first else output,
                    ignore_eos=True,
                    temperature=0.0,
                    detokenize=False,
                ),
                num_speculative_tokens=self.engine.num_speculative_tokens,
            )
            self.engine.add_request(request)
            self.live.append(request)
            self.added += 1

    def step(self) -> None:
        """Advance the engine by a step, and remove the requests that have ended."""
        self.engine.step()
        for request in [one for one in self.live if one.finished]:
            self.live.remove(request)
            self.ended += 1
            self.tokens += len(request.output_token_ids)
            if request.finish_time is not None and request.first_token_time is not None:
                later = len(request.output_token_ids) - 1
                self.spans += [(request.finish_time - request.first_token_time) / later] if later else []

    @property
    def done(self) -> int:
        """Number of tokens that all requests have received."""
        return self.tokens + sum(len(request.output_token_ids) for request in self.live)

    def _length(self, mean: int) -> int:
        return self.rng.randint(mean // 2, mean + mean // 2)


def steady(engine: Engine, concurrency: int, seconds: float) -> dict[str, Any]:
    """Measure tokens per second. The time runs from when `concurrency` requests have ended until the last request is
    added.

    After `seconds` no more requests are added. The warm-up ends after half of `seconds` at the latest. Requests that
    still run at the end are aborted.
    """
    loop = ClosedLoop(engine, concurrency)
    synchronize()
    began = time.perf_counter()
    loop.fill()
    while loop.ended < concurrency and time.perf_counter() - began < seconds / 2:
        loop.step()
        loop.fill()
    engine.watch, loop.spans = (steps := Steps()).watch, []
    start, before, ended = time.perf_counter(), loop.done, loop.ended
    while loop.added < WAVES * concurrency and time.perf_counter() - began < seconds:
        loop.step()
        loop.fill()
    elapsed, tokens = time.perf_counter() - start, loop.done - before
    engine.watch = None
    for request in loop.live:
        engine.abort(request.request_id)
    while engine.has_unfinished():
        engine.step()
    return {
        "tokens_per_s": tokens / elapsed,
        "mean_tpot_ms": 1e3 * statistics.mean(loop.spans) if loop.spans else None,
        "seconds": elapsed,
        "requests": loop.ended - ended,
        "steps": len(steps.ms),
        "step_ms": statistics.mean(steps.ms) if steps.ms else None,
        "mean_batch": statistics.mean(steps.batch) if steps.batch else None,
        "drafts_per_sequence": steps.drafts / max(1, sum(steps.batch)),
        "merged_steps": steps.merged,
        "steps_with_own_chunk_pass": steps.apart,
    }
