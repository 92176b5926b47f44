"""States that requests keep between passes of torch models whose layers have some, and the loop over a pass's rows by
request.

The store keeps the state after each row of a verification, so that the next pass goes on after the accepted drafts. The
native pass keeps one state and a log of updates instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from torch import Tensor

State: TypeAlias = tuple[Tensor, ...]
"""State of one layer after some position of a request."""


@dataclass(slots=True)
class LayerStates:
    """States of layers for each row of a batch, and snapshots of such states. A row's states stay after its request has
    ended, until the next request in the row replaces them."""

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

    def run(
        self,
        layer: int,
        runs: Runs,
        zero: State,
        step: Callable[[int, State], tuple[Tensor, State]],
        out: Tensor,
    ) -> Tensor:
        """Compute a pass's rows of one layer, and return `out` `[N, features]` with their outputs. Mutates `out`.

        `step` returns the output of the row with the given index, and the state after it, from the state before it.
        `zero` is the state at position 0. Masked rows of `out` stay as they are.
        """
        for row, indices, first in runs.rows:
            state = self.begin(row, layer, first, zero)
            # States from the committed one on; those after it are of drafts, accepted up to `first`.
            known = self.rows[row, layer] if first else {0: zero}
            wanted = {length: slot for of, length, slot in runs.snapshots if of == row and length > min(known)}
            for length in wanted.keys() & known.keys():
                if length <= first:
                    self.keep(wanted[length], layer, length, known[length])
            kept = {}
            for count, index in enumerate(indices, 1):
                out[index], state = step(index, state)
                if first + count in wanted and (runs.prompts or count == 1):
                    self.keep(wanted[first + count], layer, first + count, state)
                if not runs.prompts or count == len(indices):
                    kept[first + count] = state
            self.rows[row, layer] = kept
        return out


class Runs(NamedTuple):
    """Rows of a pass by request, as layers with states read them."""

    rows: tuple[tuple[int, tuple[int, ...], int], ...]
    """For each request with rows, its state row, the indices of its rows in the pass, and the first position."""
    prompts: bool
    """True if all rows are committed tokens, so that only the last state is kept."""
    snapshots: tuple[tuple[int, int, int], ...] = ()
    """State row, length and slot of each snapshot to write, as in `PassInputs`."""


def runs_of(
    positions: Tensor,
    q_start: Tensor,
    state_rows: Sequence[int] | None,
    prompts: bool,
    snapshots: tuple[tuple[int, int, int], ...] = (),
) -> Runs:
    """Return the rows of a pass by request. `state_rows` has the state row of each; None: its index."""
    at, starts = positions.tolist(), q_start.tolist()
    found = []
    for b, (first, end) in enumerate(itertools.pairwise(starts)):
        rows = tuple(i for i in range(first, end) if at[i] >= 0)
        if rows:
            found.append((b if state_rows is None else state_rows[b], rows, at[rows[0]]))
    return Runs(tuple(found), prompts, snapshots)
