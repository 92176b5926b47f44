"""What launches cost here, by batch and K: measured on an engine before it serves. Keeps nothing but the costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from specrs.core import CostModel
from specrs.engine.request import Request
from specrs.runner.native import NativeRunner
from specrs.sampling import SamplingParams

if TYPE_CHECKING:
    from specrs.engine.engine import Engine, Watch
    from specrs.runner.ring import Header, RingSlot

SECONDS = 2.0
"""Time to measure for, a last round apart; batches for which there is no time in it are not measured, but two are."""
NATIVE_SECONDS = 0.2
"""The same where a launch is one call on a CPU: short, and alike."""
LAUNCHES = 2
"""Launches of each batch and K in a round; the fastest of all rounds counts, because noise only adds to it."""
MAX_ROUNDS = 8
PROMPT = 64
"""Tokens of a request's prompt."""


def measure_costs(engine: Engine) -> tuple[CostModel, float]:
    """Milliseconds of launches that only decode, at batches 1, 2, 4, ... and K = 0, 1, 2, 3, 4, 8, ... and the most;
    and those of each position of a draft catch-up chunk.

    Batches that there is no time for get what the last two measured ones lead to expect; launches refine all of them.
    Runs requests of made-up tokens and drops them. What is left of them is in the prefix cache and the counters, which
    the caller forgets.
    """
    most, rows = engine.num_speculative_tokens, engine.config.max_num_seqs
    ks = sorted({0, most} | {k for k in (3, *(1 << i for i in range(most.bit_length()))) if k < most})
    batches = sorted({rows} | {1 << i for i in range(rows.bit_length()) if 1 << i < rows})
    _measure(engine, 1, most)  # first calls allocate
    table = {(batch, k): math.inf for batch in batches for k in ks}
    seconds = NATIVE_SECONDS if isinstance(engine.runner, NativeRunner) else SECONDS
    began, measured = time.perf_counter(), len(batches)
    for rounds in range(MAX_ROUNDS):
        for i, batch in enumerate(batches[:measured]):
            before = time.perf_counter()
            for k in reversed(ks):  # the deepest first: the others find its draft KV in the prefix cache
                table[batch, k] = min(table[batch, k], _measure(engine, batch, k))
            now = time.perf_counter()
            if not rounds and i and now - began + 2.0 * (now - before) > seconds:
                measured = i + 1
                break
        if time.perf_counter() - began > seconds:
            break
    # In a context too short for a single draft no draft pays, whatever it costs.
    known = [[table[batch, k] if math.isfinite(table[batch, k]) else 1.0 for k in ks] for batch in batches[:measured]]
    model = CostModel(batches[:measured], ks, [_smooth(ks, row) for row in known])
    ms = np.array([[model.ms(batch, k) for k in ks] for batch in batches])
    # Fewer requests or drafts never take longer: where they seem to, something else did.
    ms = np.minimum.accumulate(np.minimum.accumulate(ms[::-1, ::-1], axis=0), axis=1)[::-1, ::-1]
    costs = CostModel(batches, ks, ms.tolist())
    return costs, _catch_up_ms(engine, costs.ms(1, most))


def _smooth(ks: list[int], row: list[float]) -> list[float]:
    """Costs at K >= 1 on the line `K * T_d + T_t` that fits them best: noise of one K would keep it out of use."""
    if len(ks) < 4:
        return row
    times = np.array(row[1:])
    slope, intercept = np.polyfit(ks[1:], times, 1, w=1.0 / times)
    if slope < 0.0 or slope + intercept <= 0.0:
        return row
    return [row[0], *(float(slope * k + intercept) for k in ks[1:])]


def _catch_up_ms(engine: Engine, decode_ms: float) -> float:
    """Of each position, the fixed part of a chunk included."""
    found: list[float] = []

    def watch(slot: RingSlot, header: Header, ms: float) -> None:
        if header.num_draft_tokens and not header.num_prefill:
            found.append(max(0.0, ms - decode_ms) / header.num_draft_tokens)

    for run in range(LAUNCHES + 1):
        _run(engine, 1, engine.num_speculative_tokens, watch, lambda: False, first_prompt=1 + run)
    return min(found, default=0.0)


def _measure(engine: Engine, batch: int, k: int) -> float:
    """The fastest launch of `batch` requests with `k` drafts each; infinity where such a launch does not come about."""
    times: list[float] = []

    def watch(slot: RingSlot, header: Header, ms: float) -> None:
        uniform = int(slot.record_arrays["entry_k"][: header.num_decode].sum()) == batch * k
        if header.num_decode == batch and uniform and not header.num_prefill and not header.num_draft_chunks:
            times.append(ms)

    _run(engine, batch, k, watch, lambda: len(times) >= LAUNCHES)
    return min(times, default=math.inf)


def _run(engine: Engine, batch: int, k: int, watch: Watch, done: Callable[[], bool], *, first_prompt: int = 0) -> None:
    """Run `batch` requests with `k` drafts each, until they end or there is enough."""
    tokens = (k + 1) * (LAUNCHES + engine.depth + 1)
    length = max(1, min(PROMPT, engine.config.max_num_batched_tokens // (4 * batch), engine.max_model_len - tokens))
    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, num_speculative_tokens=k
    )
    vocab = engine.limits.vocab_size
    for i in range(batch):
        # The same prompts for every K: their KV comes from the prefix cache from the second time on.
        start = (first_prompt * 65537 + i) * 7919 + 1
        prompt = [(start + j * 104729) % vocab for j in range(length)]
        engine.add_request(Request(i, prompt, params, num_speculative_tokens=engine.num_speculative_tokens))
    engine.watch = watch
    while engine.requests and not done():
        engine.step()
    engine.watch = None
    for request_id in list(engine.requests):
        engine.abort(request_id)
    while engine.has_unfinished():
        engine.step()
