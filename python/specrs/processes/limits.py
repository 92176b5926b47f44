"""Limits that a process sets on itself: memory, priority, time, open files. Starts nothing."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

NICENESS = 5


def restrain(memory: int, niceness: int = NICENESS) -> None:
    """Limit this process to `memory` bytes of address space, and lower its priority by `niceness`. Does nothing on
    systems without such limits."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not every system has them
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(AttributeError, OSError):
        os.nice(niceness)


def allow_open_files(number: int) -> int | None:
    """Let this process open `number` files and sockets, as far as the system allows. Return the limit that now holds.

    None if the system has no such limit.
    """
    try:
        import resource
    except ImportError:  # not every system has it
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    if soft >= number:
        return soft
    raised = number if hard == resource.RLIM_INFINITY else min(number, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    except (OSError, ValueError):  # a system may allow less than it says
        return soft
    return raised


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """End this process if the context takes longer than `seconds`. The parent would kill it, but may have been killed
    itself."""
    timer = getattr(signal, "setitimer", None)  # not every system has it
    if timer is not None:
        timer(signal.ITIMER_REAL, seconds)
    yield
    if timer is not None:
        timer(signal.ITIMER_REAL, 0)
