"""Compares specrs bench serve with aiperf: the same prompts to one server of the bundled pair, in turns.

    python benches/bench_vs_aiperf.py --aiperf PATH [--rounds 5] [--concurrency 4] [--paced] [--out FILE.json]

aiperf (tried: 0.13.0) is not a dependency: install it into an environment of its own and name its program. Prompts are
windows of the bundled prompts as text, so that both tools read one file; the end token is ignored, so that both get the
same number of tokens. Figures are medians over rounds. aiperf's inter token latency is what vLLM calls TPOT, its inter
chunk latency vLLM's ITL. aiperf is several processes; where they take time from the server, `--paced` compares on
benches/paced_server.py instead, which does nothing but keep time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from specrs.bench.datasets import DatasetConfig, load
from specrs.bench.server_process import free_port, serving
from specrs.cli.demo.report import machine
from specrs.pair import TARGET
from specrs.tokenizer import Tokenizer

FIGURES = {
    "requests/s": ("request_throughput", ("request_throughput", "avg")),
    "output tokens/s": ("output_throughput", ("output_token_throughput", "avg")),
    "mean TTFT (ms)": ("mean_ttft_ms", ("time_to_first_token", "avg")),
    "p99 TTFT (ms)": ("p99_ttft_ms", ("time_to_first_token", "p99")),
    "mean TPOT (ms)": ("mean_tpot_ms", ("inter_token_latency", "avg")),
    "p99 TPOT (ms)": ("p99_tpot_ms", ("inter_token_latency", "p99")),
    "mean ITL (ms)": ("mean_itl_ms", ("inter_chunk_latency", "avg")),
    "mean latency (ms)": ("mean_e2el_ms", ("request_latency", "avg")),
    "acceptance length": ("spec_decode_acceptance_length", ("spec_decode_token_weighted_acceptance_length", "avg")),
}
"""Name -> our key, and aiperf's metric and statistic."""


def ours(url: str, prompts: Path, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Run specrs bench serve once."""
    command = [
        sys.executable, "-c", "import sys; from specrs.cli import main; sys.exit(main())", "bench", "serve",
        "--base-url", url, "--model", str(TARGET), "--dataset-name", "custom", "--dataset-path", str(prompts),
        "--num-prompts", str(args.num_prompts), "--output-len", str(args.output_len), "--ignore-eos",
        "--temperature", "0", "--max-concurrency", str(args.concurrency), "--request-rate", "inf", "--num-warmups",
        str(args.concurrency), "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--result-dir",
        str(folder), "--result-filename", "ours.json", "--disable-tqdm",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = json.loads((folder / "ours.json").read_text())
    return {name: found[key] for name, (key, _) in FIGURES.items() if key in found}


def aiperfs(url: str, prompts: Path, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Run aiperf once."""
    command = [
        str(args.aiperf), "profile", "--model", str(TARGET), "--tokenizer", str(TARGET), "--url", url,
        "--endpoint-type", "completions", "--streaming", "--concurrency", str(args.concurrency), "--request-count",
        str(args.num_prompts), "--warmup-request-count", str(args.concurrency), "--custom-dataset-type", "single_turn",
        "--input-file", str(prompts), "--output-tokens-mean", str(args.output_len), "--output-tokens-stddev", "0",
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--use-server-token-count",
        "--ui", "none", "--artifact-dir", str(folder / "aiperf"),
    ]  # fmt: skip
    # With it set, aiperf does not take a folder for a tokenizer.
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    found = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    return {name: found[metric][statistic] for name, (_, (metric, statistic)) in FIGURES.items() if found.get(metric)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--aiperf", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--paced", action="store_true", help="a server that only keeps time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    tokenizer = Tokenizer(str(TARGET))
    samples = load(DatasetConfig(name="bundled", num_prompts=args.num_prompts), tokenizer)
    port = free_port()
    runs: dict[str, list[dict[str, float]]] = {"specrs bench serve": [], "aiperf": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        with prompts.open("w", encoding="utf-8") as file:
            for sample in samples:
                text = tokenizer.decode([token for token in sample.prompt if isinstance(token, int)])
                # one field for each tool
                file.write(json.dumps({"prompt": text, "text": text}) + "\n")
        command = [
            sys.executable, "-c", "import sys; from specrs.cli import main; sys.exit(main())", "serve", str(TARGET),
            "--dtype", "float32", "--max-model-len", "1024", "--no-enable-prefix-caching", "--port", str(port),
            "--disable-uvicorn-access-log", "--per-request-spec-decode-metrics", "summary", "--speculative-config",
            json.dumps({"num_speculative_tokens": args.k}),
        ]  # fmt: skip
        if args.paced:
            command = [sys.executable, str(Path(__file__).with_name("paced_server.py")), "--port", str(port)]
        with serving(command, port, folder / "server.log", {"OMP_NUM_THREADS": "1"}, 300.0) as server:
            for _ in range(args.rounds):
                runs["specrs bench serve"].append(ours(server.base_url, prompts, args, folder))
                runs["aiperf"].append(aiperfs(server.base_url, prompts, args, folder))

    report: dict[str, Any] = {
        "what": "specrs bench serve and aiperf in turns against one server",
        "server": "benches/paced_server.py" if args.paced else f"the bundled pair, K = {args.k}",
        "command": "python " + " ".join(sys.argv).replace(str(args.aiperf), "PATH"),
        "machine": machine("float32"),
        "aiperf": subprocess.run([str(args.aiperf), "--version"], capture_output=True, text=True).stdout.strip(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
        "rounds": runs,
    }
    print(f"{'':<20}{'specrs bench serve':>26}{'aiperf':>26}{'difference':>12}   medians (least to most)")
    for name in FIGURES:
        columns = [[run[name] for run in runs[tool] if name in run] for tool in runs]
        if not all(columns):  # a server without a model has no acceptance
            continue
        middle = [statistics.median(values) for values in columns]
        cells = [f"{m:.2f} ({min(v):.2f}-{max(v):.2f})" for m, v in zip(middle, columns, strict=True)]
        print(f"{name:<20}{cells[0]:>26}{cells[1]:>26}{middle[0] / middle[1] - 1:>12.1%}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
