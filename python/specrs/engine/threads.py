"""How many threads the native pass of a CPU takes. Starts none."""

from __future__ import annotations

import os
from pathlib import Path

from specrs.config import EngineConfig
from specrs.errors import InvalidConfigError, check_int

VARIABLE = "SPECRS_NUM_THREADS"
_TOPOLOGY = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
CACHE_BYTES = 24 << 20
"""Weights of up to so many bytes live in a cache: what a second thread saves there, waiting for each other takes, and
beside another program it costs a factor."""


def resolve_threads(config: EngineConfig, weight_bytes: int) -> int:
    """Threads of an engine: `threads`, else SPECRS_NUM_THREADS, else the physical cores that this process may use, and
    one for weights of at most `CACHE_BYTES`.

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
    return 1 if weight_bytes <= CACHE_BYTES else physical_cores()


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
