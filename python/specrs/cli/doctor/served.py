"""Determines for `specrs doctor` what a machine can serve: devices, number formats, model sizes, families; and what is
missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specrs.extras import EXTRAS, has, install_command

_NOT_SERVED: dict[str, tuple[str, ...]] = {"CPU": ("auto", "float16"), "GPU": ("auto", "float64")}
"""Values of `--dtype` that the device does not compute in."""
_BYTES = {"16 bit": 2.0, "int8": 1.0, "int4": 0.56}
"""Bytes per weight of each format, its share of a scale included."""
_SHARE = 0.8
"""Share of the memory that weights may take. The rest is for KV cache and buffers."""


def serves(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the device that `--device auto` chooses, its number formats, the largest models, and the families."""
    from specrs.engine_options import DTYPES
    from specrs.models.quantization import table
    from specrs.models.registry import FAMILIES

    usable = [gpu for gpu in machine["GPUs"] if not gpu_obstacles(gpu)]
    left_out = _NOT_SERVED["GPU"] if usable else _NOT_SERVED["CPU"]
    if not has("transformers"):
        left_out = (*left_out, "float64")  # which torch computes
    room = usable[0]["memory_GiB"] if usable else machine["memory_GiB"].get("available")
    return {
        "device": f"GPU ({usable[0]['name']})" if usable else "CPU",
        "dtypes": ", ".join(name for name in DTYPES if name not in left_out),
        "quantized_checkpoints": ", ".join((*table.METHODS, table.GGUF)),
        "quantizes_at_load": ", ".join(table.AT_LOAD),
        "parameters_that_fit": None if room is None else {name: largest(room, size) for name, size in _BYTES.items()},
        "models": "; ".join(family.models for family in FAMILIES.values()),
        "other_models": "through transformers, on a CPU" if has("transformers") else "none, see Missing",
    }


def largest(room: float, bytes_each: float) -> str:
    """Return the number of parameters of the largest model whose weights fit in their share of `room` GiB, as in `7.3
    B`."""
    return f"{_SHARE * room * 2**30 / bytes_each / 1e9:.1f} B"


def gpu_obstacles(gpu: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the reasons why specrs cannot use a GPU, each with the command that helps; empty if it can."""
    from specrs.backends.cuda.device import KIND, MIN_CAPABILITY, has_c_compiler

    found = []
    if tuple(map(int, gpu["compute_capability"].split("."))) < MIN_CAPABILITY:
        needed = ".".join(map(str, MIN_CAPABILITY))
        found.append((f"{gpu['name']} has compute capability {gpu['compute_capability']}", f"a GPU with {needed}"))
    if not has(KIND):
        found.append((f"{gpu['name']} needs torch and triton", install_command(KIND)))
    if not has_c_compiler():
        found.append((f"{gpu['name']} needs a C compiler, with which Triton starts kernels", "apt-get install gcc"))
    return found


def absent(machine: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what is missing: packages, and what the first GPU lacks, each with its purpose and the command that adds
    it.

    The extra for GPUs counts as missing only on a machine with a GPU.
    """
    from specrs.backends.cuda.device import KIND

    found = [
        {"what": "GPU", "for": reason, "command": command}
        for gpu in machine["GPUs"][:1]
        for reason, command in gpu_obstacles(gpu)
    ]
    return found + [
        {"what": f"specrs[{extra}]", "for": purpose, "command": install_command(extra)}
        for extra, (purpose, _) in EXTRAS.items()
        if extra != KIND and not has(extra)
    ]
