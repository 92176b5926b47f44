"""A closed loop of requests on a simulated GPU: the engine's scheduler and its choice of graphs, with the roofline's
times of an H200 for Qwen3-32B and Qwen3-1.7B.

    python tests/closed_loop.py    prints throughput and time to first token, with prompts apart and in verification
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from kernel_launches import reference_configs
from specrs.backends.cuda.shapes import MERGED_CHUNKS, MERGED_STEPS, Buckets, LogitsMode, batch_buckets
from specrs.backends.ring import Header, section_arrays
from specrs.core import FINISH_LENGTH, FINISH_NONE, PLAN_STEP, CachedDrafter, Scheduler
from specrs.forecast.gpus import GPUS
from specrs.forecast.roofline import Chunks, Roofline
from specrs.models.loader import load_config

RATES = (0.72, 0.52, 0.34, 0.27, 0.21)
"""Acceptance by position of InstructCoder, unconditional."""
PROMPT, OUTPUT = 150, 200
BUDGET = 8192
"""`max_num_batched_tokens`."""


@functools.cache
def roofline() -> Roofline:
    """Return the model of the pair on an H200, at the mean length of a request."""
    with TemporaryDirectory() as folder:
        target, draft = map(load_config, reference_configs(Path(folder)))
    return Roofline(GPUS["H200"], target, draft, context=PROMPT + OUTPUT // 2)


def chunks(rows: int, ends: int) -> Chunks:
    """Return prompt chunks whose rows attend to half a prompt in the mean."""
    return Chunks(rows, PROMPT // 2, ends)


@functools.cache
def prompts_ms(rows: int, ends: int) -> float:
    """Milliseconds of the target's pass over prompt chunks alone."""
    return roofline().prompts_ms(chunks(rows, ends))


@functools.cache
def catch_up_ms(rows: int) -> float:
    """Milliseconds of the draft's pass over tokens of prompts."""
    return roofline().draft_pass(0, chunks=chunks(rows, 0)).ms(roofline().gpu)


@functools.cache
def iteration_ms(batch: int, k: int, chunk_rows: int, ends: int) -> float:
    """Milliseconds of an iteration with `chunk_rows` rows of prompts, of which `ends` end, in its verification."""
    verification = roofline().target_pass(batch, k, chunks(chunk_rows, ends)) if chunk_rows else None
    return roofline().iteration_ms(batch, k, verification)


@dataclass
class Gpu:
    """Times of steps, with the shapes that are captured."""

    buckets: Buckets
    num_merged: int = 0
    """Number of steps whose prompt chunks ran in one pass with the verification."""
    num_alone: int = 0

    def ms(self, ks: list[int], chunk_rows: int, chunks: int, ends: int, catch_up: tuple[int, int]) -> float:
        """Return the milliseconds of a step. `catch_up` are the rows and the number of chunks of the draft's pass over
        prompts. A step that has prompt chunks next to decoding sequences is counted in `num_merged` or `num_alone`."""
        ms, batch = 0.0, len(ks)
        if catch_up[0]:
            shape = self.buckets.chunks(*catch_up)
            ms += catch_up_ms(shape.rows if shape else catch_up[0])
        whole, merged = None, None
        if ks:
            whole = self.buckets.whole(ks, LogitsMode.GREEDY, ks[0])
            merged = self.buckets.merged(whole, batch, chunk_rows, chunks) if whole and chunks else None
        if merged is not None:
            self.num_merged += 1
            more = merged.num_seqs - merged.decode.batch
            return ms + iteration_ms(merged.decode.batch, merged.decode.max_k, merged.chunk_rows, more)
        if chunks:
            self.num_alone += bool(ks)
            shape = self.buckets.chunks(chunk_rows, chunks)
            ms += prompts_ms(shape.rows if shape else chunk_rows, ends)
        return ms + (iteration_ms(whole.batch if whole else batch, ks[0], 0, 0) if ks else 0.0)


@dataclass(frozen=True)
class Outcome:
    """Figures of a run."""

    tokens_per_s: float
    ttft_ms: float
    """Mean milliseconds from a request's arrival to its first token."""
    merged: int
    alone: int


def simulate(
    concurrency: int,
    k: int,
    *,
    rooms: bool = True,
    merges: bool = True,
    prompt: int = PROMPT,
    output: int = OUTPUT,
    spread: int = 0,
    output_spread: int = 0,
    shift: int = 0,
    waves: int = 12,
    depth: int = 1,
    seed: int = 0,
) -> Outcome:
    """Serve `waves` requests for each of `concurrency` clients, each of which sends the next when one has ended.

    Prompts have `prompt` tokens, or with `spread` up to `spread` more or fewer, and outputs `output`, or likewise with
    `output_spread`. Without it, requests that start together end together at K = 0. `shift` is added to the number of
    tokens of every room. Without `rooms`, the scheduler does not know them; without `merges`, no graph has prompt
    chunks. `depth` steps are in flight.
    """
    seqs, random = max(concurrency, 8), np.random.default_rng((concurrency, seed))
    buckets = Buckets(
        batch_buckets(256), k, max_chunk_rows=BUDGET, max_chunks=256, merges=MERGED_CHUNKS if merges else 0
    )
    known = [(drafts, count, tokens + shift) for drafts, count, tokens in buckets.merged_rooms()]
    rooms = rooms and bool(known)
    scheduler = Scheduler(
        max_num_seqs=seqs,
        max_model_len=1024,
        num_blocks=seqs * 64,
        block_size=16,
        max_num_batched_tokens=BUDGET,
        num_speculative_tokens=k,
        drafter=CachedDrafter(max_model_len=1024, max_draft_lag=2, cost_ratio=0.05) if k else None,
        enable_prefix_caching=False,
        max_in_flight=depth,
        merged_rooms=known if rooms else None,
        max_merged_chunks=MERGED_CHUNKS if rooms else 0,
        max_merged_steps=MERGED_STEPS if rooms else 0,
    )
    gpu = Gpu(buckets)
    record = np.zeros(scheduler.record_size, np.int64)
    settled = np.zeros(scheduler.settled_size, np.int64)
    sections = section_arrays(record, scheduler.record_layout())
    told = section_arrays(settled, scheduler.settled_layout())
    length, limit = np.zeros(seqs, np.int64), np.zeros(seqs, np.int64)
    now, tokens, arrived, first = 0.0, 0, dict[int, float](), dict[int, float]()
    ids = iter(range(waves * concurrency))
    flying: deque[tuple[int, int, np.ndarray, float]] = deque()
    busy = 0.0

    def arrive() -> None:
        request = next(ids, None)
        if request is None:
            return
        size = prompt + int(random.integers(-spread, spread + 1))
        limit = size + output + int(random.integers(-output_spread, output_spread + 1))
        scheduler.add_request(request, np.full(size, 7), limit=limit, num_speculative_tokens=k)
        arrived[request] = now

    def run() -> bool:
        """Plan a step and run it on the device. Return False if there is none to plan yet."""
        nonlocal busy
        if len(flying) == depth or scheduler.plan(record) != PLAN_STEP:
            return False
        header = Header.of(record)
        for i in range(header.num_admitted):
            row = sections["admit_row"][i]
            length[row], limit[row] = sections["admit_num_tokens"][i], sections["admit_limit"][i]
        results = np.zeros(scheduler.results_size, np.int64)
        given = section_arrays(results, scheduler.results_layout())
        count, decoding = header.num_decode + header.num_prefill, header.num_decode
        is_last = sections["chunk_is_last"][: header.num_prefill].astype(bool)
        own = np.concatenate([np.ones(decoding, bool), is_last])
        rows = sections["seq_row"][:count]
        alive = own & (length[rows] < limit[rows])
        drafted = np.clip(np.minimum(sections["seq_k"][:count], limit[rows] - length[rows] - 1), 0, None) * alive
        stands = random.random(count)
        accepted = ((stands[:, None] < np.array(RATES)) & (np.arange(len(RATES)) < drafted[:, None])).sum(axis=1)
        length[rows] += (accepted + 1) * alive
        given["num_drafted"][:count], given["num_accepted"][:count] = drafted, accepted
        given["num_emitted"][:count] = (accepted + 1) * alive
        ended = own & (length[rows] == limit[rows])
        given["finish_reason"][:count] = np.where(ended, FINISH_LENGTH, FINISH_NONE)
        ks = sections["seq_k"][:decoding].tolist()
        catch_up = header.num_draft_tokens, header.num_draft_chunks
        ms = gpu.ms(ks, header.num_prefill_tokens, header.num_prefill, int(is_last.sum()), catch_up)
        busy = max(busy, now) + ms
        flying.append((header.step_id, count, results, busy))
        return True

    starts = deque(sorted(random.uniform(0, 3000, concurrency)))  # so that clients are not in step
    middle: tuple[float, int] | None = None
    while True:
        while starts and (starts[0] <= now or not (flying or scheduler.num_running + scheduler.num_waiting)):
            now = max(now, starts.popleft())
            arrive()
        while run():
            pass
        if not flying:
            break
        step, count, results, now = flying.popleft()
        scheduler.settle(step, results, settled)
        for request, new, reason in zip(
            *(told[name][:count].tolist() for name in ("request_id", "num_new", "finish_reason")), strict=True
        ):
            tokens += new
            if new and request not in first:
                first[request] = now - arrived[request]
            if reason == FINISH_LENGTH:
                arrive()
        if middle is None and len(first) >= 3 * concurrency:
            middle = now, tokens
        if len(arrived) == waves * concurrency and not starts:
            break  # from here on the batch drains
    assert middle is not None
    rate = (tokens - middle[1]) / (now - middle[0]) * 1e3
    late = [ms for request, ms in first.items() if request >= 3 * concurrency]
    return Outcome(rate, float(np.mean(late)), gpu.num_merged, gpu.num_alone)


def main() -> None:
    """Print what prompts in verification passes change: with prompts and outputs of the usual lengths, and short
    ones."""
    print(f"{'':>26}{'tokens/s':>18}{'first token, ms':>22}{'steps with prompts merged':>28}")
    for prompt, output, loads in (
        (PROMPT, OUTPUT, [(0, 4), (0, 16), (0, 64), (0, 128), (0, 256), (5, 2), (5, 8), (2, 64)]),
        (20, 20, [(0, 16), (0, 64), (0, 256)]),
    ):
        for k, concurrency in loads:
            lengths = {"prompt": prompt, "output": output, "spread": 2 * prompt // 5, "output_spread": output // 2}
            apart, now = (simulate(concurrency, k, merges=merges, depth=2, **lengths) for merges in (False, True))
            print(
                f"{prompt:>4} in, {output:>3} out, K = {k}, {concurrency:>3}:"
                f"{apart.tokens_per_s:>8.0f} -> {now.tokens_per_s:>6.0f}{apart.ttft_ms:>12.0f} -> {now.ttft_ms:>5.0f}"
                f"{now.merged / (now.merged + now.alone):>24.0%}"
            )


if __name__ == "__main__":
    main()
