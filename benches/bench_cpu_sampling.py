"""Measures the speed of a CPU's steps with penalties, masks, grammars and log probabilities, relative to plain ones.

    python benches/bench_cpu_sampling.py [--k 0 3] [--rounds 5] [--trees python OTHER/python] [--out FILE]

One request of the bundled pair at a time, greedy, on one thread. What requests ask for takes turns within a round, and
`--trees` compares source trees, each with its own extension. A step counts that decodes and does nothing
else; its time is from planning to settling. Reported are medians over rounds of the median of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

TOKENS = 128

ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "logprobs=5": {"logprobs": 5},
    "min_tokens": {"min_tokens": TOKENS, "ignore_eos": False},
    "logit_bias": {"logit_bias": {17: 1.5, 300: -2.0}},
    "bad_words": {"bad_words": ["return None", "raise"]},
    "regex": {"structured_outputs": {"regex": "([a-z ]{3,12}[0-9]{2}\\n)*"}},
    "prompt_logprobs=1": {"prompt_logprobs": 1},
}


def measure(k: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of an iteration, by the sampling parameters of the request."""
    from specrs import LLM, SamplingParams
    from specrs.pair.prompts import PROMPTS

    speculative = {"speculative_config": {"num_speculative_tokens": k}} if k else {}
    llm = LLM(dtype="float32", max_model_len=512, max_num_seqs=1, threads=1, **speculative)
    seen: list[float] = []

    def watch(slot: object, header: Any, ms: float) -> None:
        if header.num_decode and not header.num_prefill and not header.num_admitted:
            seen.append(ms)

    llm.engine.watch = watch
    medians: dict[str, list[float]] = {name: [] for name in ASKED}
    for i in range(rounds + 1):
        for name, asked in ASKED.items():
            seen.clear()
            params = SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True} | asked)
            (output,) = llm.generate(PROMPTS[i % len(PROMPTS)], params, use_tqdm=False)
            assert output.error is None, output.error
            if i:  # the first round warms up
                medians[name].append(statistics.median(seen))
    return {name: statistics.median(values) for name, values in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--k", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trees", type=Path, nargs="+", default=[Path(__file__).parent.parent / "python"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.k[0], args.rounds)))
        return
    found = []
    for k in args.k:
        for tree in args.trees:
            command = [sys.executable, __file__, "--one", "--k", str(k), "--rounds", str(args.rounds)]
            env = os.environ | {"PYTHONPATH": str(tree.resolve()), "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
            ms = json.loads(done.stdout.splitlines()[-1])
            found.append({"tree": tree.parent.name, "k": k, "ms": ms})
            for name, value in ms.items():
                speed = ms["plain"] / value
                print(f"{tree.parent.name:12} K={k} {name:20} {value:7.3f} ms  {speed:5.2f} of plain", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
