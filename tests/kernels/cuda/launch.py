"""A kernel launched by a test itself, not through its op. Holds no tests."""

from collections.abc import Callable

import torch
from gpu_shuttle import shuttle
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where kernels run: compiled on a GPU, else interpreted."""


def directly(launch: Callable[..., object], *tensors: Tensor) -> None:
    """Call `launch(*tensors)` with the tensors where kernels run; what it writes is in `tensors` afterwards."""
    shuttle(launch, DEVICE)(*tensors)
