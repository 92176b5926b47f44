"""Compares specrs with four engines on a CPU, in turns: llama.cpp, OpenVINO GenAI, vLLM and transformers. Installs
nothing.

    python benches/bench_cpu_peers.py --peers FOLDER [--sets pair1 pair8 smollm2 qwen3 smollm2-files-1 ...]
                                      [--engines ...] [--rounds 5] [--out benches/results/...json]

`benches/peers/setup.sh --peers FOLDER` installs the others, each in an environment of its own, and prepares models.
Every round runs every line of a set once, each in a process of its own; figures are medians over rounds, with least
and most. Prompts are 128 tokens of the bundled ones, as ids, and requests do not end before their last token. KV caches
have the dtype of the arithmetic, drafts are K in every iteration, prefix caches are off. With `--out` the file is
written after every round. An idle machine, or the figures mean nothing: load averages stand beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers import engines, machine, tables
from peers.figures import Measured, compare_ids
from peers.goals import goals
from peers.prompts import make_prompts
from peers.settings import ENGINES, FILES, SETS, Setting

IDLE = 0.3
"""Load average above which a machine does not count as idle."""


def read_limits(setting: Setting, peers: Path) -> dict[str, Any]:
    """Return the size of the target's weights, and the read limit: passes per second if a pass only read the weights,
    at the bandwidth measured now with the set's threads. For quantized files, bytes are the file's."""
    stored, number, sizes = "file", None, {}
    files = {line.dtype: engines.model_path(line, setting.target, peers) for line in setting.lines}
    if any(line.dtype in tables.NUM_BYTES for line in setting.lines):
        stored, number = machine.weights(engines.checkpoint(setting.target, peers))
        sizes = {dtype: number * size for dtype, size in tables.NUM_BYTES.items()}
    sizes |= {kind: file.stat().st_size for kind, file in files.items() if kind in FILES and file.exists()}
    speeds = {dtype: machine.read_bandwidth(size, setting.threads) for dtype, size in sizes.items()}
    return {
        "stored": stored,
        "weights": number,
        "bytes": sizes,
        "gb_per_s": speeds,
        "passes_per_s": {dtype: 1e9 * speeds[dtype] / size for dtype, size in sizes.items()},
    }


def prepare(names: list[str], chosen: list[str], peers: Path) -> tuple[dict[str, list[Measured]], dict[str, Any]]:
    """Return the cases of each set that has any that can run, and the set's prompts. A case is an engine in one
    setting; its `reason` says why it cannot run."""
    measured, prompts = {}, {}
    for name in names:
        setting = SETS[name]
        lines = [Measured(line) for line in setting.lines if line.engine in chosen]
        for each in lines:
            each.reason = engines.missing(each.line, setting, peers)
            if each.reason:
                print(f"left out of {name}: {told(each)}: {each.reason}", flush=True)
        if any(each.reason is None for each in lines):
            prompts[name] = make_prompts(setting, engines.checkpoint(setting.target, peers))
            measured[name] = lines
    return measured, prompts


def told(each: Measured) -> str:
    """Return a short text about one measured case, for the terminal: engine, K and dtype."""
    return f"{each.line.name}, K = {each.line.k}, {each.line.dtype}"


def run_round(name: str, lines: list[Measured], prompts: dict[str, Any], peers: Path, timeout_s: float) -> None:
    """Run every case of a set once. A case that failed in an earlier round is not tried again."""
    for each in lines:
        if each.reason is not None:
            continue
        each.take(engines.run(each.line, SETS[name], peers, prompts, timeout_s), SETS[name].batch)
        if each.reason is not None:
            print(f"failed in {name}: {told(each)}: {each.reason}", flush=True)


def set_report(name: str, lines: list[Measured], limits: dict[str, Any]) -> dict[str, Any]:
    """Return a set in the form of the results file."""
    setting = asdict(SETS[name])
    del setting["lines"]
    found = []
    for each in lines:
        keys = sorted({key for run in each.runs for key in run})
        found.append(
            asdict(each.line)
            | {"runs": each.runs, "medians": {key: each.median(key) for key in keys}}
            | ({} if each.reason is None else {"left_out": each.reason})
        )
    return {"setting": setting, "read_limit": limits, "lines": found, "ids": compare_ids(lines, SETS[name])}


def versions(measured: dict[str, list[Measured]]) -> dict[str, dict[str, str]]:
    """Return the package versions that each engine reported, by engine. Engines that did not run are left out."""
    found = {each.line.engine: each.versions for lines in measured.values() for each in lines if each.versions}
    return {engine: found[engine] for engine in ENGINES if engine in found}


def commit() -> str:
    """Return this repository's commit, marked if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def markdown(report: dict[str, Any], measured: dict[str, list[Measured]]) -> str:
    """Return the report as Markdown."""
    computer = report["machine"]
    load = ", ".join(f"{when} {values[0]:.2f}" for when, values in report["load_average"].items())
    sizes = ", ".join(f"{level} {size / 2**10:,.0f} KiB" for level, size in computer["caches"].items())
    lines = [
        f"{computer['processor']}, {computer['physical_cores']} cores, {sizes}; load average {load}; commit "
        f"{report['commit']}; rounds: {report['rounds']}, medians (least to most)",
        "",
        *(f"- {engine}: {', '.join(f'{k} {v}' for k, v in of.items())}" for engine, of in report["versions"].items()),
        *(
            f"- reads {read['where']} ({read['bytes'] / 2**20:.0f} MiB), threads: {read['threads']}: "
            f"{read['gb_per_s']:.1f} GB/s"
            for read in computer["memory_reads"]
        ),
    ]
    for name, found in measured.items():
        limits = report["sets"][name]["read_limit"]
        lines += ["", f"### {SETS[name].title}", "", *tables.rows_of(SETS[name], found, limits), ""]
        for dtype, passes in limits["passes_per_s"].items():
            size = limits["bytes"][dtype] / 1e6
            speed = limits["gb_per_s"][dtype]
            lines.append(f"- {dtype} weights: {size:.1f} MB at {speed:.1f} GB/s are at most {passes:,.0f} passes/s")
        lines += tables.id_rows(report["sets"][name]["ids"])
        lines += [f"- left out: {told(each)}: {each.reason}" for each in found if each.reason]
        lines += ["", *tables.goal_rows(goals(name, found, limits["passes_per_s"]))]
    return "\n".join(lines)


def main() -> None:
    """Measure, write after every round, print at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=os.environ.get("PEERS"), help="default: $PEERS")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, help="prompts of a set, to try the script; others by the set")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a process, its start included")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.peers is None:
        parser.error("--peers is missing: the folder of benches/peers/setup.sh")
    peers = args.peers.resolve()
    measured, prompts = prepare(args.sets, args.engines, peers)
    if not measured:
        parser.error(f"--peers {args.peers}: nothing in it that could run")
    if args.num_prompts:
        for found in prompts.values():
            found["groups"] = found["groups"][: -(-args.num_prompts // len(found["warm"][0]))]

    before = os.getloadavg()
    if before[0] > IDLE:
        print(f"load average {before[0]:.2f}: this machine is not idle", flush=True)
    report: dict[str, Any] = {
        "what": __doc__.splitlines()[0],
        "command": "python " + " ".join(sys.argv).replace(str(args.peers), "FOLDER").replace(str(args.out), "FILE"),
        "SPECRS_ISA": os.environ.get("SPECRS_ISA"),
        "commit": commit(),
        "python": platform.python_version(),
        "machine": machine.describe(),
        "load_average": {"before": before},
    }
    limits = {name: read_limits(SETS[name], peers) for name in measured}
    for done in range(1, args.rounds + 1):
        for name, lines in measured.items():
            run_round(name, lines, prompts[name], peers, args.timeout)
            print(f"round {done} of {args.rounds}: {name}", flush=True)
        report["rounds"] = done
        report["load_average"]["after"] = os.getloadavg()
        report["versions"] = versions(measured)
        report["sets"] = {name: set_report(name, lines, limits[name]) for name, lines in measured.items()}
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(markdown(report, measured))


if __name__ == "__main__":
    main()
