"""Which layers of a model share KV blocks: groups by window, and how a group's layers share memory with the others'.
Hands out no blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PARTS = 8
"""Groups that layers of one window are cut into at most: each has a block table and its blocks in every record."""


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


def group_sizes(windows: Sequence[int | None]) -> list[int]:
    """Layers a group may have, the most first; none where all layers attend to all positions.

    Those that do are the first group, and no group has more. Where each layer has a window, the first group may be one
    kind of layers, or a part of all: what else is in it, a draft's KV, may be kept longer.
    """
    full, layers = list(windows).count(None), len(windows)
    if full or not layers:
        return [full] if full < layers else []
    longest = windows.count(max(window or 0 for window in windows))
    return sorted({-(-layers // parts) for parts in range(2, MAX_PARTS + 1)} - {layers} | {longest}, reverse=True)


def kv_groups(windows: Sequence[int | None], size: int) -> KVGroups:
    """Groups of at most `size` layers, one of `group_sizes`, each of one window.

    A block wastes memory in the last group of a window alone.
    """
    kinds = sorted(set(windows), key=lambda window: (window is not None, -(window or 0)))
    of_group: list[int | None] = []
    of_layer, places = [0] * len(windows), [0] * len(windows)
    for kind in kinds:
        layers = [layer for layer, window in enumerate(windows) if window == kind]
        for at, layer in enumerate(layers):
            if at % size == 0:
                of_group.append(kind)
            of_layer[layer], places[layer] = len(of_group) - 1, at % size
    return KVGroups(tuple(of_group), tuple(of_layer), tuple(places))
