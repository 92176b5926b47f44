"""Measures the bundled pair over HTTP: load at several numbers of requests, and greedy texts next to a CPU's.

    python benches/gpu/server.py FOLDER

Runs in a process of its own. Logs and the figures of `specrs bench` go to FOLDER. Prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import torch
from specrs import LLM, SamplingParams
from specrs.bench.server_process import free_port, serving
from specrs.pair import DRAFT, TARGET
from specrs.pair.prompts import PROMPTS

ON_GPU = torch.cuda.is_available()
CLI = [sys.executable, "-c", "import sys; from specrs.cli import main; sys.exit(main(sys.argv[1:]))"]
CONCURRENCY = (1, 16, 64) if ON_GPU else (1, 2)
NUM_PROMPTS, OUTPUT, NUM_TEXTS = (4, 128, 16) if ON_GPU else (1, 8, 2)
"""Number of prompts for each concurrent request, number of tokens of an answer, and number of prompts whose texts are
compared."""
START_SECONDS = 120.0


def measure(out: Path) -> dict[str, Any]:
    """Serve, load, compare. Logs and figures go to `out`."""
    port, device = free_port(), "cuda" if ON_GPU else "cpu"
    draft = {"model": str(DRAFT), "num_speculative_tokens": 5}
    command = [*CLI, "serve", str(TARGET), "--dtype", "float32", "--device", device, "--port", str(port)]
    command += ["--speculative-config", json.dumps(draft)]
    found: dict[str, Any] = {}
    with serving(command, port, out / "server.log", {}, START_SECONDS) as server:
        found["texts_equal"] = _share_of_equal(server.base_url)
        for count in CONCURRENCY:
            found[f"concurrency_{count}"] = _load(port, count, out)
    return found


def _load(port: int, concurrency: int, out: Path) -> dict[str, Any]:
    """Run `specrs bench serve`; the figures that it writes."""
    name = f"server_{concurrency}.json"
    command = [*CLI, "bench", "serve", "--port", str(port), "--max-concurrency", str(concurrency), "--disable-tqdm"]
    command += ["--model", str(TARGET), "--dataset-name", "random", "--random-input-len", "64", "--ignore-eos"]
    command += ["--random-output-len", str(OUTPUT), "--num-prompts", str(NUM_PROMPTS * concurrency)]
    command += ["--request-rate", "inf", "--save-result", "--result-dir", str(out), "--result-filename", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr or done.stdout).strip().splitlines()[-3:]}
    figures: dict[str, Any] = json.loads((out / name).read_text())
    return {key: value for key, value in figures.items() if isinstance(value, int | float)}


def _share_of_equal(base_url: str) -> float:
    """Return the share of prompts whose greedy text of the server is the CPU's. Near-ties may part, as fp32 sums have
    other orders."""
    prompts = list(PROMPTS[:NUM_TEXTS])
    body = {"model": str(TARGET), "prompt": prompts, "max_tokens": OUTPUT, "temperature": 0.0}
    request = urllib.request.Request(
        f"{base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        texts = [choice["text"] for choice in json.load(answer)["choices"]]
    llm = LLM(str(TARGET), dtype="float32", device="cpu")
    own = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=OUTPUT), use_tqdm=False)
    return sum(text == one.outputs[0].text for text, one in zip(texts, own, strict=True)) / len(prompts)


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
