"""Zero-dimensional tensors for the constants of element-wise operations. No kernel."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=1024)
def scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `value` as a cached zero-dimensional tensor. Torch would wrap a Python number at every call, which takes
    1.4 us, as long as the operation itself."""
    return torch.tensor(value, dtype=dtype, device=device)
