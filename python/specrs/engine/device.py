"""Which device the engine runs on, and whether it can. Loads nothing, and torch only where there may be a GPU."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from specrs.errors import InvalidConfigError, UnsupportedConfigError, invalid
from specrs.extras import require

MIN_CAPABILITY = (8, 0)
"""bf16 tensor cores and asynchronous copies to shared memory, which the kernels are written for."""
_DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg", "/etc/nv_tegra_release")
"""Files of which one is there where Linux has NVIDIA's driver, the last two under WSL and on Jetson boards."""


def resolve_device(device: str) -> str:
    """Return `cpu` or `cuda:N` for `auto`, `cpu`, `cuda` or `cuda:N`; `auto` is a GPU where one serves.

    Raises:
        InvalidConfigError: there is no such GPU, or no C compiler, which Triton needs to start kernels, or torch or
            Triton is not installed.
        UnsupportedConfigError: the GPU's compute capability is too low.
    """
    if device == "cpu" or (device == "auto" and not _auto_has_gpu()):
        return "cpu"
    name = "cuda" if device == "auto" else device
    require("torch", "cuda", f"device={name!r}")
    require("triton", "cuda", f"device={name!r}")
    import torch

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
    return str(chosen)


def device_type(device: object) -> str:
    """Return `cpu` or `cuda` for a device's name, or for torch's object that has it."""
    return str(device).partition(":")[0]


def device_of_rank(device: str, size: int, place: tuple[int, int]) -> str:
    """Return the device of one of `size` ranks: of a configuration's `cuda` the GPU with its number on its machine, as
    CUDA_VISIBLE_DEVICES numbers them. `place`: that number, and how many ranks the machine has.

    Raises as `resolve_device`, and InvalidConfigError where a machine has more ranks than GPUs, or one GPU is named.
    """
    first, (rank, num_local) = resolve_device(device), place
    if device_type(first) != "cuda":
        return first
    if ":" in device:
        reason = f"tensor_parallel_size={size} takes a GPU for each rank; allowed: 'cuda', and CUDA_VISIBLE_DEVICES"
        raise invalid(InvalidConfigError, "device", device, reason)
    import torch

    count = torch.cuda.device_count()
    if num_local > count:
        reason = (
            f"{num_local} ranks on this machine take a GPU each and there are {count}; allowed: {count} ranks on it, "
            "or device='cpu'"
        )
        raise invalid(InvalidConfigError, "tensor_parallel_size", size, reason)
    return resolve_device(f"cuda:{rank}")


def current(device: object) -> contextlib.AbstractContextManager[None]:
    """Make `device`, a name or torch's object, the calling thread's current CUDA device, and afterwards the one before;
    nothing for a CPU.

    Triton launches on the current device whatever its tensors are on, and a context of torch's default stream is of
    that device, too. A launch needs no more than its runner's stream, which makes its own device current.
    """
    if device_type(device) != "cuda":
        return contextlib.nullcontext()
    import torch

    return torch.cuda.device(str(device))


def has_c_compiler() -> bool:
    """Return whether Triton will find a C compiler."""
    given = os.environ.get("CC")
    return any(shutil.which(name) for name in ([given] if given else ["cc", "gcc", "clang"]))


def _has_driver() -> bool:
    """Whether there is NVIDIA's driver. Asks no GPU."""
    if sys.platform.startswith("linux"):
        return any(Path(file).exists() for file in _DRIVER_FILES)
    return ctypes.util.find_library("nvcuda" if sys.platform == "win32" else "cuda") is not None


def _auto_has_gpu() -> bool:
    if not (find_spec("torch") and find_spec("triton") and _has_driver()):
        return False
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= MIN_CAPABILITY and has_c_compiler()
