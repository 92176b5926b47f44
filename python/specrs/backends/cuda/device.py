"""Checks that a CUDA device is there and can serve. Loads nothing, and imports torch only if there may be a GPU."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from specrs.errors import InvalidConfigError, UnsupportedConfigError, invalid
from specrs.extras import require
from specrs.models.loader import DeviceDtypes

KIND = "cuda"
"""Torch's name for this kind of device, and the name of the extra that installs what a GPU needs."""
CUDA_DTYPES = DeviceDtypes(KIND, unsupported="float64", auto_widens=False)
"""Dtypes in which the kernels compute: all but float64."""
MIN_CAPABILITY = (8, 0)
"""Lowest supported compute capability. The kernels need bf16 tensor cores and asynchronous copies to shared memory."""
FP8_CAPABILITY = (8, 9)
"""Lowest compute capability whose tensor cores multiply FP8 numbers."""
_DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg", "/etc/nv_tegra_release")
"""Files on Linux that show that NVIDIA's driver is installed; one is enough. The last two are of WSL and Jetson
boards."""


def require_packages(what: str) -> None:
    """Check that torch and Triton are installed. Raises `InvalidConfigError`, which says that `what` needs them."""
    require("torch", KIND, what)
    require("triton", KIND, what)


def resolve_gpu(device: str) -> str:
    """Return `cuda:N` for `auto`, `cuda` or `cuda:N`, if that GPU serves.

    Raises:
        InvalidConfigError: there is no such GPU, or no C compiler, which Triton needs to start kernels, or torch or
            Triton is not installed.
        UnsupportedConfigError: the GPU's compute capability is too low.
    """
    name = KIND if device == "auto" else device
    require_packages(f"device={name!r}")
    import torch

    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        raise invalid(InvalidConfigError, "device", name, f"{built}; allowed: 'auto' or 'cpu'")
    chosen = torch.device(name if ":" in name else f"cuda:{torch.cuda.current_device()}")
    count = torch.cuda.device_count()
    if chosen.index >= count:
        known = ", ".join(f"cuda:{index}" for index in range(count))
        raise invalid(InvalidConfigError, "device", name, f"must be one of {known}, the GPUs of this machine")
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


def check_fp8(field: str, device: str) -> None:
    """Raise `UnsupportedConfigError`, which names `field`, if the GPU `device` does not multiply FP8 numbers."""
    import torch

    name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if (major, minor) < FP8_CAPABILITY:
        needed = f"at least {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} is needed; allowed: None, 'int8' or 'int4'"
        raise invalid(UnsupportedConfigError, field, "fp8", f"{name} has compute capability {major}.{minor}, {needed}")


def gpu_of_rank(device: str, size: int, place: tuple[int, int]) -> str:
    """Return the GPU of one of `size` ranks. `place` is the rank's number on its machine, and that machine's number of
    ranks.

    Raises `InvalidConfigError` if a GPU, package or compiler is missing, if there are too few GPUs, or if `device`
    names a single one; `UnsupportedConfigError` if the GPU's compute capability is too low.
    """
    (rank, num_local), _ = place, resolve_gpu(device)
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
    return resolve_gpu(f"cuda:{rank}")


def has_gpu() -> bool:
    """Return whether the current GPU can serve, and the packages and compiler that it needs are installed."""
    if not (find_spec("torch") and find_spec("triton") and has_driver()):
        return False
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= MIN_CAPABILITY and has_c_compiler()


def has_c_compiler() -> bool:
    """Return whether Triton will find a C compiler."""
    given = os.environ.get("CC")
    return any(shutil.which(name) for name in ([given] if given else ["cc", "gcc", "clang"]))


def has_driver() -> bool:
    """Return whether NVIDIA's driver is installed. Asks no GPU."""
    if sys.platform.startswith("linux"):
        return any(Path(file).exists() for file in _DRIVER_FILES)
    return ctypes.util.find_library("nvcuda" if sys.platform == "win32" else KIND) is not None
