"""LoRA adapters, applied to the projections of some rows of a pass. Reads no file and knows no request.

For rows with the adapter, a projection returns `W x + s B (A x)` (Hu et al. 2021). The scale `s` is multiplied into B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Matrix: TypeAlias = Any
"""A NumPy array for a native model, a tensor for a torch model."""
_EXPERTS = "experts."


@dataclass(frozen=True, slots=True)
class LoRAPart:
    """Matrices A and B of an adapter for one module of a layer."""

    a: Matrix
    """Matrix A, [r, inputs]."""
    b: Matrix
    """Matrix B times the scale, [outputs, r]."""
    first: int
    """First row of the layer's fused matrix that belongs to the module."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoRAAdapter:
    """Matrices of an adapter in the dtype of its model, in host memory."""

    name: str
    id: int
    layers: tuple[Mapping[str, tuple[LoRAPart, ...]], ...]
    """For each layer the parts of the adapter, by the projection's name in `LayerWeights`, or for experts by
    `expert_projection`."""

    def changes_experts(self, layer: int) -> bool:
        """Return whether the adapter changes experts of a layer."""
        return any(name.startswith(_EXPERTS) for name in self.layers[layer])


def expert_projection(expert: int, name: str) -> str:
    """Return the name of expert number `expert`'s projection `name`, `gate_up` or `down`, in `LoRAAdapter.layers`."""
    return f"{_EXPERTS}{expert}.{name}"


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows of a torch pass, or of what an expert is fed, that use one adapter."""

    adapter: LoRAAdapter
    """The adapter, with tensors as matrices."""
    rows: Tensor
    """[n] int64 row indices, without duplicates."""

    def add_(self, out: Tensor, x: Tensor, layer: int, projection: str) -> None:
        """Add the adapter's output for its rows of `x` `[N, inputs]` to these rows of `out` `[N, outputs]`. Mutates
        `out`."""
        parts = self.adapter.layers[layer].get(projection)
        if not parts or not len(self.rows):
            return
        x = x.index_select(0, self.rows)
        for part in parts:
            out.narrow(1, part.first, len(part.b)).index_add_(
                0, self.rows, x @ part.a.t().to(x.dtype) @ part.b.t().to(x.dtype)
            )
