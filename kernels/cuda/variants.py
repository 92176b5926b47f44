"""What is compiled ahead of time of a kernel: types and constants of one call. Compiles nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from specrs.kernels.cuda.device import DeviceLimits

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Size:
    """Devices that have about the same shared memory, and so the same default configurations."""

    name: str
    capabilities: tuple[int, ...]
    limits: DeviceLimits


SIZES = (
    Size("large", (90, 100), DeviceLimits("", 90, 132, 227 * 1024)),
    Size("small", (80, 120), DeviceLimits("", 80, 108, 99 * 1024)),
)
CAPABILITIES = (80, 90, 100, 120)
"""Compute capabilities that are compiled for."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialisation of a Triton kernel, as `triton.compile` needs it."""

    name: str
    """Unique, as it stands in the baseline: kernel, dtype and whatever else tells it apart."""
    fn: Any
    """The `triton.jit` function."""
    signature: Mapping[str, str]
    """Triton type of every argument that is no constant: `*bf16`, `*i64`, `i32`, `fp32`. Pointers are taken to be
    aligned to 16 bytes, as what torch allocates is."""
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    """Value of every `tl.constexpr` argument, and None for every pointer that is left out."""
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    """Integer arguments that are multiples of 16 at launch: strides, without which no load has 16 bytes."""
    capabilities: tuple[int, ...] = CAPABILITIES
