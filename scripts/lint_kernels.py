"""Compile the kernels of real passes as they are launched on an H200, without a GPU, and look for faults in them.

    python scripts/lint_kernels.py                  passes of 1, 6, 32 and 64 rows by Qwen3-32B, of 1 by 1.7B, with KV
                                                    caches of bf16 and of e4m3, and with slots for LoRA adapters
    python scripts/lint_kernels.py --only skinny    only kernels whose name has this in it

Faults are those of `kernel_lints`: memory accesses ahead of the dependent wait, results handed on without release or
acquire, loops that load and multiply in turn, programs that do not fit a multiprocessor. What is known and accepted is
listed here with its reason. Exit code 1 names every other fault. Measures no time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kernel_lints import (
    EARLY,
    TTGIR,
    early_accesses,
    machine_order,
    occupancy,
    pipelines,
    shared_results,
    starts_next_early,
)

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
CAPABILITY = 90
ROWS = (1, 6, 32, 64)
ACCEPTED = {
    ("paged_attention_kernel BLOCK_M=64 ", "waits for all copies"): "Wide tiles of requests of at most 4,096 positions "
    "have one step ahead: a second unrolls the loop's start, which a short context pays for. Measured, see "
    "docs/decisions/cuda.md.",
}
"""(kernel, fault), both as patterns -> why it stays."""


def recorded_launches() -> dict[tuple[Any, ...], Any]:
    """Return every specialisation that passes of the reference models launch, by its key."""
    import torch
    from kernel_launches import fake_context, reference_configs

    found: dict[tuple[Any, ...], Any] = {}
    for cache_dtype, max_loras in ((torch.bfloat16, 0), (torch.float8_e4m3fn, 0), (torch.bfloat16, 4)):
        with (
            tempfile.TemporaryDirectory() as folder,
            fake_context(*reference_configs(Path(folder)), 5, cache_dtype=cache_dtype, max_loras=max_loras) as ctx,
        ):
            launches = _launches_of(ctx)
            for launch, after in zip(launches, [*launches[1:], None], strict=True):
                found.setdefault(launch.key(), launch)
                if after is not None and after.name == "paged_attention_kernel":
                    _AHEAD.add(launch.key())
    return found


def _launches_of(ctx: Any) -> list[Any]:
    """Record the kernel launches of the passes of one engine."""
    from kernel_launches import Recorder
    from specrs.backends.cuda import drafting, iteration
    from specrs.backends.cuda.shapes import LogitsMode

    with Recorder() as recorder:
        for rows in ROWS:
            # Whole requests of six rows where there are so many, as K = 5 has them.
            batch = max(1, rows // 6)
            iteration.verify_pass(ctx, batch, rows, min(rows, 6), greedy=True)
        drafting.draft_pass(ctx, 2, 1, LogitsMode.GREEDY)
    return recorder.launches


def lint(job: tuple[str, int]) -> tuple[str, list[str]]:
    """Return the faults of the `job[1]`th launch, with a name for it."""
    _, index = job
    from kernel_launches import H200, compiled

    launch = list(_launches().values())[index]
    kernel = compiled(launch, CAPABILITY)
    label = f"{launch.name} {_shape_of(launch)}"
    ir = TTGIR(kernel.asm["ttgir"])
    faults = shared_results(ir) + pipelines(ir)
    tool = _tool("cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = [subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
                   for option in ("-sass", "-res-usage")]  # fmt: skip
    if launch.settings.get("launch_pdl"):
        allowed = EARLY.get(launch.name, frozenset())
        early = early_accesses(launch.name, ir)
        faults += early
        faults += starts_next_early(ir) if launch.key() in _AHEAD else []
        waits = kernel.asm["ptx"].partition("griddepcontrol.wait")[0]
        loads = len(re.findall(r"\bld\.global", waits)) if allowed else 0
        ordered = any("acq_rel" in line for line in ir.lines)
        faults += machine_order(launch.name, listing[0], loads, ordered)
    registers = int(re.findall(r"REG:(\d+)", listing[1])[0])
    programs = 1
    for size in launch.grid:
        programs *= size
    if launch.arguments.get("PER_SPLIT", 1) > 1:
        # Such splits are for long contexts; the programs of splits that a context has not end immediately.
        programs //= launch.arguments["SPLITS"]
    threads = 32 * kernel.metadata.num_warps
    faults += occupancy(programs, H200.num_sms, threads, registers, kernel.metadata.shared)
    return label, [fault for fault in faults if not _accepted(label, fault)]


def _accepted(label: str, fault: str) -> bool:
    return any(re.match(kernel, label) and re.search(pattern, fault) for kernel, pattern in ACCEPTED)


def _shape_of(launch: Any) -> str:
    names = ("N", "K", "BLOCK_M", "SPLITS", "ROWS", "GATED", "FRACTION")
    return " ".join(f"{name}={launch.arguments[name]}" for name in names if name in launch.arguments)


def _tool(name: str) -> Path:
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin" / name


_CACHE: dict[tuple[Any, ...], Any] = {}
_AHEAD: set[tuple[Any, ...]] = set()
"""Launches right ahead of attention, which reads where rows are before it waits."""


def _launches() -> dict[tuple[Any, ...], Any]:
    if not _CACHE:
        _CACHE.update(recorded_launches())
    return _CACHE


def main() -> int:
    """Compile the kernels, report faults in them, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only kernels whose name has TEXT in it")
    parser.add_argument("--jobs", type=int, default=2, help="processes; default: 2")
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    launches = _launches()
    work = [(launch.name, i) for i, launch in enumerate(launches.values()) if arguments.only in launch.name]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        # Forked: the launches are there, and nothing of CUDA is.
        with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
            found = pool.map(lint, work, chunksize=1)
    problems = [f"{label}: {fault}" for label, faults in found for fault in faults]
    for problem in problems:
        print(problem)
    print(f"{len(work)} kernels of real passes, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
