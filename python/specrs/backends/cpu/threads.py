"""Chooses the number of threads of an engine on a CPU, by measuring if that is worth it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specrs.config import EngineConfig
from specrs.errors import InvalidConfigError, check_int
from specrs.instruction_sets import start_pool
from specrs.models.native_decoder import NativeDecoder
from specrs.parallel.start import ranks_here

VARIABLE = "SPECRS_NUM_THREADS"
_TOPOLOGY = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
CACHE_BYTES = 64 << 20
"""Largest model, in bytes of its matrices, for which passes are measured with one and with several threads. The weights
of such a model may stay in a cache. Then one thread may be as fast as several, because threads wait for each other at
every product."""
_WORTH = 0.8
"""Ratio of a pass's time with several threads to its time with one. Several threads are used if the ratio is less than
this."""
_PASSES = 5
"""Number of passes measured with each number of threads. The fastest pass counts, because noise only adds time."""


def choose_threads(config: EngineConfig, models: Sequence[NativeDecoder]) -> int:
    """Return the number of threads of an engine: `threads`, else SPECRS_NUM_THREADS, else physical cores or 1.

    The cores are those that this process may use. Models of at most 64 MB may live in a cache: for these, passes are
    measured for some milliseconds, and the number is 1 unless more threads are worth it.

    Raises:
        InvalidConfigError: the number is below 1, or above the processors that this process may use.
        InvalidBufferError: `cpu_activations="bf16"` with weights that do not allow it.
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
    many, one = (pass_seconds(models[0], number, activations=config.cpu_activations) for number in (cores, 1))
    return cores if many < _WORTH * one else 1


def pass_seconds(model: NativeDecoder, threads: int, *, activations: str = "auto") -> float:
    """Return the seconds of a decode pass of one sequence on `threads` threads, logits included.

    This is the least of five passes after one that warms up. The pass feeds token 0 at position 0, with a block of its
    own in each KV group. The threads end before this returns.
    """
    pool = start_pool(threads)
    try:
        measured = model.on_pool(pool, activations=activations)
        groups = 1 if model.kv_groups is None else len(model.kv_groups.windows)
        cache = measured.allocate_cache(groups, 1).native
        one = np.zeros(1, dtype=np.int64)
        blocks = np.arange(groups, dtype=np.int64)  # also the slots, because a block holds one position
        hidden = np.empty((1, model.config.hidden_size), dtype=np.float32)
        logits = np.empty((1, model.vocab_size), dtype=np.float32)
        times = []
        for _ in range(1 + _PASSES):
            begun = time.perf_counter()
            measured.decoder.forward(
                one,
                one,
                blocks[:1],
                np.array([0, 1]),
                blocks[:1, None],
                cache,
                hidden,
                group_slots=blocks[1:, None] if groups > 1 else None,
                group_tables=blocks[1:, None, None] if groups > 1 else None,
            )
            measured.decoder.logits(hidden, logits)
            times.append(time.perf_counter() - begun)
    finally:
        pool.close()
    return min(times[1:])


def usable_processors() -> set[int]:
    """Return the numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Return the number of physical cores that this process may use, at least 1.

    Processors of one core count once. The quota of a control group is an upper bound.
    """
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


def threads_of_rank(config: EngineConfig) -> int:
    """Return the number of threads of a rank, for torch and for native passes.

    It is `threads`, SPECRS_NUM_THREADS or OMP_NUM_THREADS, else the rank's share of this machine's cores.
    """
    for given in (config.threads, os.environ.get(VARIABLE), os.environ.get("OMP_NUM_THREADS")):
        if isinstance(given, int) or (given is not None and given.strip().isdecimal()):
            return max(1, int(given))
    return max(1, physical_cores() // ranks_here(config.tensor_parallel_size))
