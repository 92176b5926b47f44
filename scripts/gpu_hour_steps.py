"""The steps of an hour on a GPU machine, each under ten minutes, each writing what it finds as it goes.

    python3 run.py               every step that has not ended well yet, in order
    python3 run.py --step NAME   that one
    python3 run.py --list        their names
    python3 run.py --rehearse    each with the same commands on a CPU, small: nothing of what it says is a result

Runs in the folder that `scripts/gpu_hour` packs: the wheel is unpacked beside it, nothing is installed, built or
downloaded. Needs torch 2.11 or newer with its Triton, transformers, pytest, pytest-timeout, pytest-xdist and
hypothesis; a rehearsal with Triton 3.6 also numpy before 2.4. A step that is cut off keeps what it has in
results/NAME.log and in the files of the benches; results/steps.json says how each ended.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LIMIT = 580
"""Seconds of a step: under ten minutes, with time to write what there is."""
PYTEST = ("-m", "pytest", "-p", "no:benchmark", "-p", "no:cacheprovider", "-q")
"""pytest-benchmark warns under xdist, and here a warning is an error."""
MODULES = ("torch", "triton", "transformers", "pytest", "pytest_timeout", "xdist", "hypothesis")


@dataclass(frozen=True)
class Step:
    """One command, and the same small enough for a CPU."""

    name: str
    command: Sequence[str]
    rehearsal: Sequence[str]
    tool: str | None = None
    """A program in front of the interpreter, without which the step is left out."""
    environment: tuple[tuple[str, str], ...] = ()


def bench(parts: str) -> tuple[str, ...]:
    """Return the command line that runs these parts of benches/bench_gpu.py."""
    return ("benches/bench_gpu.py", "--out", "results", "--commit", commit(), "--only", parts)


def commit() -> str:
    """What was packed."""
    path = HERE / "COMMIT"
    return path.read_text().strip() if path.exists() else "unknown"


def steps() -> list[Step]:
    """In the order of what they show."""
    tiny = ("--target", "tiny", "--draft", "tiny")
    kernels = (*PYTEST, "tests/kernels/cuda")
    slow = "test_rejection or test_sampling_cut or test_prepare or test_update or test_draw"
    collect = (*PYTEST, "--collect-only")
    shapes = [part for name in ("qwen3-32b", "qwen3-1.7b") for part in ("--model", f"models/{name}")]
    small = ("tests/kernels/cuda/test_tolerance.py", "tests/kernels/cuda/test_lm_head.py")
    memory = ("-k", "memory")
    found = [
        Step("kernels", (*kernels, "-n", "8", "-k", f"not ({slow})"), (*PYTEST, *small)),
        Step("sampling", (*kernels, "-n", "8", "-k", slow), (*collect, "tests/kernels/cuda", "-k", slow)),
        Step("runners", (*PYTEST, "tests/gpu", "-n", "2", "-k", "not memory"), (*collect, "tests/gpu")),
        # Sized by what is free, so nothing else may run beside it.
        Step("memory", (*PYTEST, "tests/gpu", *memory), (*collect, "tests/gpu", *memory)),
        Step(
            "iterations",
            (*PYTEST, "tests/backends/test_cuda_runner.py", "tests/backends/test_cuda_drafters.py", "-n", "4"),
            (*PYTEST, "tests/backends/test_cuda_runner.py", "-k", "same_tokens and greedy"),
        ),
    ]
    groups = ("passes", "attention", "tpot,idle", "throughput", "transformers")
    found += [Step(parts.replace(",", "_"), bench(parts), (*bench(parts), *tiny)) for parts in groups]
    tune = ("-c", "import sys; from specrs.cli import main; sys.exit(main(sys.argv[1:]))", "tune", *shapes)
    table = ("--output", "results/configs.json")
    found.append(Step("tune", (*tune, *table), (*tune[:3], "--help")))
    one = ("tests/kernels/cuda/test_skinny_linear.py", "tests/kernels/cuda/test_paged_attention.py", "-x")
    caching = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
    for kind in ("memcheck", "initcheck"):
        checked = (*PYTEST, *one, "-k", "any or every")
        found.append(Step(kind, checked, (*collect, *one), f"compute-sanitizer --tool {kind}", caching))
    profiled = "ncu --set full -k regex:skinny|paged -c 40 -o results/profile"
    found.append(Step("profile", bench("passes"), (*bench("passes"), *tiny), profiled))
    return found


def lacks(*, rehearse: bool) -> str | None:
    """What keeps all steps from running here; None: nothing."""
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if rehearse and triton <= (3, 6) and numpy >= (2, 4):
        return f"numpy {version('numpy')}: the interpreter of Triton {version('triton')} needs one before 2.4"
    return None


def prepare() -> dict[str, str]:
    """Unpack the wheel, write the configurations; the environment of every step."""
    RESULTS.mkdir(exist_ok=True)
    site = HERE / "site"
    if not site.exists():
        (wheel,) = HERE.glob("specrs-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    models = HERE / "models"
    if not models.exists():
        sys.path.insert(0, str(HERE / "benches/gpu"))
        from models import write_config  # type: ignore[import-not-found]

        for name in ("qwen3-32b", "qwen3-1.7b"):
            write_config(name, models)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(site), str(HERE)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def run(step: Step, environment: dict[str, str], *, rehearse: bool) -> dict[str, object]:
    """How it ended."""
    tool = [] if rehearse or step.tool is None else step.tool.split()
    if tool and shutil.which(tool[0]) is None:
        return {"left out": f"{tool[0]} is not there"}
    command = [*tool, sys.executable, *(step.rehearsal if rehearse else step.command)]
    began = time.monotonic()
    with (RESULTS / f"{step.name}.log").open("w") as log:
        log.write(" ".join(command) + "\n")
        log.flush()
        try:
            done = subprocess.run(
                command,
                cwd=HERE,
                env=environment | dict(step.environment),
                stdout=log,
                stderr=log,
                timeout=LIMIT,
                check=False,
            )
            ended: object = done.returncode
        except subprocess.TimeoutExpired:
            ended = f"cut off after {LIMIT} s"
    return {"exit": ended, "seconds": round(time.monotonic() - began, 1), "rehearsal": rehearse}


def main() -> int:
    """Run; the exit code is 1 where a step failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    chosen = [step for step in steps() if arguments.step in (None, step.name)]
    if arguments.list or not chosen:
        print("\n".join(step.name for step in steps()))
        return 0 if arguments.list else 2
    if reason := lacks(rehearse=arguments.rehearse):
        parser.error(reason)
    environment = prepare()
    gpu = (
        {"SPECRS_GPU": "0", "TRITON_INTERPRET": "1"}
        if arguments.rehearse
        else {"SPECRS_GPU": "1", "TRITON_INTERPRET": "0"}
    )
    environment |= gpu
    path = RESULTS / "steps.json"
    ended = json.loads(path.read_text()) if path.exists() else {}
    ended["machine"] = {"python": platform.python_version(), "commit": commit()}
    for step in chosen:
        before = ended.get(step.name, {})
        if arguments.step is None and before.get("exit") == 0 and before.get("rehearsal") == arguments.rehearse:
            continue
        print(f"{step.name} ...", end=" ", flush=True)
        ended[step.name] = run(step, environment, rehearse=arguments.rehearse)
        path.write_text(json.dumps(ended, indent=2) + "\n")
        print(ended[step.name], flush=True)
    return int(any(ended[step.name].get("exit", 0) != 0 for step in chosen))


if __name__ == "__main__":
    sys.exit(main())
