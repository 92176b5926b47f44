"""Plan + settle without a model: the Rust core through Python beside a scheduler in plain Python. Times the host alone.

    python benches/bench_scheduler.py [--batch 1 32 256] [--k 5] [--launches 1000] [--turn 50]

Every row decodes with K drafts, blocks of 16, prefix caching on, acceptance uniform from 0 to K; a request that ends is
followed by a new one. Both see the same requests and draws, in turn, some launches each: a turn is long enough to find
its own data in the caches and short enough to share what the machine is busy with. `--turn 1` has each launch find the
other's, as behind a model that runs on the same cores. Only the calls to plan and settle are timed, not what stands in
for the device.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator

import numpy as np
from python_scheduler import PythonScheduler
from specrs.core import FINISH_LENGTH, FINISH_NONE, HEADER_FIELDS, PLAN_LAUNCH, CachedDrafter, Scheduler

BLOCK_SIZE, PROMPT, OUTPUT = 16, 64, 960


def prompt(request_id: int) -> list[int]:
    """Differs from all others from the first token on, so that the prefix cache is looked up and misses."""
    return [(request_id * 7919 + i) % 150_000 for i in range(PROMPT)]


def limit(request_id: int) -> int:
    """Tokens that a request may reach; limits differ, or all would end at once."""
    return PROMPT + OUTPUT // 2 + request_id * 389 % (OUTPUT // 2)


def rust(batch: int, k: int) -> Iterator[float]:
    """Seconds of each launch of the Rust core, without end."""
    scheduler = Scheduler(
        max_num_seqs=batch,
        max_model_len=PROMPT + OUTPUT,
        num_blocks=batch * ((PROMPT + OUTPUT) // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max(2048, batch * (k + 1)),
        num_speculative_tokens=k,
        drafter=CachedDrafter(max_model_len=PROMPT + OUTPUT, cost_ratio=0.05),
    )
    record = np.zeros(scheduler.record_size, dtype=np.int64)
    results = np.zeros(scheduler.results_size, dtype=np.int64)
    settled = np.zeros(scheduler.settled_size, dtype=np.int64)
    sections = {name: results[at : at + length] for name, (at, length) in scheduler.results_layout().items()}
    first, length = scheduler.settled_layout()["finish_reason"]
    reasons = settled[first : first + length]
    views = {name: record[at : at + length] for name, (at, length) in scheduler.record_layout().items()}
    left = np.zeros(batch, dtype=np.int64)
    rng = np.random.default_rng(0)
    next_id = 0
    missing = batch
    sections["tokens"][:] = 7
    while True:
        for _ in range(missing):
            tokens = np.array(prompt(next_id))
            scheduler.add_request(next_id, tokens, limit=limit(next_id), num_speculative_tokens=k)
            next_id += 1
        start = time.perf_counter()
        status = scheduler.plan(record)
        planned = time.perf_counter() - start
        assert status == PLAN_LAUNCH
        header = dict(zip(HEADER_FIELDS, record[: len(HEADER_FIELDS)].tolist(), strict=True))
        decode, prefill, admitted = header["num_decode"], header["num_prefill"], header["num_admitted"]
        count = decode + prefill
        left[views["admit_row"][:admitted]] = views["admit_limit"][:admitted] - views["admit_num_tokens"][:admitted]
        rows = views["entry_row"][:count]
        drafted = np.minimum(views["entry_k"][:count], np.maximum(left[rows] - 1, 0))
        accepted = np.minimum(rng.integers(0, k + 1, count), drafted)
        emitted = accepted + 1
        emitted[decode:] = views["chunk_is_last"][:prefill]
        left[rows] -= emitted
        sections["num_drafted"][:count] = drafted
        sections["num_accepted"][:count] = accepted
        sections["num_emitted"][:count] = emitted
        sections["finish_reason"][:count] = np.where((emitted > 0) & (left[rows] == 0), FINISH_LENGTH, FINISH_NONE)
        start = time.perf_counter()
        scheduler.settle(header["launch_id"], results, settled)
        seconds = planned + time.perf_counter() - start
        missing = int(np.count_nonzero(reasons))
        yield seconds


def plain_python(batch: int, k: int) -> Iterator[float]:
    """Seconds of each launch of the scheduler in plain Python, without end."""
    scheduler = PythonScheduler(
        max_num_seqs=batch,
        num_blocks=batch * ((PROMPT + OUTPUT) // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max(2048, batch * (k + 1)),
        num_drafts=k,
    )
    rng = np.random.default_rng(0)
    next_id = 0
    missing = batch
    while True:
        for _ in range(missing):
            scheduler.add_request(next_id, prompt(next_id), limit(next_id))
            next_id += 1
        start = time.perf_counter()
        entries = scheduler.plan()
        planned = time.perf_counter() - start
        accepted = rng.integers(0, k + 1, len(entries)).tolist()
        emitted = [
            [7] * (min(m, entry.num_drafts) + 1) if entry.is_last or not entry.chunk else []
            for entry, m in zip(entries, accepted, strict=True)
        ]
        start = time.perf_counter()
        ended = scheduler.settle(entries, emitted)
        seconds = planned + time.perf_counter() - start
        missing = len(ended)
        yield seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--turn", type=int, default=50, help="launches of one before the other's turn")
    args = parser.parse_args()
    rows = []
    for batch in args.batch:
        contestants = {"rust": rust(batch, args.k), "python": plain_python(batch, args.k)}
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for contestant in contestants.values():
            for _ in range(200):  # past the prompts, rows at different lengths
                next(contestant)
        for _ in range(0, args.launches, args.turn):
            for name, contestant in contestants.items():
                times[name] += [1e6 * next(contestant) for _ in range(args.turn)]
        cuts = {name: statistics.quantiles(values, n=10) for name, values in times.items()}
        row: dict[str, object] = {"batch": batch}
        for name, cut in cuts.items():
            row[f"{name}_us"] = {"p10": round(cut[0], 1), "median": round(cut[4], 1), "p90": round(cut[8], 1)}
        row["ratio"] = round(cuts["python"][4] / cuts["rust"][4], 1)
        rows.append(row)
    what = f"plan + settle through Python, K = {args.k}, microseconds a launch"
    print(json.dumps({"what": what, "python": platform.python_version(), "results": rows}, indent=2))


if __name__ == "__main__":
    main()
