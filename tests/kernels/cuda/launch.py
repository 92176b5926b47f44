"""A kernel launched by a test itself, not through its op. Holds no tests."""

from collections.abc import Callable
from typing import Any

import torch
from gpu_shuttle import shuttle

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where kernels run: compiled on a GPU, else interpreted."""


def directly(launch: Callable[..., object], *arguments: Any) -> None:
    """Call `launch(*arguments)` with their tensors where kernels run; what it writes is in `arguments` afterwards.
    Tuples among them become lists."""
    shuttle(launch, DEVICE)(*arguments)
