"""Limits of a device on which kernel configurations depend. Reads only torch's device properties."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits of a device that decide the choice of tile shapes."""

    name: str
    """torch's name of the device, which is the key of the table of configurations."""
    capability: int
    """Compute capability times ten: 90 is 9.0."""
    num_sms: int
    shared_memory: int
    """Maximum bytes of shared memory of one thread block."""


INTERPRETER = DeviceLimits("interpreter", 0, 3, 99 * 1024)
"""Limits for Triton's interpreter. There are few multiprocessors, because each program takes a millisecond, but more
than one, so that partial sums are combined."""
ABSENT = DeviceLimits("absent", 80, 132, 99 * 1024)
"""Limits for a CUDA device that is only named and not present, as with fake tensors."""


@lru_cache(maxsize=16)
def limits_of(device: torch.device) -> DeviceLimits:
    """Return the limits of `device`. Launches nothing on it."""
    if device.type != "cuda":
        return INTERPRETER
    if not torch.cuda.is_available():
        return ABSENT
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        name=properties.name,
        capability=10 * properties.major + properties.minor,
        num_sms=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
    )
