"""What is compiled ahead of time of a kernel: types and constants of one call. Compiles nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialisation of a Triton kernel, as `triton.compile` needs it."""

    name: str
    """Unique, as it stands in the baseline: kernel, dtype and whatever else tells it apart."""
    fn: Any
    """The `triton.jit` function."""
    signature: Mapping[str, str]
    """Triton type of every argument that is no constant: `*bf16`, `*i64`, `i32`, `fp32`."""
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    """Value of every `tl.constexpr` argument."""
    num_warps: int = 4
    num_stages: int = 3
