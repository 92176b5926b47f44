"""Measures the native pass of a CPU with LM head, by its number of rows. Runs no scheduler.

    python benches/bench_cpu_pass.py [MODEL] [--rows 1 2 4 6 8 16] [--context 200] [--threads 2] [--dtype auto]
        [--repeats 100] [--out FILE]

MODEL is a folder or a GGUF file; by default the target of the bundled pair. The rows are the last tokens of one
request, as in a verification. Numbers of rows take turns. Reported are the median and the 10th percentile: on a machine
that does other work the median measures the other work, too.
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np
import specrs
from specrs.backends.cpu.weights import load_native
from specrs.instruction_sets import start_pool
from specrs.models.native_cache import NativeKVCache
from specrs.models.native_decoder import NativeDecoder
from specrs.models.native_inputs import NativeInputs
from specrs.pair import TARGET

BLOCK_SIZE = 16


def make_pass(model: NativeDecoder, rows: int, context: int) -> tuple[NativeInputs, NativeKVCache]:
    """Return a pass of one request that feeds the last `rows` of `context` tokens. Its blocks lie scattered."""
    blocks = -(-context // BLOCK_SIZE)
    cache = model.allocate_cache(4 * blocks, BLOCK_SIZE)
    table = np.random.default_rng(0).permutation(4 * blocks)[None, :blocks]
    positions = np.arange(context - rows, context)
    inputs = NativeInputs(
        input_ids=np.arange(rows) + 1,
        positions=positions,
        slots=table[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        q_start=np.array([0, rows]),
        block_table=table,
    )
    return inputs, cache


def measure(model: NativeDecoder, rows: list[int], context: int, repeats: int) -> dict[int, list[float]]:
    """Return the milliseconds of `repeats` passes of each number of rows, after a tenth as many that warm up."""
    passes = {count: make_pass(model, count, context) for count in rows}
    times: dict[int, list[float]] = {count: [] for count in rows}
    warm_up = repeats // 10
    for i in range(warm_up + repeats):
        for count, (inputs, cache) in passes.items():
            start = time.perf_counter()
            model.compute_logits(model.forward(inputs, cache).final)
            if i >= warm_up:
                times[count].append((time.perf_counter() - start) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", type=Path, default=TARGET)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 6, 8, 16])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = load_native(args.model, dtype=args.dtype).on_pool(start_pool(args.threads))
    times = measure(model, args.rows, args.context, args.repeats)
    print(f"{args.model.name}, {args.threads} threads, context {args.context}")
    print("| rows | median ms | p10 ms | of the first |\n| --- | --- | --- | --- |")
    found, first = [], statistics.median(times[args.rows[0]])
    for count, taken in times.items():
        median, p10 = statistics.median(taken), statistics.quantiles(taken, n=10)[0]
        print(f"| {count} | {median:.3f} | {p10:.3f} | {median / first:.2f} |")
        found.append({"rows": count, "median_ms": round(median, 3), "p10_ms": round(p10, 3)})
    if args.out is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        report = {
            "machine": platform.processor() or platform.machine(),
            "settings": {"threads": args.threads, "dtype": args.dtype, "context": args.context},
            "model": args.model.name,
            "versions": {"specrs": specrs.__version__, "commit": commit.stdout.strip()},
            "results": found,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
