"""The experts of checkpoints that have those of a layer in one tensor a projection, each under a name of its own.

gpt-oss has `experts.gate_up_proj` `[experts, in, 2 out]`, gates and values taking turns, and `experts.down_proj`
`[experts, in, out]`, biases `[experts, ..]` behind `_bias`, and codes with outputs before inputs behind `_blocks` and
`_scales`. Here they are `experts.3.gate_proj.weight` `[out, in]`, `.bias`, `.blocks` and `.scales`, as views.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from specrs.arrays import Array
from specrs.models.checkpoint import Checkpoint

_STACKED = re.compile(r"(?P<experts>.*\.experts)\.(?P<projection>gate_up|down)_proj(?P<kind>|_bias|_blocks|_scales)")
_KINDS = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}
_PARTS = {"gate_up": (("gate_proj", 0, 2), ("up_proj", 1, 2)), "down": (("down_proj", 0, 1),)}
"""Name, first output and step of what a tensor holds."""


class _View(NamedTuple):
    """Where a tensor of one expert is."""

    name: str
    """In the file."""
    expert: int
    first: int
    step: int
    turned: bool
    """Inputs come before outputs."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        sizes = list(whole[1:])
        if self.turned:
            sizes.reverse()
        sizes[0] = len(range(self.first, sizes[0], self.step))
        return tuple(sizes)

    def of(self, whole: Array) -> Array:
        own: Array = whole[self.expert]
        return (own.T if self.turned else own)[self.first :: self.step]


class StackedCheckpoint(Checkpoint):
    """The tensors of a folder; those of experts are of one expert and one projection each, in strides of the file's."""

    def __init__(self, folder: Path) -> None:
        """Open the files. Raises as `Checkpoint`."""
        super().__init__(folder)
        self._views: dict[str, _View] = {}
        for name, (shape, _) in super().entries().items():
            found = _STACKED.fullmatch(name)
            dimensions = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}
            if found is None or len(shape) != dimensions[found["kind"]]:
                continue
            for expert in range(shape[0]):
                for part, first, step in _PARTS[found["projection"]]:
                    own = f"{found['experts']}.{expert}.{part}.{_KINDS[found['kind']]}"
                    self._views[own] = _View(name, expert, first, step, found["kind"] == "")
        self.unlisted |= {own for own, view in self._views.items() if view.name in self.unlisted}

    def entries(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """See `Checkpoint`; like what follows."""
        whole = super().entries()
        split = {view.name for view in self._views.values()}
        views = {name: (view.shape(whole[view.name][0]), whole[view.name][1]) for name, view in self._views.items()}
        return {name: entry for name, entry in whole.items() if name not in split} | views

    def __contains__(self, name: str) -> bool:
        return name in self._views or super().__contains__(name)

    def mapped(self, name: str) -> Array:
        """See `Checkpoint`."""
        view = self._views.get(name)
        return super().mapped(name) if view is None else view.of(super().mapped(view.name))
