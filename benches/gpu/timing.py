"""Times of enqueued work: graphs, or single calls without a GPU (to try the scripts). Decides nothing."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from specrs.backends.table import BACKENDS
from specrs.engine import plan

ON_GPU = torch.cuda.is_available()


def pretend() -> None:
    """Without a GPU, make the CUDA runner run on the CPU, with interpreted kernels as in tests."""
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    import quick_interpreter

    quick_interpreter.install()
    torch.set_num_threads(1)
    plan.backend_of = lambda _device: BACKENDS["cuda"]


def synchronize() -> None:
    """Wait for the device."""
    if ON_GPU:
        torch.cuda.synchronize()


def clocks() -> dict[str, float]:
    """Return the GPU's clocks in MHz and its power in watts now, as nvidia-smi reports them; empty without it."""
    fields = ("clocks.sm", "clocks.mem", "power.draw")
    if not ON_GPU or shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", "0"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.split(",")
    return dict(zip(fields, map(float, found), strict=True)) if len(found) == len(fields) else {}


def graphed(function: Callable[[], None]) -> Callable[[], None]:
    """Return `function` as a graph's replay, after two eager runs."""
    function()
    function()
    synchronize()
    if not ON_GPU:
        return function
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def milliseconds(
    function: Callable[[], None], *, repeats: int = 5, calls: int = 20, before: Callable[[], None] | None = None
) -> float:
    """Median over `repeats` of the time of one call, at most `calls` and 100 ms back to back; `before` runs ahead
    of a repeat."""
    if not ON_GPU:
        repeats = calls = 1
    else:
        if before is not None:
            before()
        synchronize()
        began = time.perf_counter()
        function()
        synchronize()
        calls = max(1, min(calls, round(0.1 / (time.perf_counter() - began))))
    times = []
    for _ in range(repeats):
        if before is not None:
            before()
        synchronize()
        if ON_GPU:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / calls)
        else:
            began = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)
