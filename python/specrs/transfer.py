"""Copies small host tensors to the device, and back, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return `values` on `device`. On a GPU the copy is enqueued from page-locked memory and not waited for. On a CPU
    it is `values` itself.

    A copy from pageable memory would make the stream wait for every step in flight.
    """
    if device.type == values.device.type:
        return values
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """Return a page-locked host tensor, and enqueue a copy of `values` into it on the current stream. Read the tensor
    only after a later event of that stream. A tensor on the CPU is returned as it is."""
    if not values.is_cuda:
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
