"""Which layers of a model share KV blocks: groups by window, and how a group's layers share memory with the others'.
Hands out no blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The layers of a model in G groups. A block is `block_size` positions of one group's layers, of one size in all.

    Layers at the same place of their groups share a tensor: of a block it holds the layer whose group the block is in.
    """

    windows: tuple[int | None, ...]
    """Of each group; the first has none, or the longest."""
    of_layer: tuple[int, ...]
    """The group of each layer."""
    places: tuple[int, ...]
    """The place of each layer in its group."""

    @property
    def layers_per_block(self) -> int:
        """Layers whose KV a block has room for."""
        return max(self.places) + 1


def kv_groups(windows: Sequence[int | None]) -> KVGroups | None:
    """Groups of layers with these windows; None where all layers have the same.

    A group has at most as many layers as attend the most positions, which are one group, so that a block wastes memory
    in the last group of a window alone.
    """
    kinds = sorted(set(windows), key=lambda window: (window is not None, -(window or 0)))
    if len(kinds) < 2:
        return None
    size = windows.count(kinds[0])
    of_group: list[int | None] = []
    of_layer, places = [0] * len(windows), [0] * len(windows)
    for kind in kinds:
        layers = [layer for layer, window in enumerate(windows) if window == kind]
        for at, layer in enumerate(layers):
            if at % size == 0:
                of_group.append(kind)
            of_layer[layer], places[layer] = len(of_group) - 1, at % size
    return KVGroups(tuple(of_group), tuple(of_layer), tuple(places))
