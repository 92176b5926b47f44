"""Tokens/s on a CPU next to busy processes, by package tree: how much a loaded machine costs. Runs no drafts.

    python benches/bench_cpu_contention.py [--model PATH] [--trees python OTHER] [--threads 2] [--busy 0 1 2]
        [--rounds 5] [--tokens 128] [--out benches/results/...json]

The model is SmolLM2-135M (`scripts/real_model`), or PATH; `bundled` is the bundled target. Each tree is a folder that
holds a package `specrs`; each has a process of its own, which loads the model once. The processes take turns to
generate the same greedy text, idle and next to `--busy` loops that compute and never sleep. Figures are medians over
rounds, and their ratio to the median of the same tree without busy loops. All trees must generate the same tokens under
any load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SETTLE_SECONDS = 0.5
"""Between the start of busy loops and a measurement, so that the scheduler has placed them."""
PROMPT_TOKENS = 16


def serve(model: str, dtype: str, threads: int | None, tokens: int) -> None:
    """Generate the same `tokens` tokens once for each line read from stdin. Prints the seconds of decoding and the
    token ids as a line of JSON each time."""
    from specrs import LLM, SamplingParams

    llm = LLM(
        model=None if model == "bundled" else model,
        dtype=dtype,
        threads=threads,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [100 + 7 * i for i in range(PROMPT_TOKENS)]}
    llm.generate(prompt, params.replace(max_tokens=8), use_tqdm=False)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        first, end = output.metrics.first_token_time, output.metrics.finish_time
        assert first is not None
        assert end is not None
        print(json.dumps({"seconds": end - first, "ids": output.outputs[0].token_ids}), flush=True)


class Tree:
    """Process that runs the package of one source tree."""

    def __init__(self, folder: Path, model: str, arguments: argparse.Namespace) -> None:
        self.folder, self.tokens = folder, arguments.tokens
        self.ids: list[int] = []
        command = [sys.executable, __file__, "--serve", "--model", model, "--dtype", arguments.dtype]
        command += ["--tokens", str(arguments.tokens)]
        command += [] if arguments.threads is None else ["--threads", str(arguments.threads)]
        environment = os.environ | {"PYTHONPATH": str(folder.resolve())}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.folder}: its process ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tokens_per_second(self) -> float:
        """Generate the text once and return its tokens per second. Raises AssertionError if the text differs from the
        one before."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self._answer()
        assert self.ids in ([], answer["ids"]), f"{self.folder}: the text has changed"
        self.ids = answer["ids"]
        return (self.tokens - 1) / float(answer["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """While this context is open, run `count` processes that compute without end."""
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        if count:
            time.sleep(SETTLE_SECONDS)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def real_model() -> str:
    """Return the path of SmolLM2-135M."""
    made = subprocess.run([ROOT / "scripts/real_model", sys.executable], capture_output=True, text=True, check=True)
    return made.stdout.strip()


def summary(rates: dict[tuple[str, int], list[float]]) -> dict[str, Any]:
    """Return tokens/s by source tree and number of busy loops: median, minimum and maximum, and the ratio of the median
    to that of the same tree without busy loops."""
    figures: dict[str, Any] = {}
    for (tree, busy), found in rates.items():
        idle = rates.get((tree, 0))
        figures.setdefault(tree, {})[f"{busy} busy"] = {
            "tokens_per_second": round(statistics.median(found), 2),
            "least": round(min(found), 2),
            "most": round(max(found), 2),
            "of_idle": None if idle is None else round(statistics.median(found) / statistics.median(idle), 3),
        }
    return figures


def measure(arguments: argparse.Namespace) -> None:
    """Run all trees in turns, print the report, and write it where it is asked for."""
    from peers import machine  # imports specrs, which the children import from their own trees

    model = arguments.model or real_model()
    trees = {str(folder): Tree(folder, model, arguments) for folder in arguments.trees}
    rates: dict[tuple[str, int], list[float]] = {}
    load = os.getloadavg()[0]
    for _ in range(arguments.rounds):
        for busy in arguments.busy:
            with busy_loops(busy):
                for name, tree in trees.items():
                    rates.setdefault((name, busy), []).append(tree.tokens_per_second())
                    print(f"{name}, {busy} busy: {rates[name, busy][-1]:.1f} tokens/s", file=sys.stderr, flush=True)
    texts = {tuple(tree.ids) for tree in trees.values()}
    for tree in trees.values():
        tree.close()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    report = {
        "what": " ".join(__doc__.split("\n")[0].split()),
        "command": "python " + " ".join(sys.argv),
        "machine": f"{machine.processor()}, {len(machine.usable_processors())} processors",
        "commit": commit.stdout.strip(),
        "model": Path(model).name,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "load_average_before": round(load, 2),
        "same_text": len(texts) == 1,
        "figures": summary(rates),
    }
    print(json.dumps(report, indent=2))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if len(texts) > 1:
        raise SystemExit("the trees write different texts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint, or `bundled`; default: SmolLM2-135M")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, help="default: the engine's choice")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--trees", nargs="+", type=Path, default=[ROOT / "python"])
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.model, arguments.dtype, arguments.threads, arguments.tokens)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
