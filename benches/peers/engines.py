"""Starts each engine: its environment, the model in its format, and what it cannot run. Measures nothing itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specrs.backends.cpu.threads import usable_processors
from specrs.pair import DRAFT, HYBRID, TARGET

from peers import machine
from peers.job import Job
from peers.settings import FILES, INT4, Line, Setting

MODULES = {
    "specrs": "run_specrs",
    "llama.cpp": "run_llama_cpp",
    "openvino": "run_openvino",
    "vllm": "run_vllm",
    "transformers": "run_transformers",
}
ENVIRONMENTS = {"llama.cpp": "venv-tf", "openvino": "venv-ov", "vllm": "venv-vllm", "transformers": "venv-tf"}
CHECKPOINTS = {
    "smollm2-135m": "smollm2-135m-bf16",
    "qwen3-0.6b-shape": "qwen3-0.6b-shape",
    "gemma3-270m": "gguf/gemma3-270m-q4_k_m.gguf",
}
TCMALLOC = "libtcmalloc_minimal.so.4"


def python(engine: str, peers: Path) -> Path:
    """Return the interpreter of the engine's environment; for specrs, this one."""
    return Path(sys.executable) if engine == "specrs" else peers / ENVIRONMENTS[engine] / "bin/python"


def checkpoint(model: str, peers: Path, fp32_weights: bool = False) -> Path:
    """Return the path of a model of the benchmarks by its short name, such as `pair-target` or `gemma3-270m`.

    It is a bundled folder, or a folder or GGUF file in `peers`/models, as `CHECKPOINTS` lists it. With `fp32_weights`
    it is the folder of the bundled model's copy with fp32 weights. Does not check that the path exists. Without
    `fp32_weights`, raises KeyError for a name that is not listed.
    """
    if fp32_weights:
        return peers / f"models/pair-fp32-{model.removeprefix('pair-')}"
    bundled = {"pair-target": TARGET, "pair-draft": DRAFT, "pair-hybrid": HYBRID}
    return bundled[model] if model in bundled else peers / "models" / CHECKPOINTS[model]


def model_path(line: Line, model: str, peers: Path) -> Path:
    """Return the path of the model, in the format that the case's engine loads."""
    if line.dtype in FILES:
        return peers / f"models/gguf/{model}-{line.dtype}.gguf"
    if line.dtype == INT4:
        return peers / f"models/openvino/{model}-int4"
    if line.engine == "llama.cpp":
        return peers / f"models/gguf/{model}-{'f32' if line.dtype == 'float32' else 'bf16'}.gguf"
    if line.engine == "openvino":
        return peers / "models/openvino" / model
    return checkpoint(model, peers, line.fp32_weights)


def missing(line: Line, setting: Setting, peers: Path) -> str | None:
    """Return the reason why the case `line` cannot run here; None if it can."""
    if line.engine == "transformers" and line.k and setting.batch > 1:
        return "assisted generation takes one request at a time"
    if line.cpu_prefill == "amx" and not machine.has_tiles():
        return "this processor has no tiles"
    if (usable := len(usable_processors())) < setting.threads:
        return f"this process may use {usable} processor{'s' * (usable > 1)}"
    needed = [python(line.engine, peers), model_path(line, setting.target, peers)]
    if line.engine == "llama.cpp":
        needed.append(peers / "llama-build/bin/llama-server")
    if line.k and setting.draft:
        needed.append(model_path(line, setting.draft, peers))
    absent = [path for path in needed if not path.exists()]
    return f"not installed: FOLDER/{absent[0].relative_to(peers)}" if absent else None


def environment(line: Line, setting: Setting, peers: Path) -> dict[str, str]:
    """Return the environment variables of the engine's process."""
    found = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_PRELOAD")}
    paths = [str(Path(__file__).parents[1])]
    if line.engine == "specrs" and "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    found |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(setting.threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if line.engine == "vllm":
        processors = sorted(usable_processors())[: setting.threads]
        preloaded = [*Path("/usr/lib").glob(f"*/{TCMALLOC}"), *(peers / "venv-vllm/lib").glob("libiomp5.so")]
        found |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_CACHE_ROOT": str(peers / "vllm-cache"),
            "LD_PRELOAD": os.pathsep.join(map(str, preloaded)),
        }
    return found


def run(line: Line, setting: Setting, peers: Path, prompts: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run one process. Return what it wrote (see `peers.job.measure`), or `error` with its last output.

    `prompts`: `warm` and `groups`.
    """
    job = Job(
        model=str(model_path(line, setting.target, peers)),
        draft=str(model_path(line, setting.draft, peers)) if line.k and setting.draft else None,
        k=line.k,
        dtype=line.dtype,
        threads=setting.threads,
        batch=setting.batch,
        new_tokens=setting.new_tokens,
        sampled=line.sampled,
        peers=str(peers),
        cpu_prefill=line.cpu_prefill,
        method=line.method,
        **prompts,
    )
    with tempfile.TemporaryDirectory() as folder:
        given, result, log = (Path(folder) / name for name in ("job.json", "result.json", "log.txt"))
        given.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [str(python(line.engine, peers)), "-m", f"peers.{MODULES[line.engine]}", str(given), str(result)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment(line, setting, peers),
                cwd=folder,
                start_new_session=True,
            )
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return {"error": f"took more than {timeout_s:.0f} s"}
            finally:
                end(process)
        if status == 0 and result.exists():
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return found
        words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        return {"error": f"exit status {status}: {words[-1].replace(str(peers), 'FOLDER')}"}


def end(process: subprocess.Popen[bytes]) -> None:
    """End every process of the session that still runs, also a server that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
