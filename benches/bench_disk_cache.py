"""Prefix cache on disk: first token of a long prompt after a restart, against a cold one; decode speed while blocks are
written, against speed without the cache.

    python benches/bench_disk_cache.py MODEL [--prompt 7500] [--rounds 5] [--threads 2] [--out FILE.json]

Each round starts three processes in turns: one with an empty folder (cold), one that finds what the first has written
(known), and one without the option. Figures are medians over rounds. Each process answers a request of 16 tokens first,
so that no page of the weights is read for the first time in a measured request. The operating system still has the
cache's files in memory, as after a restart of the server alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DECODED = 128
"""Number of tokens that are decoded after the prompt."""


def measure(model: str, prompt: int, threads: int, folder: str | None) -> dict[str, float]:
    """Return the seconds to the first token, and the tokens per second after it, of one request in this process."""
    import numpy as np
    from specrs import LLM, SamplingParams

    llm = LLM(
        model, threads=threads, max_model_len=prompt + DECODED + 64, kv_cache_path=folder, speculative_config=None
    )
    ids = np.random.default_rng(0).integers(100, 4000, prompt).tolist()
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    llm.generate({"prompt_token_ids": ids[::-1][:16]}, SamplingParams(max_tokens=16, **greedy), use_tqdm=False)
    [output] = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=DECODED, **greedy), use_tqdm=False)
    metrics = output.metrics
    decode = metrics.finish_time - metrics.first_token_time
    del llm  # writes what waits
    return {
        "first_token_s": metrics.first_token_time - metrics.arrival_time,
        "tokens_per_s": (DECODED - 1) / decode,
        "cached_tokens": metrics.num_cached_tokens,
    }


def in_process(args: argparse.Namespace, folder: str | None) -> dict[str, float]:
    """Run `measure` in a new process and return its result."""
    command = [sys.executable, __file__, args.model, "--prompt", str(args.prompt), "--threads", str(args.threads)]
    done = subprocess.run([*command, "--one", folder or "-"], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=7500, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.model, args.prompt, args.threads, None if args.one == "-" else args.one)))
        return
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "known": [], "without": []}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            runs["cold"].append(in_process(args, folder))
            runs["known"].append(in_process(args, folder))
        runs["without"].append(in_process(args, None))

    def median(way: str, field: str) -> float:
        return statistics.median(run[field] for run in runs[way])

    report: dict[str, Any] = {
        "model": Path(args.model).name,
        "prompt": args.prompt,
        "threads": args.threads,
        "first_token_s": {way: median(way, "first_token_s") for way in runs},
        "share_of_cold": median("known", "first_token_s") / median("cold", "first_token_s"),
        "decode_beside_writing": median("cold", "tokens_per_s") / median("without", "tokens_per_s"),
        "runs": runs,
    }
    print(json.dumps({name: value for name, value in report.items() if name != "runs"}, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
