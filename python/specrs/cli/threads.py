"""How many threads torch takes in a command's process. The native pass's are the engine's (`specrs.engine.threads`)."""

from __future__ import annotations

import os

from specrs.errors import InvalidConfigError, check_int


def set_torch_threads(threads: int | None, *, bundled: bool) -> None:
    """Give torch the number of --threads. Without one, the bundled pair has one thread, unless OMP_NUM_THREADS is set;
    other models keep torch's own choice.

    A pass of the pair takes a few milliseconds in hundreds of operations. A second thread gains little there, and
    where another program holds its core, each operation waits for it: then it costs a factor of ten and more.

    Raises `InvalidConfigError` for less than one thread.
    """
    if threads is not None:
        check_int(InvalidConfigError, "--threads", threads, 1)
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    elif bundled and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
