"""Draws pictures of a `bench_gpu.py` file, and the references' Table 1 from its numbers. Measures nothing.

python benches/plot_gpu.py FILE.json      # writes FILE_itl.png and FILE_throughput_DATASET.png next to it
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from gpu.rates import RATES

mpl.use("Agg")
from matplotlib import pyplot as plt

WAYS = {"piecewise_ms": "piecewise (attention outside)", "chained_ms": "chained", "whole_ms": "whole iteration"}


def fit(times: dict[str, float]) -> tuple[float, float, float]:
    """Return `(intercept, slope, R^2)` of the time of an iteration against K >= 1."""
    k = np.array([int(key) for key in times if int(key) >= 1])
    ms = np.array([times[str(key)] for key in k])
    slope, intercept = np.polyfit(k, ms, 1)
    residual = ms - (intercept + slope * k)
    return float(intercept), float(slope), 1.0 - float(residual @ residual / ((ms - ms.mean()) @ (ms - ms.mean())))


def table(passes: dict[str, Any]) -> str:
    """Return table 1 of the published analysis: the time of each model's pass alone, and inside an iteration, which
    takes slope * K + intercept."""
    rows = [f"{'':38}{'target ms':>12}{'draft ms':>12}{'R^2':>8}"]
    target, draft = passes["target_pass_ms"]["1"], passes["draft_pass_ms"]
    rows.append(f"{'alone, graphed':38}{target:12.3f}{draft:12.3f}{'':8}")
    for name, label in WAYS.items():
        intercept, slope, r2 = fit(passes[name])
        rows.append(f"{'inside: ' + label:38}{intercept:12.3f}{slope:12.3f}{r2:8.4f}")
    return "\n".join(rows)


def draw_itl(passes: dict[str, Any], gpu: str, path: Path) -> None:
    """Draw the time of an iteration against K with its regression line, and the time per token at the measured
    acceptance."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    lengths = [1 + total for total in accumulate(sorted(RATES["mt-bench"], reverse=True))]
    for name, label in WAYS.items():
        ks = sorted(int(k) for k in passes[name] if int(k) >= 1)
        ms = [passes[name][str(k)] for k in ks]
        intercept, slope, _ = fit(passes[name])
        (line,) = left.plot(ks, ms, "o", label=f"{label}: {intercept:.2f} + {slope:.2f} K")
        left.plot(ks, [intercept + slope * k for k in ks], color=line.get_color(), linewidth=1)
        tpot = [time / lengths[k - 1] for k, time in zip(ks, ms, strict=True)]
        right.plot(ks, tpot, "o-", color=line.get_color(), label=label)
        best = int(np.argmin(tpot))
        right.plot(ks[best], tpot[best], "x", color=line.get_color(), markersize=12)
    left.set(xlabel="K", ylabel="ms per iteration", title=f"Iteration, batch 1, {gpu}")
    right.set(xlabel="K", ylabel="ms per token", title="Time per token at the references' acceptance")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_throughput(found: dict[str, Any], gpu: str, path: Path) -> None:
    """Draw tokens per second and the speed-up over K = 0 against concurrency, for the data set of `found`."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    counts = [int(c) for c in found["k0"] if c.isdigit()]
    base = [found["k0"][str(c)]["tokens_per_s"] for c in counts]
    for name, cells in found.items():
        rates = [cells[str(c)]["tokens_per_s"] for c in counts]
        left.plot(counts, rates, "o-", label=name.replace("k", "K = "))
        right.plot(counts, np.divide(rates, base), "o-", label=name.replace("k", "K = "))
    left.set(xscale="log", yscale="log", xlabel="concurrency", ylabel="tokens/s", title=f"Throughput, {gpu}")
    right.set(xscale="log", xlabel="concurrency", ylabel="tokens/s over K = 0", title="Speed-up")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Draw the charts for which the file has results."""
    path = Path(sys.argv[1])
    content = json.loads(path.read_text())
    if "passes" in content:
        print(table(content["passes"]))
        draw_itl(content["passes"], content["gpu"], path.with_name(f"{path.stem}_itl.png"))
    for name, found in content.get("steady", {}).items():
        if "k0" in found:
            draw_throughput(found, content["gpu"], path.with_name(f"{path.stem}_throughput_{name}.png"))


if __name__ == "__main__":
    main()
