"""Measures the table of the GPU's goals (`make gpu-bench`), predicted and measured, as JSON and pictures. Checks no
results.

    python benches/bench_gpu.py [--out FOLDER] [--only passes,products,attention,...]
                                [--target qwen3-32b] [--draft qwen3-1.7b] [--commit HASH]
                                [--k 0,1,2,3,5,auto] [--concurrency 1,16,64] [--data instructcoder,mt-bench]

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
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from gpu import attention, formats, iterations, products, serving
from gpu.models import weight_bytes, write_config
from gpu.rates import RATES
from gpu.steady import steady
from gpu.timing import ON_GPU, clocks, pretend
from specrs.backends.weights import Weights
from specrs.drafters.draft_model import LoadedDraftModel
from specrs.models.torch_loader import load_model

PARTS = (
    *("passes", "products", "attention", "prefill", "layer", "tpot", "idle", "formats", "steady", "experts"),
    *("server", "transformers"),
)
KS = "0,1,2,3,5,auto"
CONCURRENCY = "1,4,16,64,128,256" if ON_GPU else "1,2"
POINT_SECONDS = 28.0
"""Seconds of a measurement of `steady` after which no more requests are added."""
MAX_MODEL_LEN = 4096 if ON_GPU else 32
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
    "steady": "InstructCoder, K = 0: 58 811 2380 3459 4164 tokens/s at 1 16 64 128 256 where each arrival has its own "
    "pass; docs/benchmarks.md has what is predicted since chunks ride along; best K 2 at 64, 1 from 128 on",
    "prefill": "a second of 128k at 32 rows: 1.2 ms if the context is split at the bandwidth of a copy, 2.3 without",
    "layer": "64 requests, K = 5: 0.61 ms of products at 620 TFLOP/s, 0.04 of norms, SwiGLU and rotation",
    "experts": "Qwen3-30B-A3B: 3.3 ms for 1 row, 7.1 for 6, from the times of products alone",
    "transformers_ratio": "8 at K = 5: about 180 ms an iteration, bound by the host",
}
"""Predictions for one H200 in bf16, each written down before it was measured."""


def main() -> int:
    """Measure the requested parts and write the file after each, so that an interrupted run keeps its results. Return
    the exit code, 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benches/results"))
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--target", default="qwen3-32b")
    parser.add_argument("--draft", default="qwen3-1.7b")
    parser.add_argument("--commit", default=git("rev-parse", "--short", "HEAD"), help="where git is not at hand")
    parser.add_argument("--k", default=KS, help="of `steady`, in this order")
    parser.add_argument("--concurrency", default=CONCURRENCY, help="of `steady`")
    parser.add_argument("--data", default="instructcoder", help=f"acceptance rates of `steady`: of {', '.join(RATES)}")
    arguments = parser.parse_args()
    asked = arguments.only.split(",")
    if unknown := set(asked) - set(PARTS):
        parser.error(f"--only={','.join(sorted(unknown))}: must be of {', '.join(PARTS)}")
    if not ON_GPU and arguments.target != "tiny":
        parser.error("there is no CUDA device; without one only --target tiny --draft tiny can be tried")
    if not ON_GPU:
        pretend()
    if unknown := set(arguments.data.split(",")) - set(RATES):
        parser.error(f"--data={','.join(sorted(unknown))}: must be of {', '.join(RATES)}")
    bench = Bench(arguments)
    for part in PARTS:
        if part in asked:
            bench.measure(part)
    print(f"written: {bench.path}")
    return int(any(part in bench.failed for part in asked))


class Bench:
    """The models, the measurements, and the file that they are written to."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        target, draft, out, commit = arguments.target, arguments.draft, arguments.out, arguments.commit
        self.ks = [k if k == "auto" else int(k) for k in arguments.k.split(",")]
        self.concurrency = [int(count) for count in arguments.concurrency.split(",")]
        self.data, self.out, self.shape = arguments.data.split(","), out, target
        self.folder = Path(tempfile.mkdtemp())
        self.target, self.draft = str(write_config(target, self.folder)), str(write_config(draft, self.folder))
        self.device = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
        self._weights: Weights | None = None
        gpu = torch.cuda.get_device_name() if ON_GPU else platform.machine()
        changed = git("status", "--porcelain", "--untracked-files=no")
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / f"{gpu.replace(' ', '_')}_{commit}_bench_gpu.json"
        before = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.found: dict[str, Any] = before | {
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
            "seconds": before.get("seconds", {}),
            "failed": before.get("failed", {}),
        }
        self.failed: dict[str, str] = self.found["failed"]

    def measure(self, part: str) -> None:
        """Run one part, and write all that is there. A part that fails leaves its error in `failed`."""
        began = time.perf_counter()
        try:
            self.write({part: getattr(self, part)()})
            self.failed.pop(part, None)
        except Exception as error:
            traceback.print_exc()
            self.failed[part] = f"{type(error).__name__}: {error}"
        self.found["seconds"][part] = round(time.perf_counter() - began, 1)
        self.write({})
        print(json.dumps({part: self.found.get(part)}, indent=2), flush=True)
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()

    def write(self, found: dict[str, Any]) -> None:
        """Add `found` to the results and write all of them, so that an interrupted run keeps its results."""
        self.found |= found
        self.path.write_text(json.dumps(self.found, indent=2) + "\n")

    @property
    def weights(self) -> Weights:
        """Return the random weights of target and draft model, made once."""
        if self._weights is None:
            self._weights = Weights(self.load(self.target), LoadedDraftModel(self.load(self.draft)))
        return self._weights

    def load(self, folder: str) -> Any:
        """Return a model of random weights."""
        dtype = "bfloat16" if ON_GPU else "float32"
        return load_model(folder, dtype=dtype, device=self.device, load_format="dummy")

    def passes(self) -> dict[str, Any]:
        """Measure single passes and iterations, without an engine."""
        settings = {} if ON_GPU else {"device": "cpu", "dtype": "float32", "block_size": 4}
        return iterations.measure(iterations.Alone(self.target, self.draft, self.weights, **settings))

    def products(self) -> dict[str, Any]:
        """Measure single matrix products and the sampling filter, without models. configs.json next to the results gets
        a table of products of many rows."""
        models = ["qwen3-32b", "qwen3-1.7b"] if ON_GPU else ["tiny"]
        return products.measure(models, self.device, self.out / "configs.json")

    def attention(self) -> dict[str, Any]:
        """Measure verification attention over long contexts."""
        return attention.measure(self.device, [2048, 32768, 131072] if ON_GPU else [32])

    def prefill(self) -> dict[str, Any]:
        """Measure attention of prompt chunks over long contexts."""
        contexts = [1024, 8192, 32768, 131072] if ON_GPU else [32]
        return attention.prefill(self.device, [32, 256, 2048] if ON_GPU else [20], contexts)

    def layer(self) -> dict[str, Any]:
        """Measure verifications of many rows by the number of layers. The difference is the cost of layers alone."""
        ks, settings = (0, 1, 2, 3, 5), {} if ON_GPU else {"device": "cpu", "dtype": "float32", "block_size": 4}
        batch, found = 64 if ON_GPU else 2, dict[str, dict[int, float]]()
        ks = ks if ON_GPU else ks[:2]
        for layers in (1, 3):
            target = self.load(str(write_config(self.shape, self.folder, layers)))
            draft = LoadedDraftModel(self.load(str(write_config(self.shape, self.folder, 1))))
            folders = [str(self.folder / f"{self.shape}-{count}") for count in (layers, 1)]
            alone = iterations.Alone(*folders, Weights(target, draft), batch=batch, **settings)
            found[f"{layers} layers, ms"] = {batch * (k + 1): alone.batch_pass(k) for k in ks}
        one, three = found["1 layers, ms"], found["3 layers, ms"]
        return found | {"a layer, ms": {rows: (three[rows] - one[rows]) / 2 for rows in one}}

    def formats(self) -> dict[str, Any]:
        """Measure the target quantized in every format, with the bf16 draft."""
        settings = {} if ON_GPU else {"device": "cpu", "dtype": "float32", "block_size": 4}
        found = {}
        for kind in formats.CODINGS:
            weights = Weights(formats.quantized(self.weights.target, kind), self.weights.drafter)
            found[kind] = formats.measure(self.target, self.draft, weights, **settings)
            self.write({"formats": found})
        return found

    def experts(self) -> dict[str, Any]:
        """Measure a mixture of experts with the bf16 draft. The dense target is removed from the GPU before."""
        settings = {} if ON_GPU else {"device": "cpu", "dtype": "float32", "block_size": 4}
        drafter, self._weights = self.weights.drafter, None
        gc.collect()
        target = str(write_config("qwen3-30b-a3b" if ON_GPU else "tiny-experts", self.folder))
        weights = Weights(self.load(target), drafter)
        return {Path(target).name: formats.measure(target, self.draft, weights, **settings)}

    def tpot(self) -> dict[str, Any]:
        """Measure one request alone at K = 5 and K = 0, and how the time of its steps is spent."""
        found = {}
        context, tokens = (1024, 600) if ON_GPU else (6, 4)
        for k in (5, 0):
            fields = {"max_num_seqs": 1, "max_model_len": 2 * context + tokens}
            engine = serving.make_engine(self.target, self.draft, self.weights, k, **fields)
            found[f"k{k}"] = serving.tpot(engine, context, tokens)
            found[f"k{k}"]["steps"] = serving.step_times(engine, 1, context, tokens)
            found[f"k{k}"]["clocks"] = clocks()
            release(engine)
        found["speedup"] = {"k5": found["k0"]["tpot_ms"] / found["k5"]["tpot_ms"]}
        return found

    def idle(self) -> dict[str, Any]:
        """Measure how the time of a step is spent, and the GPU's idle time between steps."""
        sizes = (1, 64) if ON_GPU else (1,)
        fields = {"max_num_seqs": max(sizes), "max_model_len": 512 if ON_GPU else 32}
        engine = serving.make_engine(self.target, self.draft, self.weights, 5, **fields)
        found = {str(batch): serving.step_times(engine, batch) for batch in sizes}
        release(engine)
        return found

    def steady(self) -> dict[str, Any]:
        """Measure tokens per second by K and concurrency in a closed loop, 150 tokens in and 200 out, with default
        settings.

        Adds to what the file has, so that several commands can share the values of K.
        """
        found: dict[str, Any] = self.found.get("steady", {})
        fields = {"max_model_len": MAX_MODEL_LEN} | ({} if ON_GPU else {"max_num_seqs": 4})
        for data in self.data:
            for k in self.ks:
                began = time.perf_counter()
                engine = serving.make_engine(self.target, self.draft, self.weights, k, data=data, **fields)
                cells = found.setdefault(data, {})[k if k == "auto" else f"k{k}"] = {}
                cells["start_seconds"] = round(time.perf_counter() - began, 1)
                for count in self.concurrency:
                    cells[str(count)] = steady(engine, count, POINT_SECONDS)
                    self.write({"steady": found})
                release(engine)
        return found

    def server(self) -> dict[str, Any]:
        """Measure a server of the bundled pair under load."""
        return self._script("server.py", str(self.out))

    def transformers(self) -> dict[str, Any]:
        """Measure transformers' assisted generation."""
        k, context, tokens = (5, 1024, 40) if ON_GPU else (2, 6, 8)
        arguments = map(str, (k, context, tokens))
        found = self._script("transformers_assisted.py", self.target, self.draft, *arguments)
        whole = self.found.get("passes", {}).get("whole_ms", {})
        ours = whole.get(k, whole.get(str(k)))  # the keys are strings if another command measured them
        return found | ({"ratio": found["ms_per_iteration"] / ours} if ours and "error" not in found else {})

    def _script(self, name: str, *arguments: str) -> dict[str, Any]:
        """Run a script in a process of its own, and return what it prints; our weights leave the GPU before."""
        self._weights = None
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()
        command = [sys.executable, str(Path(__file__).parent / "gpu" / name), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-3:]}
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found


def release(engine: Any) -> None:
    """Give the engine's KV pool and graphs back before the next one sizes its own."""
    engine.runner = engine.ring = None
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def git(*arguments: str) -> str:
    """Return git's output; `unknown` outside a repository, or without git."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        )
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


if __name__ == "__main__":
    sys.exit(main())
