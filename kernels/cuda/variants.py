"""Variants of kernels that are compiled ahead of time: types and constants of one call. Compiles nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from specrs.kernels.cuda.device import DeviceLimits

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Size:
    """Size class of devices. Devices of one class have about the same shared memory, and so the same default
    configurations."""

    name: str
    capabilities: tuple[int, ...]
    limits: DeviceLimits


SIZES = (
    Size("large", (90, 100), DeviceLimits("", 90, 132, 227 * 1024)),
    Size("small", (80, 120), DeviceLimits("", 80, 108, 99 * 1024)),
)
BLACKWELL = Size("tensor_memory", (100,), DeviceLimits("", 100, 148, 227 * 1024))
"""Devices of `large` that have tensor memory, for configurations that depend on it."""
CAPABILITIES = (80, 90, 100, 120)
"""Compute capabilities to compile for, times ten."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialisation of a Triton kernel, as `triton.compile` needs it."""

    name: str
    """Unique name in the baseline: kernel, dtype and whatever else distinguishes the variant."""
    fn: Any
    """The `triton.jit` function."""
    signature: Mapping[str, str]
    """Triton type of every argument that is not a constant: `*bf16`, `*i64`, `i32`, `fp32`. Pointers are assumed to be
    aligned to 16 bytes, as memory from torch is."""
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    """Value of every `tl.constexpr` argument, and None for every omitted pointer."""
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    """Integer arguments that are multiples of 16 at launch, such as strides. Without them no load has 16 bytes."""
    capabilities: tuple[int, ...] = CAPABILITIES
