"""Choice of the file from which each tensor is read, for indices that disagree with their files. Reads no file."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from specrs.errors import CheckpointError

logger = logging.getLogger("specrs")


class Placement(NamedTuple):
    """File of each tensor, and the tensors on which index and files disagree."""

    files: dict[str, str]
    """Name of the file from which each tensor is read."""
    unlisted: frozenset[str]
    """Tensors that the index does not list. They are read if the model has them and ignored otherwise."""
    stale: frozenset[str]
    """Names of tensors with further copies, in files that the index does not name for them. These copies are not
    read."""
    ambiguous: dict[str, list[str]]
    """Tensors that are in several files although the index names none of these files for them, with the names of the
    files. They are not in `files`."""

    def check(self, folder: Path, names: Iterable[str]) -> None:
        """Raise CheckpointError for the first of `names` that is ambiguous: several files have the tensor, and the
        index names none of them for it."""
        for name in names:
            if name in self.ambiguous:
                held = " and ".join(sorted(self.ambiguous[name]))
                raise CheckpointError(
                    f"{folder}: {name} is in {held}, and the index names none of them for it; "
                    "list it in the index, or remove all copies but one"
                )


def place(folder: Path, weight_map: Mapping[str, str], found: Mapping[str, Collection[str]]) -> Placement:
    """Choose the file of each tensor, and log where index and files disagree.

    `weight_map` is the index: the file name of each tensor; empty if there is no index. `found` has the names of the
    tensors in each file. The index decides if its file holds the tensor. Otherwise the tensor is read from the one file
    that holds it.
    """
    holders: dict[str, list[str]] = {}
    for file, names in found.items():
        for name in names:
            holders.setdefault(name, []).append(file)
    files = {name: held[0] for name, held in holders.items() if len(held) == 1}
    listed = {name: weight_map[name] for name, held in holders.items() if weight_map.get(name) in held}
    files |= listed
    if not weight_map:
        return Placement(files, frozenset(), frozenset(), {})
    stale = frozenset(name for name in listed if len(holders[name]) > 1)
    unlisted = frozenset(holders.keys() - weight_map.keys())
    moved = frozenset(name for name in files if name in weight_map and name not in listed)
    for names, what in (
        (stale, "also in files that the index does not name for them: those copies are not read"),
        (moved, "not in the files that the index names for them: they are read from the files that hold them"),
        (unlisted, "not in the index: they are read where the model has them and ignored elsewhere"),
    ):
        if names:
            logger.warning("%s: %d tensors (%s, ...) are %s", folder, len(names), min(names), what)
    return Placement(files, unlisted, stale, {name: held for name, held in holders.items() if name not in files})
