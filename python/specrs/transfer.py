"""Small host values to the device without waiting for it. Knows nothing of what they mean."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` of the host on `device`; on a GPU the copy is enqueued from page-locked memory and not waited for.

    A copy from pageable memory would stall the stream behind every launch in flight. On a CPU it is `values` itself.
    """
    if device.type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """`values` in page-locked host memory, copied when the stream gets there: read it only behind a later event."""
    if values.device.type != "cuda":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
