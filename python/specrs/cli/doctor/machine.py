"""Facts of the machine for `specrs doctor`: versions, processor, memory, GPUs. Imports no torch."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("specrs", "numpy", "tokenizers", "torch", "triton", "transformers")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_WSL_TOOL = "/usr/lib/wsl/lib/nvidia-smi"
_GPU_FIELDS = ("name", "memory.total", "compute_cap", "driver_version")
_SECONDS = 10.0
"""Maximum seconds for nvidia-smi. A driver that has to be started takes some seconds."""


def versions() -> dict[str, str | None]:
    """Return the version of Python and of each package; None if it is not installed."""
    found: dict[str, str | None] = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def machine() -> dict[str, Any]:
    """Return system, processor, cores, instruction sets, memory in GiB, and GPUs."""
    from specrs.backends.cpu.threads import physical_cores, usable_processors
    from specrs.core import cpu_instruction_sets

    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": processor(),
        "cores": {"physical": physical_cores(), "logical": len(usable_processors())},
        "instruction_sets": cpu_instruction_sets(),
        "instruction_set_in_use": instruction_set_in_use(),
        "memory_GiB": memory(),
        "GPUs": gpus(),
    }


def instruction_set_in_use() -> str:
    """Return the name of the instruction set of native passes, which SPECRS_ISA may choose; if it names none of this
    processor's, the error that engines raise."""
    from specrs.errors import InvalidConfigError
    from specrs.instruction_sets import instruction_set

    try:
        return instruction_set()
    except InvalidConfigError as error:
        return str(error)


def processor() -> str:
    """Return the manufacturer's name of the processor."""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def memory() -> dict[str, float]:
    """Return the memory that this process may use, and how much of it is free, in GiB. Empty if /proc does not say.

    The limit of a control group, such as a container's, is an upper bound of both.
    """
    kib = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", _text(Path("/proc/meminfo")), re.MULTILINE))
    limit = _text(_CGROUP_LIMIT).strip()
    most = int(limit) / 2**30 if limit.isdecimal() else float("inf")
    names = {"total": "MemTotal", "available": "MemAvailable"}
    return {name: round(min(int(kib[key]) / 2**20, most), 1) for name, key in names.items() if key in kib}


def gpus() -> list[dict[str, Any]]:
    """Return name, memory in GiB, compute capability and driver of each NVIDIA GPU, as nvidia-smi lists them."""
    tool = shutil.which("nvidia-smi") or shutil.which(_WSL_TOOL)
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):  # a tool without a driver
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [
        {"name": name, "memory_GiB": round(float(mib) / 1024, 1), "compute_capability": capability, "driver": driver}
        for name, mib, capability, driver in (row for row in rows if len(row) == len(_GPU_FIELDS))
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
