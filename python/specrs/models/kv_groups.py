"""KV groups of a model: layers with the same sliding window share block tables, and groups share memory. Assigns no
blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PARTS = 8
"""Largest number of groups for layers of one window. Each group adds a block table and its block ids to every
record."""


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The layers of a model in G groups. A block has `block_size` positions of one group's layers; all blocks have one
    size.

    Layers at the same place of their groups share a tensor. Each block of the tensor holds K and V of the layer whose
    group the block belongs to.
    """

    windows: tuple[int | None, ...]
    """Sliding window of each group in tokens. The first group has none (None) or the longest."""
    of_layer: tuple[int, ...]
    """Index of each layer's group."""
    places: tuple[int, ...]
    """Index of each layer within its group."""

    @property
    def layers_per_block(self) -> int:
        """Number of layers whose K and V fit in a block."""
        return max(self.places) + 1


def group_sizes(windows: Sequence[int | None]) -> list[int]:
    """Return the numbers of layers that a group may have, largest first. Empty if all layers attend to all positions.

    If some layers attend to all positions, they form the first group, and no group is larger. If every layer has a
    window, the first group holds all layers of the longest window, or fewer: its blocks may live longer, for a draft's
    KV.
    """
    full, layers = list(windows).count(None), len(windows)
    if full or not layers:
        return [full] if full < layers else []
    longest = windows.count(max(window or 0 for window in windows))
    return sorted({-(-layers // parts) for parts in range(2, MAX_PARTS + 1)} - {layers} | {longest}, reverse=True)


def kv_groups(windows: Sequence[int | None], size: int) -> KVGroups:
    """Return groups of at most `size` layers, a number from `group_sizes`. Layers of a group have the same window.

    Only the last group of each window may be smaller, and wastes memory in its blocks.
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
