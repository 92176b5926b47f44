"""Measures every drafter on the bundled target: acceptance length and tokens per second, as JSON, table and picture.

    python benches/bench_drafters.py [--rounds 5] [--prompts 4] [--tokens 96] [--drafters a b ...] [--out FILE.json]

Every engine runs the same prompts, one request at a time, and the engines take turns at each prompt, so that a machine
that grows slower or faster does so for all; no prompt comes twice, so a suffix tree knows only what it has seen in
other texts. SPECRS_DATA names the folder of InstructCoder's tasks; without it the bundled prompts serve, for one round.

- code: the first halves of the answers of even tasks
- editing: the inputs of odd tasks, followed by their own first quarter, where an answer would repeat them
- mix: half of each
- noise: the code of the mix sampled at temperature 5, each prompt with a seed of its own, and drafted for by a model
  and a head of random weights: no draft pays

Figures are medians over rounds, speed-ups medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import specrs
import torch
from safetensors.torch import load_file, save_file
from specrs import LLM, SamplingParams
from specrs.pair import DRAFT, EAGLE3
from specrs.pair.prompts import PROMPTS

VANILLA = "vanilla"
DRAFTERS = (
    "draft_model",
    "eagle3",
    "ngram",
    "suffix",
    "ngram,draft_model",
    "suffix,draft_model",
    "suffix,eagle3",
    "ngram,suffix",
)
KEYS: dict[str, dict[str, Any]] = {"ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 4}}
WORKLOADS = ("code", "editing", "mix", "noise")


@dataclass
class Contestant:
    """One engine and its measurements, a value for each round."""

    name: str
    llm: LLM
    useless: LLM
    """The engine with weights whose drafts are useless, to measure noise."""
    speeds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in WORKLOADS})
    lengths: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in WORKLOADS})


def random_weights(source: Path, folder: Path) -> Path:
    """Write a checkpoint like `source` with shuffled matrices to `folder`."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(0)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                shuffled = torch.randperm(tensor.numel(), generator=generator)
                tensors[name] = tensor.flatten()[shuffled].view_as(tensor)
        save_file(tensors, file)
    return folder


def engine(method: str, k: int | str, draft: Path | None = None) -> LLM:
    """Return the bundled target with the drafter `method`, and with the model or head in `draft` if given."""
    speculative: dict[str, Any] | None = None
    if method != VANILLA:
        speculative = {"method": method, "num_speculative_tokens": k}
        for one in method.split(","):
            speculative |= KEYS.get(one, {})
        if draft is not None:
            speculative["model"] = str(draft)
    return LLM(
        speculative_config=speculative, max_model_len=512, max_num_seqs=1, threads=1, enable_prefix_caching=False
    )


def contestant(name: str, k: int | str, useless: dict[str, Path]) -> Contestant:
    """Return an engine and its twin for measuring noise, which is the same engine if the drafter has no weights."""
    llm = engine(name, k)
    weights = [useless[one] for one in name.split(",") if one in useless]
    return Contestant(name, llm, engine(name, k, *weights) if weights else llm)


def texts() -> tuple[list[str], list[str]]:
    """Return two lists of prompts: texts to be continued, and texts to be edited."""
    folder = os.environ.get("SPECRS_DATA")
    if folder is None:
        return list(PROMPTS), list(PROMPTS)
    lines = (Path(folder) / "instructcoder_edit_eval.jsonl").read_text(encoding="utf-8").splitlines()
    tasks = [json.loads(line) for line in lines]
    return [task["output"] for task in tasks[::2]], [task["input"] for task in tasks[1::2]]


def workloads(llm: LLM, rounds: int, count: int) -> list[dict[str, list[list[int]]]]:
    """Return for each round `count` prompts of each workload as token ids."""
    tokenizer = llm.get_tokenizer()
    code, edits = ([ids for ids in map(tokenizer.encode, kind) if 40 <= len(ids) <= 200] for kind in texts())
    gap = tokenizer.encode("\n\n\n")
    half = count // 2
    # A prompt of each kind for its own workload, half of one for the mix.
    needed = (rounds * (count + half), rounds * (count + count - half))
    for name, have, need in zip(("code", "editing"), (code, edits), needed, strict=True):
        if len(have) < need:
            raise SystemExit(f"--rounds {rounds - 1} --prompts {count}: needs {need} {name} prompts, has {len(have)}")
    edited = iter([ids + gap + ids[: len(ids) // 4] for ids in edits])
    continued = iter([ids[: len(ids) // 2] for ids in code])
    drawn = []
    for _ in range(rounds):
        own = {"code": _take(continued, count), "editing": _take(edited, count)}
        mix = _take(continued, half) + _take(edited, count - half)
        drawn.append(own | {"mix": mix, "noise": mix[:half]})
    return drawn


def _take(prompts: Iterator[list[int]], count: int) -> list[list[int]]:
    return list(itertools.islice(prompts, count))


def measure(contestants: list[Contestant], workload: str, prompts: list[list[int]], tokens: int) -> None:
    """Run one workload once on every engine, and append the measurements."""
    temperature = 5.0 if workload == "noise" else 0.0
    seconds = dict.fromkeys((one.name for one in contestants), 0.0)
    engines = {one.name: one.useless if workload == "noise" else one.llm for one in contestants}
    for llm in engines.values():
        llm.reset_stats()
    for i, ids in enumerate(prompts):
        # Noise is by seed and position: with one seed a text of noise would be the one before.
        seed = len(contestants[0].speeds[workload]) * len(prompts) + i
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        # Another one begins at each prompt: the first finds the caches cold.
        for one in contestants[i % len(contestants) :] + contestants[: i % len(contestants)]:
            start = time.perf_counter()
            engines[one.name].generate({"prompt_token_ids": ids}, params, use_tqdm=False)
            seconds[one.name] += time.perf_counter() - start
    for one in contestants:
        one.speeds[workload].append(len(prompts) * tokens / seconds[one.name])
        stats = engines[one.name].stats()
        # Of all iterations, those without a draft included: what a request gains.
        iterations = stats.generation_tokens - stats.accepted_tokens
        one.lengths[workload].append(stats.generation_tokens / max(1, iterations))


def table(contestants: list[Contestant]) -> tuple[dict[str, Any], str]:
    """Return the medians by drafter and workload, and the same as a Markdown table."""
    plain = contestants[0]
    found: dict[str, Any] = {}
    lines = ["| drafter | " + " | ".join(WORKLOADS) + " |", "| --- |" + " --- |" * len(WORKLOADS)]
    for one in contestants:
        found[one.name] = {}
        cells = []
        for workload in WORKLOADS:
            ratios = [a / b for a, b in zip(one.speeds[workload], plain.speeds[workload], strict=True)]
            row = {
                "tokens_per_second": statistics.median(one.speeds[workload]),
                "tokens_per_iteration": statistics.median(one.lengths[workload]),
                "speedup": statistics.median(ratios),
                "speedups": ratios,
            }
            found[one.name][workload] = row
            cells.append(f"{row['tokens_per_iteration']:.2f} tokens, {row['speedup']:.2f}x")
        lines.append(f"| `{one.name}` | " + " | ".join(cells) + " |")
    return found, "\n".join(lines)


def draw(found: dict[str, Any], caption: str, path: Path) -> None:
    """Draw bars of speed-up by workload, a group for each drafter."""
    from matplotlib.figure import Figure

    names = [name for name in found if name != VANILLA]
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(WORKLOADS)
    for i, workload in enumerate(WORKLOADS):
        at = [n + (i - (len(WORKLOADS) - 1) / 2) * width for n in range(len(names))]
        bars = axes.bar(at, [found[name][workload]["speedup"] for name in names], width, label=workload)
        axes.bar_label(bars, [f"{found[name][workload]['tokens_per_iteration']:.2f}" for name in names], fontsize=7)
    axes.axhline(1.0, color="0.4", linewidth=1)
    axes.set_xticks(range(len(names)), names, rotation=20)
    axes.set(ylabel="speed over no speculation")
    axes.set_title("Drafters on the bundled target (on the bars: tokens an iteration)", loc="left")
    figure.legend(loc="outside upper right", ncols=len(WORKLOADS))
    axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption, fontsize=8, color="0.4")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4, help="of each workload in a round")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--k", default="auto", help="num_speculative_tokens; default: auto")
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    k = args.k if args.k == "auto" else int(args.k)
    with tempfile.TemporaryDirectory() as folder:
        useless = {"draft_model": random_weights(DRAFT, Path(folder) / "draft")}
        useless["eagle3"] = random_weights(EAGLE3, Path(folder) / "eagle3")
        contestants = [contestant(name, k, useless) for name in (VANILLA, *args.drafters)]
    # The first round warms up and is not counted.
    for i, drawn in enumerate(workloads(contestants[0].llm, args.rounds + 1, args.prompts)):
        for workload, prompts in drawn.items():
            measure(contestants, workload, prompts, args.tokens)
            for one in contestants if i == 0 else []:
                one.speeds[workload].clear()
                one.lengths[workload].clear()
        print(f"round {i} of {args.rounds}", flush=True)
    found, markdown = table(contestants)
    print(markdown)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    version = commit.stdout.strip()
    report = {
        "results": found,
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "machine": {"processor": platform.machine(), "threads": 1},
        "versions": {"specrs": specrs.__version__, "torch": torch.__version__, "commit": version},
    }
    out = args.out or Path(__file__).parent / "results" / f"cpu_{platform.machine()}_{version}_drafters.json"
    out.write_text(json.dumps(report, indent=2) + "\n")
    caption = f"K = {args.k}, greedy, one request at a time, one thread, {args.rounds} rounds, specrs {version}"
    draw(found, caption, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
