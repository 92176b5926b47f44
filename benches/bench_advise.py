"""Compares the advice of `specrs advise` with an exhaustive sweep: the speed with the advised drafter and K, over that
with the fastest.

    python benches/bench_advise.py [--model MODEL] [--draft-model MODEL] [--head HEAD] [--traffic FILE] [--rounds 3]
        [--max-k 7] [--max-tokens 128] [--num-prompts 20] [--threads 1] [--out benches/results/...json]

The sweep runs every drafter that the command knows at every K, and `auto`, on the same requests. The settings of one
drafter take turns with plain decoding at each request, and speed-ups are relative to that. Each request counts with the
fastest of its rounds. The advice then runs in turns with the best of the sweep, because the largest of many noisy
figures is too large. The result is that of these runs.

Exits with 1 if the advice is less than 0.97 times as fast as the best, or took more than five minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import specrs
import yaml
from specrs.cli import advise, main, parser
from specrs.cli.advise.choice import Candidate
from specrs.cli.advise.measure import Machine
from specrs.cli.advise.traffic import LoggedRequest
from specrs.cli.option_flags import given_options
from specrs.engine_options import EngineOptions
from specrs.speculative_config import AUTO

BAR, MOST_SECONDS = 0.97, 300.0
TOP = 4
"""Number of the fastest settings of the sweep that run again."""


def advised(argv: list[str]) -> tuple[dict[str, Any] | None, float]:
    """Run the command. Return the speculative configuration that it wrote, None for no drafts, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "specrs.yaml"
        began = time.perf_counter()
        if main([*argv, "--out", str(path)]):
            sys.exit("specrs advise failed")
        seconds = time.perf_counter() - began
        return yaml.safe_load(path.read_text()).get("speculative-config"), seconds


def sweep(
    machine: Machine, drafters: dict[str, dict[str, Any]], requests: list[LoggedRequest], rounds: int
) -> dict[Candidate, float]:
    """Return the speed-up of every drafter at every K and at `auto`, over plain decoding in the same rounds."""
    found = {Candidate(): 1.0}
    for name, config in drafters.items():
        candidates = [Candidate(name, k, None, config) for k in (*range(1, machine.max_k + 1), AUTO)]
        timed = machine.compare([Candidate(), *candidates], requests, rounds=rounds, deadline=float("inf"))
        plain = timed[Candidate()].tokens_per_second
        found |= {candidate: timed[candidate].tokens_per_second / plain for candidate in candidates}
        row = "  ".join(f"{candidate.k}: {found[candidate]:.3f}" for candidate in candidates)
        print(f"{name:<20} {row}", flush=True)
    return found


def run() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model")
    for flag in ("--draft-model", "--head", "--traffic"):
        options.add_argument(flag)
    for flag, default in (("--rounds", 3), ("--max-k", 7), ("--max-tokens", 128), ("--num-prompts", 20)):
        options.add_argument(flag, type=int, default=default)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--out", type=Path)
    args = options.parse_args()
    argv = ["advise", *([args.model] if args.model else [])]
    for name in ("draft_model", "head", "traffic", "max_k", "max_tokens", "num_prompts", "threads"):
        value = getattr(args, name)
        argv += [] if value is None else [f"--{name.replace('_', '-')}={value}"]
    choice, seconds = advised(argv)
    arguments = parser(["advise"]).parse_args(argv)
    machine, requests = advise.prepare(arguments, given_options(arguments, EngineOptions, "advise"))
    speeds = sweep(machine, advise.drafters_of(arguments), requests, args.rounds)
    chosen = next(one for one in speeds if one.speculative_config(args.max_k) == choice)
    top = sorted(speeds, key=lambda one: speeds[one])[-TOP:]
    timed = machine.compare(list(dict.fromkeys([chosen, *top])), requests, rounds=args.rounds, deadline=float("inf"))
    last = {one: runs.tokens_per_second for one, runs in timed.items()}
    best = max(last, key=lambda one: last[one])
    ratio = last[chosen] / last[best]
    print(f"advised {chosen.name or 'none'} K = {chosen.k}: {last[chosen]:.1f} tokens/s, in {seconds:.0f} s")
    print(f"best    {best.name or 'none'} K = {best.k}: {last[best]:.1f} tokens/s; advised / best {ratio:.3f}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "advised": [chosen.name, chosen.k],
        "best": [best.name, best.k],
        "advised_over_best": ratio,
        "seconds": seconds,
        "speed_ups": {f"{one.name} {one.k}".strip(): speed for one, speed in speeds.items()},
        "tokens_per_second": {f"{one.name} {one.k}".strip(): speed for one, speed in last.items()},
        "settings": {name: Path(str(value)).name for name, value in vars(args).items() if name != "out"},
        "machine": {"processor": platform.machine(), "threads": args.threads},
        "versions": {"specrs": specrs.__version__, "commit": commit.stdout.strip()},
    }
    name = f"cpu_{platform.machine()}_{args.threads}_threads_{commit.stdout.strip()}_advise.json"
    out = args.out or Path(__file__).parent / "results" / name
    out.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(0 if ratio >= BAR and seconds <= MOST_SECONDS else 1)


if __name__ == "__main__":
    run()
