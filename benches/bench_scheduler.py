"""Plan + settle through the Python binding: one steady decode launch of B requests, no model. Times the host alone.

python benches/bench_scheduler.py [--batch 256] [--k 5] [--launches 2000]
"""

import argparse
import json
import platform
import statistics
import time

import numpy as np
from specrs.core import PLAN_LAUNCH, Scheduler


def steady_state(batch: int, k: int, launches: int) -> list[float]:
    """Microseconds of plan and settle together, per launch, all requests decoding, acceptance uniform in 0..k."""
    scheduler = Scheduler(
        max_num_seqs=batch,
        max_model_len=32_768,
        num_blocks=batch * 2048,
        block_size=16,
        max_num_batched_tokens=batch * 64,
        num_speculative_tokens=k,
        draft_max_model_len=32_768,
    )
    record = np.zeros(scheduler.record_size, dtype=np.int64)
    results = np.zeros(scheduler.results_size, dtype=np.int64)
    settled = np.zeros(scheduler.settled_size, dtype=np.int64)
    sections = {name: results[at : at + length] for name, (at, length) in scheduler.results_layout().items()}
    entry_k, last = (scheduler.record_layout()[name] for name in ("entry_k", "chunk_is_last"))
    rng = np.random.default_rng(0)
    for i in range(batch):
        prompt = rng.integers(0, 1000, 32)
        scheduler.add_request(i, prompt, limit=32_768, num_speculative_tokens=k)
    times: list[float] = []
    while len(times) < launches:
        start = time.perf_counter()
        status = scheduler.plan(record)
        planned = time.perf_counter() - start
        assert status == PLAN_LAUNCH
        launch_id, decode, prefill = (int(x) for x in record[:3])
        drafted = record[entry_k[0] : entry_k[0] + decode]
        sections["num_drafted"][:decode] = drafted
        sections["num_accepted"][:decode] = np.minimum(rng.integers(0, k + 1, decode), drafted)
        sections["num_emitted"][:decode] = sections["num_accepted"][:decode] + 1
        sections["num_drafted"][decode : decode + prefill] = 0
        sections["num_accepted"][decode : decode + prefill] = 0
        sections["num_emitted"][decode : decode + prefill] = record[last[0] : last[0] + prefill]
        sections["tokens"][:] = 7
        start = time.perf_counter()
        scheduler.settle(launch_id, results, settled)
        if decode == batch:
            times.append(1e6 * (planned + time.perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--launches", type=int, default=2000)
    args = parser.parse_args()
    times = steady_state(args.batch, args.k, args.launches)
    cuts = statistics.quantiles(times, n=100)
    print(
        json.dumps(
            {
                "what": f"plan + settle through Python, B = {args.batch}, K = {args.k}",
                "microseconds": {"p10": round(cuts[9], 1), "median": round(cuts[49], 1), "p90": round(cuts[89], 1)},
                "python": platform.python_version(),
            }
        )
    )


if __name__ == "__main__":
    main()
