"""Measures the time of one forward pass with LM head on a CPU: target at 1 and 6 rows, draft at 1 row. Runs no
scheduler.

    python benches/bench_cpu_pass.py [PAIR] [--context 200] [--threads 2] [--dtype float32] [--record FILE]

PAIR is a folder with `target` and `draft`; the bundled pair by default. Medians, and the 10th percentile: on a machine
that does other work the median measures the other work. `--record` appends a line per row of the table to a CSV file.
"""

import argparse
import csv
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import load_model

BLOCK_SIZE = 16


def make_pass(model: TorchDecoder, rows: int, context: int) -> tuple[PassInputs, KVCache]:
    """Return a pass of one request that feeds the last `rows` of `context` tokens. Its blocks lie scattered."""
    blocks = -(-context // BLOCK_SIZE)
    cache = model.allocate_cache(4 * blocks, BLOCK_SIZE)
    table = torch.randperm(4 * blocks, generator=torch.Generator().manual_seed(0))[:blocks].unsqueeze(0)
    positions = torch.arange(context - rows, context)
    return PassInputs(
        input_ids=torch.arange(rows) + 1,
        positions=positions,
        slots=table[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        q_start=torch.tensor([0, rows]),
        block_table=table,
        max_q_len=rows,
        max_context=context,
    ), cache


@torch.inference_mode()
def measure(model: TorchDecoder, rows: int, context: int, repeats: int) -> list[float]:
    """Return the milliseconds of each of `repeats` passes, after 20 passes that warm up."""
    inputs, cache = make_pass(model, rows, context)
    times = []
    for i in range(20 + repeats):
        start = time.perf_counter()
        model.compute_logits(model.forward(inputs, cache).final)
        if i >= 20:
            times.append((time.perf_counter() - start) * 1e3)
    return times


def processor() -> str:
    """Return the name of the processor, as the operating system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def record(path: Path, rows: list[dict[str, object]]) -> None:
    """Append `rows` to the CSV file at `path`, with a header if the file is new."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    key = {"processor": processor(), "commit": commit.stdout.strip(), "torch": torch.__version__}
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*key, *rows[0]], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(key | row for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", nargs="?", type=Path)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.pair is None:
        from specrs.pair import DRAFT, TARGET

        folders = {"target": TARGET, "draft": DRAFT}
    else:
        folders = {name: args.pair / name for name in ("target", "draft")}
    models = {name: load_model(folder, dtype=args.dtype) for name, folder in folders.items()}
    print(f"torch {torch.__version__}, {args.threads} threads, {args.dtype}, context {args.context}")
    print("| model | rows | median ms | p10 ms |\n| --- | --- | --- | --- |")
    results: list[dict[str, object]] = []
    for name, rows in (("target", 1), ("target", 6), ("draft", 1), ("draft", 2)):
        times = measure(models[name], rows, args.context, args.repeats)
        median, p10 = statistics.median(times), statistics.quantiles(times, n=10)[0]
        print(f"| {name} | {rows} | {median:.3f} | {p10:.3f} |")
        setting = {"threads": args.threads, "dtype": args.dtype, "context": args.context, "model": name, "rows": rows}
        results.append(setting | {"median_ms": round(median, 3), "p10_ms": round(p10, 3)})
    if args.record is not None:
        record(args.record, results)


if __name__ == "__main__":
    main()
