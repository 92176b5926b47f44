"""Measures the gain of a K per request if requests differ: the planner against every fixed K, and against one K per
step.

    python benches/bench_mixed_k.py [--sweep FILE.parquet] [--measure] [--out benches/results/...json]

Half of the requests are easy (each draft stands with 0.9, say), half are hard (0.15). Requests are simulated:
acceptance is drawn, time is what the costs say, so nothing depends on the machine's load. Costs by batch and K come
from a formula (default: weights read once or operations by rows, the longer), from a sweep of a real server, or from
this machine's bundled pair as an engine measures it at start. A step whose requests differ costs the sum of its
increments, and 3 % for being mixed.

Contestants run the same requests, `batch` at a time: every fixed K; *one K*, the best for all at each step by the
true acceptance, which no planner of one K a step can beat; and the planner, which has to learn. Exits with 1 if the
planner's gain over the best fixed K is less than 5 % where it should show: on a CPU's costs at batch 8, a GPU's at 64.
Where reading the weights is all that a step costs (a GPU at batch 8), there is nothing to gain: the best pair of K
for easy and hard requests is then within 4 % of the best single one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import specrs
from numpy.typing import NDArray
from specrs.core import CostModel, SpeculationPlanner

BATCHES = (8, 64)
MIXES = ((0.9, 0.15), (0.95, 0.05), (0.85, 0.4))
"""Conditional acceptance of every draft of an easy and of a hard request."""
TOKENS = 256
REQUESTS = 24
"""Number of requests of each place in the batch, one after the other."""
MIXED = 1.03
GAIN = 1.05
SHOWN = {8: "CPU core: 5M target, 0.5M draft", 64: "H100: 32B target, one-layer draft"}
"""For each batch size, the simulated machine on which a K per request must gain at least `GAIN` with the first mix of
requests. On it, rows cost time in addition to reading weights."""

Choose = Callable[[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]], NDArray[np.int64]]
"""K of each row, from the most that it may have `[B]`, its true acceptance `[B, K]`, and its row `[B]`."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Milliseconds of steps by the K of each request."""

    costs: CostModel

    def ms(self, ks: NDArray[np.int64]) -> float:
        """Return milliseconds: `ms(B, 0)`, and an increment for every number of drafts that some request reaches."""
        total = self.costs.ms(len(ks), 0)
        for level in range(1, int(ks.max()) + 1):
            count = int((ks >= level).sum())
            total += self.costs.ms(count, level) - self.costs.ms(count, level - 1)
        return total * (MIXED if (ks != ks[0]).any() else 1.0)


@dataclass(frozen=True, slots=True)
class Machine:
    """Simulated machine: its memory bandwidth, the half of its peak rate that products reach, and the fixed time of a
    pass."""

    gb_s: float
    gflop_s: float
    pass_ms: float

    def ms(self, parameters: float, size: float, rows: int) -> float:
        """Return the milliseconds of a pass of `parameters` (millions) of `size` bytes each: the longer of reading the
        weights once, and of two operations per parameter and row."""
        return self.pass_ms + max(parameters * size / self.gb_s, 2 * parameters * rows / self.gflop_s)

    def costs(self, target: float, draft: float, size: float) -> CostModel:
        """Return the costs of steps of a target and a draft of so many million parameters."""
        batches, ks = [1, 2, 4, 8, 16, 32, 64], list(range(9))
        table = [
            [self.ms(target, size, b * (k + 1)) + k * (self.ms(draft, size, b) if k else 0.0) for k in ks]
            for b in batches
        ]
        return CostModel(batches, ks, table)


H100 = Machine(gb_s=3350, gflop_s=495_000, pass_ms=0.1)
"""SXM data sheet: 3.35 TB/s, 990 Tflop/s in bf16."""
CPU_CORE = Machine(gb_s=138, gflop_s=200, pass_ms=0.005)
"""One core of a current server, with fp32 weights that stay in its last-level cache."""


def swept(path: Path) -> dict[str, CostModel]:
    """Return the mean milliseconds of an iteration of each drafter of a sweep."""
    from specrs.bench.results import read
    from specrs.forecast import series

    found = {}
    for item in series(read(path)):
        ks = sorted(set.intersection(*(set(item.ks(c)) for c in item.concurrencies)))
        table = [
            [item.vanilla[c].mean_tpot, *(float(np.mean(item.rows[c][k].mean_itl)) for k in ks)]
            for c in item.concurrencies
        ]
        found[item.name] = CostModel(item.concurrencies, [0, *ks], table)
    return found


def measured() -> CostModel:
    """Return the measured costs of the bundled pair's steps on this machine."""
    import torch
    from specrs import LLM

    torch.set_num_threads(1)
    llm = LLM(
        speculative_config={"num_speculative_tokens": "auto"}, dtype="float32", max_model_len=256, max_num_seqs=64
    )
    planner = llm.engine.planner
    assert planner is not None
    return planner.costs()


def tokens_per_ms(
    costs: CostModel, batch: int, mix: tuple[float, float], choose: Choose, learn: SpeculationPlanner | None
) -> float:
    """Return the tokens per millisecond of all requests, run `batch` at a time."""
    most, steps, random = costs.ks[-1], StepCosts(costs), np.random.default_rng(batch)
    kinds = np.arange(batch * REQUESTS) % 2  # easy and hard ones in turn
    chances = np.array(mix)[kinds]
    waiting, rows = batch, np.arange(batch)
    current, left = np.arange(batch), np.full(batch, TOKENS) - random.integers(0, TOKENS - 2, batch)
    ms, tokens = 0.0, 0
    while waiting < len(kinds):
        own = np.repeat(chances[current][:, None], most, axis=1)
        k = choose(np.minimum(most, left - 1), own, rows)
        time = steps.ms(k)
        stands = (random.random((batch, most)) < own) & (np.arange(most) < k[:, None])
        accepted = np.cumprod(stands, axis=1).sum(axis=1)
        if learn is not None:
            learn.settle(rows, k, k, accepted, time)
        ms, tokens = ms + time, tokens + int((accepted + 1).sum())
        left -= accepted + 1
        for row in np.flatnonzero(left <= 0)[: len(kinds) - waiting]:
            current[row], left[row] = waiting, TOKENS
            waiting += 1
            if learn is not None:
                learn.reset(int(row))
        left = np.maximum(left, 1)
    return tokens / ms


def contestants(costs: CostModel, batch: int, mix: tuple[float, float]) -> dict[str, float]:
    """Return the tokens per millisecond of every contestant."""
    most, steps = costs.ks[-1], StepCosts(costs)
    lags = np.zeros(batch, dtype=np.int64)

    def fixed(k: int) -> Choose:
        return lambda caps, own, rows: np.minimum(k, caps)

    def one(caps: NDArray[np.int64], own: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        choices = [np.minimum(k, caps) for k in range(most + 1)]
        gains = np.cumprod(own, axis=1)
        rates = [(batch + (gains * (np.arange(most) < k[:, None])).sum()) / steps.ms(k) for k in choices]
        return choices[int(np.argmax(rates))]

    planner = SpeculationPlanner(max_num_seqs=batch, num_speculative_tokens=most, costs=costs)

    def planned(caps: NDArray[np.int64], own: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        k = np.zeros(batch, dtype=np.int64)
        planner.decide(rows, caps, lags, k)
        return k

    found = {str(k): tokens_per_ms(costs, batch, mix, fixed(k), None) for k in costs.ks}
    found["one K"] = tokens_per_ms(costs, batch, mix, one, None)
    found["planner"] = tokens_per_ms(costs, batch, mix, planned, planner)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", type=Path, help="costs of a sweep by `specrs bench sweep`, too")
    parser.add_argument("--measure", action="store_true", help="costs of the bundled pair on this machine, too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    formulas = {
        "CPU core: 5M target, 0.5M draft": CPU_CORE.costs(5.2, 0.46, 4),
        "CPU core: 5M target, 0.1M draft": CPU_CORE.costs(5.2, 0.1, 4),
        "H100: 8B target, 0.5B draft": H100.costs(8e3, 500, 2),
        "H100: 32B target, 1.7B draft": H100.costs(32.8e3, 1700, 2),
        "H100: 32B target, one-layer draft": H100.costs(32.8e3, 1100, 2),
    }
    sources = dict(formulas)
    if args.sweep is not None:
        sources |= swept(args.sweep)
    if args.measure:
        sources["bundled pair, this machine"] = measured()
    report, worst = [], {}
    print(f"{'costs':<50} batch  easy/hard  best K  planner/best K  planner/one K  planner/no drafts")
    for name, costs in sources.items():
        for batch in BATCHES:
            for mix in MIXES:
                speeds = contestants(costs, batch, mix)
                fixed = {k: speed for k, speed in speeds.items() if k.isdigit()}
                best = max(fixed, key=lambda k: fixed[k])
                row = {
                    "costs": name,
                    "batch": batch,
                    "easy": mix[0],
                    "hard": mix[1],
                    "tokens_per_ms": speeds,
                    "best_fixed_k": int(best),
                    "planner_over_best": speeds["planner"] / speeds[best],
                    "planner_over_one_k": speeds["planner"] / speeds["one K"],
                    "planner_over_vanilla": speeds["planner"] / speeds["0"],
                }
                report.append(row)
                print(
                    f"{name[:50]:<50} {batch:5d}  {mix[0]:.2f}/{mix[1]:.2f}  {best:>6}"
                    f"  {row['planner_over_best']:14.3f}"
                    f"  {row['planner_over_one_k']:13.3f}  {row['planner_over_vanilla']:17.3f}",
                    flush=True,
                )
                if name == SHOWN[batch] and mix == MIXES[0]:
                    worst[name, batch] = row["planner_over_best"]
    if args.out is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        versions = {"specrs": specrs.__version__, "commit": commit.stdout.strip()}
        args.out.write_text(json.dumps({"results": report, "versions": versions}, indent=2) + "\n")
    missed = [f"{name} at {batch}: {gain:.3f}, goal {GAIN}" for (name, batch), gain in worst.items() if gain < GAIN]
    print("\n".join(missed) or f"K per request is worth {GAIN - 1:.0%} and more over the best fixed K where it should")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
