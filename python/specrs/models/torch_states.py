"""States that requests keep between passes of torch models whose layers have some. Computes none.

The store keeps the state after each row of a verification, so that the next pass goes on after the accepted drafts. The
native pass keeps one state and a log of updates instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class State(NamedTuple):
    """State of one layer after some position of a request."""

    heads: Tensor
    """[value_heads, key_dim, value_dim]"""
    inputs: Tensor
    """Inputs of the convolution at the last positions, [kernel - 1, conv_dim]."""


@dataclass(slots=True)
class DeltaStates:
    """States of delta nets for each row of a batch, and snapshots of such states. A row's states stay after its request
    has ended, until the next request in the row replaces them."""

    rows: dict[tuple[int, int], dict[int, State]] = field(default_factory=dict)
    """For each (row, layer) the states at which the next pass may begin, by the number of positions before it."""
    snapshots: dict[int, dict[int, tuple[int, State]]] = field(default_factory=dict)
    """For each slot and layer the length and state of a snapshot."""

    def keep(self, slot: int, layer: int, length: int, state: State) -> None:
        """Write the state of a layer after `length` positions into a slot."""
        self.snapshots.setdefault(slot, {})[layer] = (length, state)

    def restore(self, row: int, slot: int) -> None:
        """Give a row the states of a snapshot. Raises ValueError if no pass has written the slot."""
        if slot not in self.snapshots:
            raise ValueError(f"snapshot={slot}: must be a slot that a pass has written, one of {set(self.snapshots)}")
        for layer, (length, state) in self.snapshots[slot].items():
            self.rows[row, layer] = {length: state}

    def begin(self, row: int, layer: int, position: int, zero: State) -> State:
        """Return the state before `position`: `zero` at position 0.

        Raises ValueError if the request's last pass ended elsewhere.
        """
        if position == 0:
            return zero
        found = self.rows.get((row, layer), {})
        if position not in found:
            raise ValueError(f"positions: row {row} has states before {sorted(found)}; must have one before {position}")
        return found[position]
