"""Measures `num_speculative_tokens="auto"` against fixed K on a CPU: tokens per second of the bundled pair, and of its
target with a useless draft (random weights), at concurrency 1, 2, 4 and 8.

    python benches/bench_auto_k.py [--rounds 3] [--tokens 96] [--threads 1] [--out benches/results/...json]

Each round runs every contestant once, in turn, on the same eight prompts; figures are medians over rounds of one engine
each. The first run of each engine is not counted. Exits with 1 where a bar is missed: 0.97 times the best fixed K, and
with the useless draft 0.97 times no speculation, with K = 0 in the end.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import specrs
import torch
from specrs import LLM, SamplingParams
from specrs.pair import DRAFT
from specrs.pair.prompts import PROMPTS

CONCURRENCIES = (1, 2, 4, 8)
KS = (0, 1, 2, 3, 4, 5, 7)
BAR = 0.97


def useless_draft(folder: Path) -> Path:
    """Write the bundled draft with redrawn matrices: it costs the same, and its drafts are useless."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    for path in Path(DRAFT).iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
            continue
        random = torch.Generator().manual_seed(0)
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                tensors[name] = (torch.randn(tensor.shape, generator=random) * tensor.float().std()).to(tensor.dtype)
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    return folder


def engine(draft: Path | None, k: int | str) -> LLM:
    """Return an engine with a fixed K, or one that chooses K."""
    speculative: dict[str, Any] = {"num_speculative_tokens": k, "model": str(draft or DRAFT)}
    return LLM(
        speculative_config=speculative,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=max(CONCURRENCIES),
        enable_prefix_caching=False,  # every round prefills anew
    )


def tokens_per_second(llm: LLM, prompts: list[str], concurrency: int, params: SamplingParams) -> float:
    """Return the tokens per second of all prompts, `concurrency` at a time."""
    start, tokens = time.perf_counter(), 0
    for first in range(0, len(prompts), concurrency):
        outputs = llm.generate(prompts[first : first + concurrency], params, use_tqdm=False)
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
    return tokens / (time.perf_counter() - start)


def measure(draft: Path | None, args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens per second by concurrency and K, and the numbers of drafts that `auto` chose."""
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True, detokenize=False)
    contestants: dict[str, LLM] = {str(k): engine(draft, k) for k in (*KS, "auto")}
    prompts = list(PROMPTS)[:8]
    found: dict[str, Any] = {}
    for concurrency in CONCURRENCIES:
        speeds: dict[str, list[float]] = {name: [] for name in contestants}
        for rounds in range(args.rounds + 1):
            for name, llm in contestants.items():
                llm.reset_stats()
                speed = tokens_per_second(llm, prompts, concurrency, params)
                if rounds:
                    speeds[name].append(speed)
        stats = contestants["auto"].stats()
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        fixed = {name: value for name, value in medians.items() if name != "auto"}
        best = max(fixed, key=lambda name: fixed[name])
        # Round by round, so that a machine that drifts hits both alike.
        found[str(concurrency)] = {
            "tokens_per_second": medians,
            "best_fixed_k": int(best),
            "auto_over_best": statistics.median(a / b for a, b in zip(speeds["auto"], speeds[best], strict=True)),
            "auto_over_vanilla": statistics.median(a / b for a, b in zip(speeds["auto"], speeds["0"], strict=True)),
            "auto_drafts_per_token": stats.drafts / max(1, stats.generation_tokens),
            "auto_mean_k": stats.draft_tokens / max(1, stats.drafts),
        }
        row = found[str(concurrency)]
        table = "  ".join(f"{name}: {value:.0f}" for name, value in medians.items())
        print(f"concurrency {concurrency}  {table}  auto/best {row['auto_over_best']:.3f}", flush=True)
    return found


def missed(results: dict[str, Any]) -> list[str]:
    """Return the goals that were not reached, in words."""
    wrong = []
    for name, rows in results.items():
        for concurrency, row in rows.items():
            if row["auto_over_best"] < BAR:
                wrong.append(f"{name} at {concurrency}: {row['auto_over_best']:.3f} of K = {row['best_fixed_k']}")
        if name == "useless draft":
            for concurrency, row in rows.items():
                if row["auto_over_vanilla"] < BAR:
                    wrong.append(f"{name} at {concurrency}: {row['auto_over_vanilla']:.3f} of no speculation")
                if row["auto_drafts_per_token"] > 0.05:
                    wrong.append(f"{name} at {concurrency}: drafts in {row['auto_drafts_per_token']:.0%} of iterations")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        print("bundled pair")
        results = {"bundled pair": measure(None, args)}
        print("useless draft")
        results["useless draft"] = measure(useless_draft(Path(folder) / "draft"), args)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "results": results,
        "missed": missed(results),
        "settings": {"rounds": args.rounds, "tokens": args.tokens, "threads": args.threads},
        "seconds": time.perf_counter() - began,
        "machine": {"processor": platform.machine(), "threads": args.threads},
        "versions": {"specrs": specrs.__version__, "torch": torch.__version__, "commit": commit.stdout.strip()},
    }
    name = f"cpu_{platform.machine()}_{args.threads}_threads_{commit.stdout.strip()}_auto_k.json"
    out = args.out or Path(__file__).parent / "results" / name
    out.write_text(json.dumps(report, indent=2) + "\n")
    print("\n".join(report["missed"]) or "all bars reached")
    sys.exit(1 if report["missed"] else 0)


if __name__ == "__main__":
    main()
