"""Compiles kernels ahead of time, in processes that touch no GPU, into Triton's cache, where later launches find them.
Launches none.

Such a process tells Triton for which device to compile. It runs the code of a launch with `compile_only`, on tensors of
torch's device `meta`. So types, alignments, constants and options are those of the real launch, and so is the key of
the cache.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

Job = TypeVar("Job")
_LINE = 200
"""Maximum number of characters of an error that are kept. A compiler's error may contain the whole kernel."""


class NamedDevice:
    """Driver for Triton that names a GPU to compile for, which need not be present."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        """Return the target to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Return 0: there is one device."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """Return 0, the default stream."""
        return 0


def compile_ahead(
    compile_one: Callable[[Job], Any], jobs: Iterable[Job], target: GPUTarget, processes: int
) -> Iterator[tuple[Job, str | None]]:
    """Call `compile_one` on every job in `processes` processes. Yield each job when it ends, with None or its error.

    Jobs are started in order from the first call of `next` on, and run while the caller does something else. If a job
    ends its process, as an assertion of LLVM does, that is the job's error, and the others get a new process.
    `compile_one` and jobs must be picklable. The processes end with the iterator.
    """
    waiting, ended = deque(jobs), queue.SimpleQueue[tuple[Job, str | None]]()
    count = len(waiting)

    def serve() -> None:
        pool: ProcessPoolExecutor | None = None
        while waiting:
            try:
                job = waiting.popleft()
            except IndexError:  # another thread took the last one
                break
            # Spawned: a fork of a process that has used CUDA may not touch it, not even to look.
            pool = pool or ProcessPoolExecutor(1, mp_context=get_context("spawn"))
            try:
                pool.submit(_compile, compile_one, job, target).result()
                error = None
            except BrokenProcessPool:
                pool.shutdown()
                pool, error = None, "its process ended"
            except Exception as raised:  # compilers raise what they like
                error = _line_of(raised)
            ended.put((job, error))
        if pool is not None:
            pool.shutdown()

    threads = [threading.Thread(target=serve) for _ in range(min(processes, count))]
    for thread in threads:
        thread.start()
    try:
        for _ in range(count):
            yield ended.get()
    finally:
        waiting.clear()
        for thread in threads:
            thread.join()


def _compile(compile_one: Callable[[Job], Any], job: Job, target: GPUTarget) -> None:
    driver.set_active(NamedDevice(target))
    compile_one(job)


def _line_of(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:_LINE]
