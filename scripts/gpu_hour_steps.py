"""Commands for half an hour on a GPU machine. Each takes under nine minutes and writes results as it goes.

    python3 run.py COMMAND       the steps of that command, in order
    python3 run.py --list        the commands, with the seconds of each and its steps
    python3 run.py --rehearse    every command with the same steps on a CPU, small: nothing of what it says is a result
    python3 run.py COMMAND --step NAME    one of its steps

| command | decides |
| --- | --- |
| correct | is today's code right on a GPU; times of passes alone |
| kernels | products of many rows, prompt attention, where a step's time goes, a layer of 384 rows |
| baseline | throughput in a steady state at K = 0, 1 and 2 |
| drafts | the same at K = 3, 5 and auto; the server; transformers |
| h100 | instead of all, on an H100 with 80 GB: the figures that others have published for it |
| tools | if there is time: sanitizers and `specrs tune` |

Runs in the folder that `scripts/gpu_hour` packs: its wheels are unpacked beside it, nothing is installed, built or
downloaded. Needs torch 2.11 or newer with its Triton, transformers, pytest, pytest-timeout, pytest-xdist and
hypothesis; a rehearsal with Triton 3.6 also numpy before 2.4. A step that is cut off keeps what it has in
results/NAME.log and in the files of the benches; results/steps.json says how each ended. After each step all of
results/ is in results.tar.gz, and in $OUT if that is set.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
ARCHIVE = HERE / "results.tar.gz"
REHEARSAL_SECONDS = 580
"""Maximum seconds of a step of a rehearsal."""
PYTEST = ("-m", "pytest", "-p", "no:benchmark", "-p", "no:cacheprovider", "-q")
"""pytest-benchmark warns under xdist, and here a warning is an error."""
MODULES = ("torch", "triton", "transformers", "pytest", "pytest_timeout", "xdist", "hypothesis")


@dataclass(frozen=True)
class Step:
    """One command, and a small form of it for a CPU."""

    name: str
    command: Sequence[str]
    rehearsal: Sequence[str]
    tool: str | None = None
    """Program that runs the interpreter, such as a sanitizer. Without it the step is left out."""
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Command:
    """Steps that run one after the other. Together they may take `seconds`."""

    name: str
    seconds: int
    steps: Sequence[Step]


def bench(parts: str, *more: str) -> tuple[str, ...]:
    """Return the command line that runs these parts of benches/bench_gpu.py."""
    return ("benches/bench_gpu.py", "--out", "results", "--commit", commit(), "--only", parts, *more)


def measuring(name: str, parts: str, *more: str, small: Sequence[str] = ()) -> Step:
    """Return a step that measures these parts; in a rehearsal with tiny models, and `small` in place of `more`."""
    tiny = ("--target", "tiny", "--draft", "tiny")
    return Step(name, bench(parts, *more), (*bench(parts, *small), *tiny))


def commit() -> str:
    """Return the commit that was packed."""
    path = HERE / "COMMIT"
    return path.read_text().strip() if path.exists() else "unknown"


def commands() -> list[Command]:
    """Return the commands in the order of what they show."""
    kernels = (*PYTEST, "tests/kernels/cuda")
    slow = "test_rejection or test_sampling_cut or test_prepare or test_update or test_draw"
    collect = (*PYTEST, "--collect-only")
    small = ("tests/kernels/cuda/test_tolerance.py", "tests/kernels/cuda/test_lm_head.py")
    runners = [f"tests/backends/test_{name}.py" for name in ("cuda_runner", "cuda_drafters", "cuda_groups")]
    runners += [f"tests/backends/test_{name}.py" for name in ("merged_steps", "merged_chunks", "chunk_passes")]
    correct = [
        Step("tests", (*kernels, "-n", "14", "-k", f"not ({slow})"), (*PYTEST, *small)),
        Step("sampling", (*kernels, "-n", "14", "-k", slow), (*collect, "tests/kernels/cuda", "-k", slow)),
        Step("runners", (*PYTEST, "tests/gpu", "-n", "2", "-k", "not memory"), (*collect, "tests/gpu")),
        Step("iterations", (*PYTEST, *runners, "-n", "14"), (*PYTEST, *runners[:1], "-k", "same_tokens and greedy")),
        # Sized by what is free, so nothing else may run beside it.
        Step("memory", (*PYTEST, "tests/gpu", "-k", "memory"), (*collect, "tests/gpu", "-k", "memory")),
        measuring("passes", "passes"),
    ]
    profiled = "ncu --set full -k regex:nvjet|gemm|paged|norm -c 40 -o results/layer"
    layer = measuring("profile", "layer")
    times = [
        measuring("products", "products,prefill"),
        measuring("steps", "tpot,idle"),
        measuring("layer", "layer"),
        Step(layer.name, layer.command, layer.rehearsal, profiled),
    ]
    many = ("--concurrency", "1,16,64,128,256")
    baseline = [measuring("baseline", "steady", "--k", "0,1,2", *many, small=("--k", "0,1", "--concurrency", "2"))]
    drafts = [
        measuring("drafts", "steady", "--k", "3,5,auto", *many, small=("--k", "auto", "--concurrency", "2")),
        measuring("server", "server"),
        measuring("transformers", "transformers"),
    ]
    few = ("--k", "0,1,2,3,5", "--concurrency", "1,16,32", "--data", "mt-bench")
    h100 = [
        measuring("h100_passes", "passes,tpot"),
        measuring("h100_steady", "steady", *few, small=("--k", "0", "--concurrency", "1", "--data", "mt-bench")),
    ]
    shapes = [part for name in ("qwen3-32b", "qwen3-1.7b") for part in ("--model", f"models/{name}")]
    tune = (
        "-c",
        "import sys; from specrs.cli import main; sys.exit(main(sys.argv[1:]))",
        "tune",
        *shapes,
        "--only",
        "few",
    )
    one = ("tests/kernels/cuda/test_skinny_linear.py", "tests/kernels/cuda/test_paged_attention.py", "-x")
    caching = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
    checked = (*PYTEST, *one, "-k", "any or every")
    kinds = ("memcheck", "initcheck")
    tools = [Step(k, checked, (*collect, *one), f"compute-sanitizer --tool {k}", caching) for k in kinds]
    tools.append(Step("tune", (*tune, "--output", "results/configs.json"), (*tune[:3], "--help")))
    return [
        Command("correct", 420, correct),
        Command("kernels", 420, times),
        Command("baseline", 535, baseline),
        Command("drafts", 535, drafts),
        Command("h100", 360, h100),
        Command("tools", 535, tools),
    ]


def lacks(*, rehearse: bool) -> str | None:
    """Return what keeps all steps from running here; None if nothing does."""
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if rehearse and triton <= (3, 6) and numpy >= (2, 4):
        return f"numpy {version('numpy')}: the interpreter of Triton {version('triton')} needs one before 2.4"
    return None


def prepare() -> dict[str, str]:
    """Unpack the wheels and write the models' config.json files. Return the environment variables of every step."""
    RESULTS.mkdir(exist_ok=True)
    site = HERE / "site"
    if not site.exists():
        for wheel in HERE.glob("*.whl"):
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


def run(step: Step, environment: dict[str, str], seconds: float, *, rehearse: bool) -> dict[str, object]:
    """Run a step for at most `seconds`; return how it ended."""
    tool = [] if rehearse or step.tool is None else step.tool.split()
    if tool and shutil.which(tool[0]) is None:
        return {"left out": f"{tool[0]} is not there"}
    command = [*tool, sys.executable, *(step.rehearsal if rehearse else step.command)]
    began = time.monotonic()
    with (RESULTS / f"{step.name}.log").open("w") as log:
        log.write(" ".join(command) + "\n")
        log.flush()
        # A session of its own: workers of a step that is cut off would keep the GPU's memory.
        whole = environment | dict(step.environment)
        process = subprocess.Popen(command, cwd=HERE, env=whole, stdout=log, stderr=log, start_new_session=True)
        try:
            ended: object = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = f"cut off after {seconds:.1f} s"
    return {"exit": ended, "seconds": round(time.monotonic() - began, 1), "rehearsal": rehearse}


def archive() -> None:
    """Put all results into one file, and a copy of it into $OUT."""
    with tarfile.open(ARCHIVE, "w:gz") as file:
        file.add(RESULTS, "results")
    if out := os.environ.get("OUT"):
        shutil.copy(ARCHIVE, out)


def main() -> int:
    """Run, and return the exit code: 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?")
    parser.add_argument("--step")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        for command in commands():
            print(f"{command.name} ({command.seconds} s): {', '.join(step.name for step in command.steps)}")
        return 0
    chosen = [
        one for one in commands() if arguments.command == one.name or (arguments.rehearse and not arguments.command)
    ]
    steps = [step for command in chosen for step in command.steps if arguments.step in (None, step.name)]
    if not steps:
        parser.error(f"which command? {', '.join(one.name for one in commands())}; --list has their steps")
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
    end = time.monotonic() + chosen[0].seconds
    for step in steps:
        seconds = REHEARSAL_SECONDS if arguments.rehearse else max(1.0, end - time.monotonic())
        print(f"{step.name} ...", end=" ", flush=True)
        ended[step.name] = run(step, environment, seconds, rehearse=arguments.rehearse)
        path.write_text(json.dumps(ended, indent=2) + "\n")
        archive()
        print(ended[step.name], flush=True)
    return int(any(ended[step.name].get("exit", 0) != 0 for step in steps))


if __name__ == "__main__":
    sys.exit(main())
