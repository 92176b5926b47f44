"""Launches a kernel directly, not through its op. Holds no tests."""

from collections.abc import Callable
from typing import Any

import torch
from gpu_shuttle import shuttle

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Device that kernels run on: compiled on a GPU, else interpreted on the CPU."""


def directly(launch: Callable[..., object], *arguments: Any) -> None:
    """Call `launch(*arguments)` with its tensors on `DEVICE`, then copy back what it wrote. Tuples become lists."""
    shuttle(launch, DEVICE)(*arguments)
