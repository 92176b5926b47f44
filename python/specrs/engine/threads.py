"""How many threads the native pass of a CPU takes. Starts some to measure, and ends them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from specrs.config import EngineConfig
from specrs.core import CpuPool
from specrs.errors import InvalidConfigError, check_int
from specrs.models.dense_native import NativeDense
from specrs.models.inputs import PassInputs

VARIABLE = "SPECRS_NUM_THREADS"
_TOPOLOGY = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
CACHE_BYTES = 64 << 20
"""Weights of up to so many bytes may live in a cache, where one thread may be as fast as several, which wait for each
other at every product, and beside another program much faster."""
_WORTH = 0.8
"""Of one thread's time, what more threads may take at most to be worth their cores."""
_PASSES = 5
"""Measured with each number of threads; the fastest counts, because noise only adds to it."""


def choose_threads(config: EngineConfig, models: Sequence[NativeDense]) -> int:
    """Threads of an engine: `threads`, else SPECRS_NUM_THREADS, else the physical cores that this process may use. For
    weights that may live in a cache passes are measured, some milliseconds, and it is one unless more are worth it.

    Raises:
        InvalidConfigError: there are fewer processors for this process, or the number is none.
    """
    most = len(usable_processors())
    if config.threads is not None:
        return check_int(InvalidConfigError, "threads", config.threads, 1, most, also=_because(most))
    given = os.environ.get(VARIABLE)
    if given is not None:
        number: object = int(given) if given.strip().isdecimal() else given
        return check_int(InvalidConfigError, VARIABLE, number, 1, most, also=_because(most))
    cores = physical_cores()
    if cores == 1 or sum(model.num_bytes for model in models) > CACHE_BYTES:
        return cores
    return cores if pass_seconds(models[0], cores) < _WORTH * pass_seconds(models[0], 1) else 1


def pass_seconds(model: NativeDense, threads: int) -> float:
    """What a pass of one row takes, after a first one that finds the weights."""
    pool = CpuPool(threads)
    measured, cache = model.on_pool(pool), model.allocate_cache(1, 1)
    zero, one = torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1])
    inputs = PassInputs(zero, zero, zero, one, zero[None], max_q_len=1, max_context=1)
    times = []
    for _ in range(1 + _PASSES):
        begun = time.perf_counter()
        measured.compute_logits(measured.forward(inputs, cache).final)
        times.append(time.perf_counter() - begun)
    pool.close()
    return min(times[1:])


def usable_processors() -> set[int]:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Cores among them, siblings counted once, and no more than a control group's quota pays for."""
    siblings = set()
    for processor in usable_processors():
        try:
            siblings.add((_TOPOLOGY / f"cpu{processor}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(processor))
    return max(1, min(len(siblings), _quota()))


def _quota() -> int:
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # none is set, or there are no control groups
        return 1 << 16


def _because(most: int) -> str:
    return f": this process may use {most} processor{'s' if most > 1 else ''}"
