"""Reader of checkpoints that store all experts of a layer in one tensor per projection.

gpt-oss has `experts.gate_up_proj` `[experts, in, 2 out]`, with gate and up features alternating, and
`experts.down_proj` `[experts, in, out]`. Biases `[experts, ..]` end in `_bias`. Quantized weights, with outputs before
inputs, end in `_blocks` and `_scales`. Qwen3.5 has `experts.gate_up_proj` `[experts, 2 out, in]`, with all gate
features first, and `experts.down_proj` `[experts, out, in]`. Llama 4 has `experts.gate_up_proj` `[experts, in, 2 out]`,
with all gate features first, and `experts.down_proj` `[experts, in, out]`. Here each expert's projection gets its own
name, `experts.3.gate_proj.weight` `[out, in]`, `.bias`, `.blocks` or `.scales`, and its tensor is a view.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from specrs.arrays import Array
from specrs.models.checkpoint import Checkpoint
from specrs.models.registry import Stacked

_STACKED = re.compile(r"(?P<experts>.*\.experts)\.(?P<projection>gate_up|down)_proj(?P<kind>|_bias|_blocks|_scales)")
_KINDS = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}
_GATE_UP = ("gate_proj", "up_proj")
"""Projections in a stacked tensor of gate and up features."""


class _View(NamedTuple):
    """Position of one expert's tensor in a stacked tensor."""

    name: str
    """Name of the stacked tensor in the file."""
    expert: int
    outputs: slice
    """The projection's outputs in the stacked tensor."""
    turned: bool
    """True if the stacked tensor has inputs before outputs."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        sizes = list(whole[1:])
        if self.turned:
            sizes.reverse()
        sizes[0] = len(range(*self.outputs.indices(sizes[0])))
        return tuple(sizes)

    def of(self, whole: Array) -> Array:
        own: Array = whole[self.expert]
        return (own.T if self.turned else own)[self.outputs]


class StackedCheckpoint(Checkpoint):
    """Tensors of a folder in which each tensor of experts is split by expert and projection, as strided views."""

    def __init__(self, folder: Path, layout: Stacked, *, mtp_head: bool = False) -> None:
        """Open the files. `layout` is gpt-oss' (`alternating`), Qwen3.5's (`halves`) or Llama 4's (`turned halves`).
        `mtp_head` is that of `Checkpoint`.

        Raises CheckpointError if a file is missing or damaged, or if there are only pickled weights.
        """
        super().__init__(folder, allow_base_model=layout != "alternating" and not mtp_head, mtp_head=mtp_head)
        self._views: dict[str, _View] = {}
        for name, (shape, _) in super().entries().items():
            found = _STACKED.fullmatch(name)
            dimensions = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}
            if found is None or len(shape) != dimensions[found["kind"]]:
                continue
            turned = layout != "halves" and found["kind"] == ""
            parts = {"down_proj": slice(None)}
            if found["projection"] == "gate_up":
                half = shape[2 if turned else 1] // 2
                alternating = (slice(0, None, 2), slice(1, None, 2))
                outputs = alternating if layout == "alternating" else (slice(0, half), slice(half, None))
                parts = dict(zip(_GATE_UP, outputs, strict=True))
            for expert in range(shape[0]):
                for part, outputs_of in parts.items():
                    own = f"{found['experts']}.{expert}.{part}.{_KINDS[found['kind']]}"
                    self._views[own] = _View(name, expert, outputs_of, turned)
        self.unlisted |= {own for own, view in self._views.items() if view.name in self.unlisted}

    def entries(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and the safetensors dtype name of every tensor, with one name per expert and projection."""
        whole = super().entries()
        split = {view.name for view in self._views.values()}
        views = {name: (view.shape(whole[view.name][0]), whole[view.name][1]) for name, view in self._views.items()}
        return {name: entry for name, entry in whole.items() if name not in split} | views

    def __contains__(self, name: str) -> bool:
        return name in self._views or super().__contains__(name)

    def mapped(self, name: str) -> Array:
        """Return the tensor `name` in the file's dtype. Raises CheckpointError for a dtype that is not known."""
        view = self._views.get(name)
        return super().mapped(name) if view is None else view.of(super().mapped(view.name))
