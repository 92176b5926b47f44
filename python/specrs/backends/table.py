"""Table of backends, and the choice of a device's backend."""

from __future__ import annotations

from collections.abc import Mapping

from specrs.backends.base import Backend
from specrs.backends.cpu.backend import CpuBackend
from specrs.backends.cuda.backend import CudaBackend

BACKENDS: Mapping[str, Backend] = {backend.name: backend for backend in (CudaBackend(), CpuBackend())}
"""Backends by kind of device. `device="auto"` takes the first that is available."""


def backend_of(device: str) -> Backend:
    """Return the backend of a device that an option names: `auto`, `cpu`, `cuda` or `cuda:N`."""
    if device == "auto":
        return next(backend for backend in BACKENDS.values() if backend.is_available())
    return BACKENDS[device.partition(":")[0]]


def resolve_device(device: str) -> str:
    """Return the full name of the device that the option `device` means: `cpu`, or `cuda:N` for a GPU.

    Raises:
        InvalidConfigError: there is no such device, or a package or program that it needs is missing.
        UnsupportedConfigError: the device cannot serve, such as a GPU of a low compute capability.
    """
    return backend_of(device).resolve_device(device)


def device_of_rank(device: str, size: int, place: tuple[int, int]) -> str:
    """Return the device of one of `size` ranks.

    `place` is the rank's number on its machine, and that machine's number of ranks. The ranks of a machine take its
    GPUs in order, as CUDA_VISIBLE_DEVICES numbers them.

    Raises `InvalidConfigError` if the device is missing, if a machine has more ranks than GPUs, or if `device` names
    one GPU; `UnsupportedConfigError` if the device cannot serve.
    """
    return backend_of(device).device_of_rank(device, size, place)
