"""Speed and memory of a GGUF file on a CPU, by what activations are rounded to.

    python benches/bench_cpu_activations.py MODEL.gguf [--activations fp32 int16] [--threads 1 2] [--rounds 5]
        [--out FILE]

One request at a time, greedy, without drafts. Engines take turns in processes of their own. A run decodes `TOKENS`
tokens after a prompt of `PROMPT` tokens, and computes the prompt alone. Reported are medians over rounds of tokens per
second of both, the peak memory of a process, and how many different texts there were.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT, TOKENS = 128, 64


def measure(model: str, activations: str, threads: int) -> dict[str, Any]:
    """Return an engine's tokens per second, peak memory in MB, and text."""
    from specrs import LLM, SamplingParams

    llm = LLM(
        model=model, cpu_activations=activations, threads=threads, max_model_len=512, max_num_seqs=1,
        enable_prefix_caching=False,
    )  # fmt: skip
    prompt = [[(i * 37) % 30_000 + 10 for i in range(PROMPT)]]
    seconds: dict[int, list[float]] = {1: [], 1 + TOKENS: []}
    for _ in range(3):
        for tokens, taken in seconds.items():
            begun = time.perf_counter()
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            taken.append(time.perf_counter() - begun)
    first, whole = (min(taken) for taken in seconds.values())
    return {
        "prompt": PROMPT / first,
        "decode": TOKENS / (whole - first),
        "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "text": list(output.outputs[0].token_ids),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--activations", nargs="+", default=["fp32", "int16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(str(args.model), args.activations[0], args.threads[0])))
        return
    engines = [(activations, threads) for activations in args.activations for threads in args.threads]
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {engine: [] for engine in engines}
    for _ in range(args.rounds):
        for activations, threads in engines:
            command = [sys.executable, __file__, str(args.model), "--one", "--activations", activations]
            command += ["--threads", str(threads)]
            env = os.environ | {"HF_HUB_OFFLINE": "1"}
            done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
            runs[activations, threads].append(json.loads(done.stdout.splitlines()[-1]))
    found = []
    for (activations, threads), of in runs.items():
        row: dict[str, Any] = {"activations": activations, "threads": threads}
        row |= {name: round(statistics.median(run[name] for run in of), 1) for name in ("decode", "prompt", "mb")}
        row["range of decode"] = [round(edge(run["decode"] for run in of), 1) for edge in (min, max)]
        row["text"] = of[0]["text"][:8]
        found.append(row)
        print(row, flush=True)
    texts = {tuple(run["text"]) for of in runs.values() for run in of}
    print(f"{len(texts)} different texts")
    if args.out is not None:
        given = {
            "machine": platform.processor() or platform.machine(),
            "model": args.model.name,
            "command": f"{Path(sys.argv[0]).name} {args.model.name} --rounds {args.rounds}",
            "texts": len(texts),
            "rows": found,
        }
        args.out.write_text(json.dumps(given, indent=1) + "\n")


if __name__ == "__main__":
    main()
