"""`make gpu-bench`: the table of the GPU's bars, predicted and measured, as JSON and pictures. Checks no results.

    python benches/bench_gpu.py [--out FOLDER] [--only passes,products,attention,...]
                                [--target qwen3-32b] [--draft qwen3-1.7b] [--commit HASH]

Models are random weights at the references' shapes; acceptance is synthetic at the references' rates, so times are
real and texts are not. One GPU, nothing downloaded; each part may run alone. `--target tiny --draft tiny` tries the
script without a GPU (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from gpu import attention, formats, iterations, products, serving
from gpu.models import weight_bytes, write_config
from gpu.timing import ON_GPU, pretend
from specrs.backends.weights import Weights
from specrs.drafters.draft_model import LoadedDraftModel
from specrs.models.torch_loader import load_model

PARTS = ("passes", "products", "attention", "tpot", "idle", "formats", "throughput", "experts", "transformers")
PREDICTED = {
    "target_pass_ms": "15.9 at 1 to 8 rows: 63.97 GB at 4.3 TB/s and 2.2 us for each of 387 kernels; 16.2 to 17.5 "
    "after reading the compiled code (29 us a layer beyond bytes)",
    "draft_pass_ms": "1.18: 3.44 GB at 4.3 TB/s and 2.2 us for each of 171 kernels; 1.4 to 1.7 after reading the "
    "compiled code",
    "iteration_overhead_ms": "0.03 at K = 5: prepare, assemble, accept, update, and two rows in pass 1",
    "sampling_adds_ms": "0.17 at K = 5: 5 x 16 us in drafting, 70 us in verification, and logits that are written",
    "tpot_ms": "6.2 at K = 5 (AL 3.53), 15.9 at K = 0; 6.6 to 7.1 at K = 5 after reading the compiled code",
    "idle_us": "under 10 at batch 1 and 64: the next step is enqueued before one ends",
    "attention_share": "0.5 at 2k, 0.8 at 32k, 0.88 at 128k",
    "formats": "target pass of 6 rows: FP8 11.6 ms, INT4 10.4, from the times of products alone",
    "experts": "Qwen3-30B-A3B: 3.3 ms for 1 row, 7.1 for 6, from the times of products alone",
    "transformers_ratio": "8 at K = 5: about 180 ms an iteration, bound by the host",
}
"""For one H200 in bf16, written down before each was measured."""


def main() -> None:
    """Measure the parts asked for and write the file after each, so that a cut run keeps what it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benches/results"))
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--target", default="qwen3-32b")
    parser.add_argument("--draft", default="qwen3-1.7b")
    parser.add_argument("--commit", default=git("rev-parse", "--short", "HEAD"), help="where git is not at hand")
    arguments = parser.parse_args()
    asked = arguments.only.split(",")
    if unknown := set(asked) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))}: allowed are {', '.join(PARTS)}")
    if not ON_GPU and arguments.target != "tiny":
        parser.error("there is no CUDA device; without one only --target tiny --draft tiny can be tried")
    if not ON_GPU:
        pretend()
    bench = Bench(arguments.target, arguments.draft, arguments.out, arguments.commit)
    for part in PARTS:
        if part in asked:
            bench.measure(part)
    print(f"written: {bench.path}")


class Bench:
    """The models, what was found, and the file that it goes to."""

    def __init__(self, target: str, draft: str, out: Path, commit: str) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.target, self.draft = str(write_config(target, self.folder)), str(write_config(draft, self.folder))
        self.device = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
        self._weights: Weights | None = None
        gpu = torch.cuda.get_device_name() if ON_GPU else platform.machine()
        changed = git("status", "--porcelain", "--untracked-files=no")
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / f"{gpu.replace(' ', '_')}_{commit}_bench_gpu.json"
        self.found: dict[str, Any] = {
            "gpu": gpu,
            "commit": commit + "-dirty" * (changed not in ("", "unknown")),
            "versions": {
                "torch": torch.__version__,
                "triton": triton.__version__,
                "transformers": transformers.__version__,
                "cuda": torch.version.cuda,
                "python": platform.python_version(),
            },
            "command": " ".join(sys.argv),
            "target": {"shape": target, "bytes": weight_bytes(target)},
            "draft": {"shape": draft, "bytes": weight_bytes(draft)},
            "predicted": PREDICTED,
            "seconds": {},
        }

    def measure(self, part: str) -> None:
        """Run one part, and write all that is there."""
        began = time.perf_counter()
        self.write({part: getattr(self, part)()})
        self.found["seconds"][part] = round(time.perf_counter() - began, 1)
        self.write({})
        print(json.dumps({part: self.found[part]}, indent=2), flush=True)
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()

    def write(self, found: dict[str, Any]) -> None:
        """Add to what is there, and write all of it: a run that is cut off keeps what it has."""
        self.found |= found
        self.path.write_text(json.dumps(self.found, indent=2) + "\n")

    @property
    def weights(self) -> Weights:
        """Random weights of both, made once."""
        if self._weights is None:
            self._weights = Weights(self.load(self.target), LoadedDraftModel(self.load(self.draft)))
        return self._weights

    def load(self, folder: str) -> Any:
        """A model of random weights."""
        dtype = "bfloat16" if ON_GPU else "float32"
        return load_model(folder, dtype=dtype, device=self.device, load_format="dummy")

    def passes(self) -> dict[str, Any]:
        """Passes and iterations alone."""
        settings = {} if ON_GPU else {"device": "cpu", "dtype": "float32", "block_size": 4}
        return iterations.measure(iterations.Alone(self.target, self.draft, self.weights, **settings))

    def products(self) -> dict[str, Any]:
        """Products and the sampling cut alone, which load no models."""
        return products.measure(["qwen3-32b", "qwen3-1.7b"] if ON_GPU else ["tiny"], self.device)

    def attention(self) -> dict[str, Any]:
        """Verification attention over long contexts."""
        return attention.measure(self.device, [2048, 32768, 131072] if ON_GPU else [32])

    def formats(self) -> dict[str, Any]:
        """The target as codes of every kind, beside the bf16 draft."""
        settings = {} if ON_GPU else {"device": "cpu", "dtype": "float32", "block_size": 4}
        found = {}
        for kind in formats.CODINGS:
            weights = Weights(formats.quantized(self.weights.target, kind), self.weights.drafter)
            found[kind] = formats.measure(self.target, self.draft, weights, **settings)
            self.write({"formats": found})
        return found

    def experts(self) -> dict[str, Any]:
        """A mixture of experts beside the bf16 draft; the dense target leaves the GPU before."""
        settings = {} if ON_GPU else {"device": "cpu", "dtype": "float32", "block_size": 4}
        drafter, self._weights = self.weights.drafter, None
        gc.collect()
        target = str(write_config("qwen3-30b-a3b" if ON_GPU else "tiny-experts", self.folder))
        weights = Weights(self.load(target), drafter)
        return {Path(target).name: formats.measure(target, self.draft, weights, **settings)}

    def tpot(self) -> dict[str, Any]:
        """A lone request at K = 5 and K = 0."""
        found = {}
        context, tokens = (1024, 600) if ON_GPU else (6, 4)
        for k in (5, 0):
            engine = serving.make_engine(self.target, self.draft, self.weights, k, [1], 2 * context + tokens)
            found[f"k{k}"] = serving.tpot(engine, context, tokens)
            release(engine)
        found["speedup"] = {"k5": found["k0"]["tpot_ms"] / found["k5"]["tpot_ms"]}
        return found

    def idle(self) -> dict[str, Any]:
        """The GPU between steps."""
        sizes = [1, 64] if ON_GPU else [1]
        engine = serving.make_engine(self.target, self.draft, self.weights, 5, sizes, 512)
        found = {str(batch): serving.idle_between_steps(engine, batch) for batch in sizes}
        release(engine)
        return found

    def throughput(self) -> dict[str, Any]:
        """Tokens per second by K and concurrency, 150 tokens in and 200 out."""
        found: dict[str, Any] = {}
        sizes = [1, 4, 16, 64, 128, 256] if ON_GPU else [1, 2]
        for k in ("auto", 5, 0, 3):
            engine = serving.make_engine(self.target, self.draft, self.weights, k, sizes, 512)
            found[k if k == "auto" else f"k{k}"] = serving.throughput(engine, sizes)
            release(engine)
            self.write({"throughput": found})
        return found

    def transformers(self) -> dict[str, Any]:
        """Assisted generation of transformers in its own process; our weights leave the GPU before."""
        self._weights = None
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()
        script = Path(__file__).parent / "gpu" / "transformers_assisted.py"
        k, context, tokens = (5, 1024, 40) if ON_GPU else (2, 6, 8)
        command = [sys.executable, str(script), self.target, self.draft, *map(str, (k, context, tokens))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-1:]}
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        ours = self.found.get("passes", {}).get("whole_ms", {}).get(k)
        return found | ({"ratio": found["ms_per_iteration"] / ours} if ours else {})


def release(engine: Any) -> None:
    """Give the engine's KV pool and graphs back before the next one sizes its own."""
    engine.runner = engine.ring = None
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def git(*arguments: str) -> str:
    """What git says; `unknown` outside of a repository, or where there is no git."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        )
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


if __name__ == "__main__":
    main()
