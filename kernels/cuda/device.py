"""What the kernel configurations depend on of a device. Looks nothing up but torch's device properties."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """A device as the choice of tile shapes sees it."""

    name: str
    """As torch names it, and as the table of configurations is keyed."""
    capability: int
    """Compute capability times ten: 90 is 9.0."""
    num_sms: int
    shared_memory: int
    """Bytes that one thread block may have."""


INTERPRETER = DeviceLimits("interpreter", 0, 3, 99 * 1024)
"""Few programs, because each costs a millisecond there, but more than one, so that partial sums are combined."""
ABSENT = DeviceLimits("absent", 80, 132, 99 * 1024)
"""A CUDA device that is only named, as fake tensors are on a machine without one."""


@lru_cache(maxsize=16)
def limits_of(device: torch.device) -> DeviceLimits:
    """The limits of `device`; nothing is launched on it."""
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
