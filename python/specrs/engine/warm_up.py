"""Measures the milliseconds of a step by batch size and K, on a runner that no engine uses yet. Keeps only the
costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from specrs.backends.ring import Header, RingSlot
from specrs.core import PLAN_STEP, CostModel, Outputs
from specrs.engine.faults import DraftFaults
from specrs.engine.parts import EngineParts, Watch
from specrs.engine.request import Request
from specrs.sampling import SamplingParams

SECONDS = 2.0
"""Seconds to spend on measuring, without the last round. Batch sizes that do not fit into this time are not measured,
except for the first two."""
NATIVE_SECONDS = 0.2
"""Seconds to spend on measuring if a step is one call of the Rust core. Such steps are short, and take similar
times."""
NUM_STEPS = 2
"""Number of steps of each batch size and K in a round. The fastest step of all rounds counts, because noise only adds
time."""
MAX_ROUNDS = 8
FEW_DRAFTS = 8
"""Numbers of drafts up to this one are always measured. Their costs lie close to a line."""
FEW_DRAFTS_COST = 3.0
"""Maximum cost of a step with `FEW_DRAFTS` drafts, relative to one without, at which larger numbers are measured. If a
step costs more, 16 drafts give less than 14 % more tokens per second than 8, even if all are accepted."""
PROMPT = 64
"""Number of tokens of each request's prompt."""


class MeasuringLoop:
    """Loop that plans, executes and settles steps of artificial requests, and times each step as an engine does."""

    def __init__(self, parts: EngineParts) -> None:
        """Prepare to measure. The scheduler and ring of `parts` must be used by nothing else. An engine may use the
        runner afterwards."""
        self.config = parts.config
        self.limits = parts.limits
        self.runner = parts.runner
        self.depth = parts.ring.depth
        self.live: set[int] = set()
        """Ids of the requests that have not ended."""
        self.watch: Watch | None = None
        """Function that is called for each settled step with its slot, its header, and its milliseconds."""
        self._scheduler = parts.scheduler
        self._ring = parts.ring
        self._outputs = Outputs()
        self._faults = DraftFaults(parts.scheduler, parts.drafters)
        self._settled_at = 0.0

    def add_request(self, request: Request, limit: int, num_speculative_tokens: int) -> None:
        """Queue a request that ends at `limit` tokens, prompt included, with `num_speculative_tokens` drafts per
        step."""
        self._scheduler.add_request(
            request.request_id,
            np.asarray(request.prompt_token_ids, dtype=np.int64),
            limit=limit,
            num_speculative_tokens=num_speculative_tokens,
            sampling=request.sampling(),
        )
        self._outputs.add(request.output)
        self.live.add(request.request_id)

    def step(self) -> None:
        """Advance until one step has settled."""
        scheduler = self._scheduler
        while scheduler.num_in_flight < self.depth:
            slot = self._ring.slot(scheduler.num_steps)
            slot.started = time.perf_counter()
            if scheduler.plan(slot.record) != PLAN_STEP:
                break
            self._faults.planned()
            header = slot.header()
            self.runner.execute(slot, header)
            self._faults.executed(slot, header)
        if scheduler.num_in_flight:
            self._settle()

    def drop_requests(self) -> None:
        """End all requests, and settle the steps in flight."""
        for request_id in self.live:
            self._outputs.remove(request_id)
            self._scheduler.abort(request_id)
        self.live.clear()
        while self._scheduler.has_unfinished():
            self.step()

    def _settle(self) -> None:
        scheduler = self._scheduler
        step_id = scheduler.num_steps - scheduler.num_in_flight
        slot = self._ring.slot(step_id)
        self.runner.wait(slot)
        _, ended = self._outputs.settle(scheduler, step_id, slot.results, slot.settled, now=time.monotonic())
        begun, self._settled_at = max(slot.started, self._settled_at), time.perf_counter()
        self.live.difference_update(ended)
        if self.watch is not None:
            self.watch(slot, slot.header(), 1e3 * (self._settled_at - begun))


def measure_costs(parts: EngineParts, *, on_host: bool = False) -> tuple[CostModel, float]:
    """Measure the cost of steps, with drafts from the record if `on_host`. A runner that can measures them itself
    (`Runner.step_costs`).

    Returns the milliseconds of steps that only decode, at batch sizes 1, 2, 4, ... and K = 0, 1, 2, 3, 4, 8, 16 and
    the maximum of both; and the milliseconds per position of a draft catch-up chunk, 0 with drafts from the record.
    Batch sizes that there is no time for are extrapolated from the last two measured ones. K above `FEW_DRAFTS` are
    left out of the costs if drafts are expensive. Where there is no time for them, their costs continue the line of
    smaller K. Real steps refine all costs later.

    Runs requests of artificial tokens and drops them. The scheduler of `parts` cannot be used afterwards. The runner's
    number of passes has changed.
    """
    loop = MeasuringLoop(parts)
    most, rows = loop.limits.num_speculative_tokens, loop.config.most_seqs
    ks = sorted({0, most} | {k for k in (3, *(1 << i for i in range(most.bit_length()))) if k < most})
    few, many = [k for k in ks if k <= FEW_DRAFTS], [k for k in ks if k > FEW_DRAFTS]
    batches = sorted({rows} | {1 << i for i in range(rows.bit_length()) if 1 << i < rows})
    own = loop.runner.step_costs(on_host=on_host)
    _measure(loop, 1, few[-1])  # first calls allocate
    if own is not None:
        return own, 0.0 if on_host else _catch_up_ms(loop, few[-1], own.ms(1, few[-1]))
    table = {(batch, k): math.inf for batch in batches for k in ks}
    seconds = NATIVE_SECONDS if loop.runner.is_native else SECONDS
    began, measured = time.perf_counter(), len(batches)
    for rounds in range(MAX_ROUNDS):
        for i, batch in enumerate(batches[:measured]):
            before = time.perf_counter()
            for k in reversed(few):  # the deepest first: the others find its draft KV in the prefix cache
                table[batch, k] = min(table[batch, k], _measure(loop, batch, k))
            if not rounds and not i and table[batch, few[-1]] > FEW_DRAFTS_COST * table[batch, 0]:
                many = []
            for k in many:
                if not i or time.perf_counter() - began < seconds:
                    table[batch, k] = min(table[batch, k], _measure(loop, batch, k))
            now = time.perf_counter()
            if not rounds and i and now - began + 2.0 * (now - before) > seconds:
                measured = i + 1
                break
        if time.perf_counter() - began > seconds:
            break
    ks = few + many
    known = [_completed(ks, [table[batch, k] for k in ks], len(few)) for batch in batches[:measured]]
    model = CostModel(batches[:measured], ks, known)
    ms = np.array([[model.ms(batch, k) for k in ks] for batch in batches])
    # Fewer requests or drafts never take longer: where they seem to, something else did.
    ms = np.minimum.accumulate(np.minimum.accumulate(ms[::-1, ::-1], axis=0), axis=1)[::-1, ::-1]
    costs = CostModel(batches, ks, ms.tolist())
    return costs, 0.0 if on_host else _catch_up_ms(loop, few[-1], costs.ms(1, few[-1]))


def _completed(ks: list[int], row: list[float], num_few: int) -> list[float]:
    """Return the costs `row` at `ks` with less noise, and without infinities, which stand for costs that were not
    measured.

    The first `num_few` costs are smoothed. A later cost that was not measured is extrapolated from the costs before it.
    """
    # In a context too short for a single draft no draft pays, whatever it costs.
    found = _smooth(ks[:num_few], [ms if math.isfinite(ms) else 1.0 for ms in row[:num_few]])
    for i in range(num_few, len(ks)):
        found.append(row[i] if math.isfinite(row[i]) else CostModel([1], ks[:i], [found]).ms(1, ks[i]))
    return found


def _smooth(ks: list[int], row: list[float]) -> list[float]:
    """Replace the costs at K >= 1 by the line `K * T_d + T_t` that fits them best. Otherwise noise at one K could keep
    it from ever being chosen. Costs at fewer than three such K, and costs that fall with K, are returned as they
    are."""
    if len(ks) < 4:
        return row
    times = np.array(row[1:])
    slope, intercept = np.polyfit(ks[1:], times, 1, w=1.0 / times)
    if slope < 0.0 or slope + intercept <= 0.0:
        return row
    return [row[0], *(float(slope * k + intercept) for k in ks[1:])]


def _catch_up_ms(loop: MeasuringLoop, k: int, decode_ms: float) -> float:
    """Measure the milliseconds per position of a catch-up chunk, its fixed part included. `decode_ms` is the time of a
    step with `k` drafts."""
    found: list[float] = []
    drafted: list[RingSlot] = []

    def watch(slot: RingSlot, header: Header, ms: float) -> None:
        if header.num_draft_tokens and not header.num_prefill:
            found.append(max(0.0, ms - decode_ms) / header.num_draft_tokens)
        if header.num_decode and slot.record_arrays["seq_k"][0]:
            drafted.append(slot)  # nothing is left to catch up with

    for run in range(NUM_STEPS + 1):
        drafted.clear()
        _run(loop, 1, k, watch, lambda: bool(drafted), first_prompt=1 + run)
    return min(found, default=0.0)


def _measure(loop: MeasuringLoop, batch: int, k: int) -> float:
    """Return the milliseconds of the fastest step of `batch` requests with `k` drafts each; infinity if no such step
    runs."""
    times: list[float] = []

    def watch(slot: RingSlot, header: Header, ms: float) -> None:
        uniform = int(slot.record_arrays["seq_k"][: header.num_decode].sum()) == batch * k
        if header.num_decode == batch and uniform and not header.num_prefill and not header.num_draft_chunks:
            times.append(ms)

    _run(loop, batch, k, watch, lambda: len(times) >= NUM_STEPS)
    return min(times, default=math.inf)


def _run(
    loop: MeasuringLoop, batch: int, k: int, watch: Watch, done: Callable[[], bool], *, first_prompt: int = 0
) -> None:
    """Run `batch` requests with `k` drafts each, until they end or `done()` is true."""
    limits, config = loop.limits, loop.config
    tokens = (k + 1) * (NUM_STEPS + loop.depth + 1)
    length = max(1, min(PROMPT, config.batched_tokens // (4 * batch), limits.max_model_len - tokens))
    params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
    for i in range(batch):
        # The same prompts for every K: their KV comes from the prefix cache from the second time on.
        start = (first_prompt * 65537 + i) * 7919 + 1
        prompt = [(start + j * 104729) % limits.vocab_size for j in range(length)]
        request = Request(i, prompt, params, num_speculative_tokens=limits.num_speculative_tokens)
        loop.add_request(request, min(length + tokens, limits.max_model_len), k)
    loop.watch = watch
    while loop.live and not done():
        loop.step()
    loop.watch = None
    loop.drop_requests()
