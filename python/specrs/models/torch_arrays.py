"""Conversions between NumPy arrays and torch tensors that share memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specrs.arrays import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, FLOAT64, Array, bits

TORCH_DTYPES: dict[np.dtype[np.generic], torch.dtype] = {
    FLOAT32: torch.float32,
    FLOAT64: torch.float64,
    FLOAT16: torch.float16,
    BFLOAT16: torch.bfloat16,
    FLOAT8_E4M3: torch.float8_e4m3fn,
    FLOAT8_E5M2: torch.float8_e5m2,
}
"""torch dtype of each floating-point NumPy dtype."""

NUMPY_DTYPES = {theirs: ours for ours, theirs in TORCH_DTYPES.items()}
"""NumPy dtype of each floating-point torch dtype."""


def to_torch(array: Array) -> Tensor:
    """Return a tensor over the memory of `array`. Read-only arrays are allowed if the tensor is never written to."""
    tensor = torch.from_numpy(bits(array))
    wanted = TORCH_DTYPES.get(array.dtype)
    return tensor if wanted is None or wanted == tensor.dtype else tensor.view(wanted)


def to_numpy(tensor: Tensor) -> Array:
    """Return an array over the memory of `tensor`, which must be on the CPU."""
    ours = NUMPY_DTYPES.get(tensor.dtype)
    if ours is None or ours in (FLOAT32, FLOAT64, FLOAT16):
        return tensor.numpy()
    return tensor.view(torch.uint16 if ours == BFLOAT16 else torch.uint8).numpy().view(ours)
