"""Sets the number of torch's threads in a command's process. Native passes have threads of their own
(`specrs.backends.cpu.threads`)."""

from __future__ import annotations

import os
import sys

from specrs.errors import InvalidConfigError, check_int


def set_torch_threads(threads: int | None, *, bundled: bool) -> None:
    """Set the number of threads that torch will use if the command imports it. Imports nothing.

    The number is `threads`, the value of --threads. If it is None, it is 1 for the bundled pair, unless OMP_NUM_THREADS
    is set; other models keep torch's own choice. If torch is not imported yet, this sets OMP_NUM_THREADS, which torch
    reads at import.

    A torch pass of the pair takes a few milliseconds in hundreds of operations. A second thread gains little there. If
    another program occupies its core, each operation waits for it, and the pass takes ten times as long.

    Raises `InvalidConfigError` for less than one thread.
    """
    if threads is not None:
        check_int(InvalidConfigError, "--threads", threads, 1)
    elif bundled and "OMP_NUM_THREADS" not in os.environ:
        threads = 1
    else:
        return
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
    else:
        os.environ["OMP_NUM_THREADS"] = str(threads)
