"""What LoRA adapters add to projections of some rows of a pass. Reads no file and knows no request.

What a projection gives is `W x + s B (A x)` (Hu et al. 2021), of rows that have the adapter; `s` is in B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Matrix: TypeAlias = Any
"""An array of numpy's for a native model, a tensor for one of torch's."""


@dataclass(frozen=True, slots=True)
class LoRAPart:
    """What an adapter adds to one module of a layer."""

    a: Matrix
    """[r, inputs]"""
    b: Matrix
    """[outputs, r], times the scale"""
    first: int
    """The first row of the layer's matrix that is the module's."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoRAAdapter:
    """An adapter's matrices, in the dtype and on the device of its model."""

    name: str
    id: int
    layers: tuple[Mapping[str, tuple[LoRAPart, ...]], ...]
    """Of each layer, by the names of `LayerWeights`."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a pass of torch's that an adapter is for."""

    adapter: LoRAAdapter
    """Its matrices are tensors."""
    rows: Tensor
    """[n] int64, each once."""

    def add_(self, out: Tensor, x: Tensor, layer: int, projection: str) -> None:
        """Add what the adapter makes of these rows of `x` `[N, inputs]` to theirs of `out` `[N, outputs]`; mutates
        `out`."""
        parts = self.adapter.layers[layer].get(projection)
        if not parts:
            return
        x = x.index_select(0, self.rows)
        for part in parts:
            out.narrow(1, part.first, len(part.b)).index_add_(
                0, self.rows, x @ part.a.t().to(x.dtype) @ part.b.t().to(x.dtype)
            )
