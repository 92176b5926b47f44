"""How many threads torch takes for the bundled pair. Other models keep torch's own choice."""

from __future__ import annotations

import os


def few_threads() -> None:
    """One thread, unless OMP_NUM_THREADS says otherwise.

    A pass of the pair takes a few milliseconds in hundreds of operations. A second thread gains little there, and
    where another program holds its core, each operation waits for it: then it costs a factor of ten and more.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
