"""Which device the engine runs on, and whether it can. Loads nothing."""

from __future__ import annotations

import contextlib
import os
import shutil

import torch

from specrs.errors import InvalidConfigError, UnsupportedConfigError, invalid

MIN_CAPABILITY = (8, 0)
"""bf16 tensor cores and asynchronous copies to shared memory, which the kernels are written for."""


def resolve_device(device: str) -> torch.device:
    """The device of `auto`, `cpu`, `cuda` or `cuda:N`; `auto` is a GPU where one serves.

    Raises:
        InvalidConfigError: there is no such GPU, or no C compiler, which Triton needs to start kernels.
        UnsupportedConfigError: the GPU's compute capability is too low.
    """
    if device == "cpu" or (device == "auto" and not _auto_has_gpu()):
        return torch.device("cpu")
    name = "cuda" if device == "auto" else device
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        raise invalid(InvalidConfigError, "device", name, f"{built}; allowed: 'auto' or 'cpu'")
    chosen = torch.device(name if ":" in name else f"cuda:{torch.cuda.current_device()}")
    count = torch.cuda.device_count()
    if chosen.index >= count:
        raise invalid(InvalidConfigError, "device", name, f"there are {count} GPUs: allowed are 0 to {count - 1}")
    capability = torch.cuda.get_device_capability(chosen)
    if capability < MIN_CAPABILITY:
        raise invalid(
            UnsupportedConfigError,
            "device",
            name,
            f"{torch.cuda.get_device_name(chosen)} has compute capability {capability[0]}.{capability[1]}, at least "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} is needed; allowed: 'cpu'",
        )
    if not has_c_compiler():
        raise invalid(
            InvalidConfigError,
            "device",
            name,
            "Triton needs a C compiler to start kernels: none of $CC, cc, gcc, clang is there; allowed: 'cpu'",
        )
    return chosen


def current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """`device` as the calling thread's current CUDA device, and the one before afterwards; nothing for a CPU.

    Triton launches on the current device whatever its tensors are on, and a context of torch's default stream is of
    that device, too. A launch needs no more than its runner's stream, which makes its own device current.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def has_c_compiler() -> bool:
    """Whether Triton will find a C compiler."""
    given = os.environ.get("CC")
    return any(shutil.which(name) for name in ([given] if given else ["cc", "gcc", "clang"]))


def _auto_has_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= MIN_CAPABILITY and has_c_compiler()
