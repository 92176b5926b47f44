"""LoRA adapter of each state row. Runs no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from specrs.models.lora import LoRAAdapter


class LoRARows:
    """LoRA adapter ids by state row, updated from records."""

    def __init__(self, max_num_seqs: int, find: Callable[[int], LoRAAdapter]) -> None:
        """Start with no adapters. `find` returns the adapter of an id that some running request has."""
        self._ids = [0] * (max_num_seqs + 1)
        self._find = find

    def admit(self, record: Mapping[str, NDArray[np.int64]], num_admitted: int) -> None:
        """Set the adapter ids of the rows that a record admits."""
        rows, ids = (record[name][:num_admitted].tolist() for name in ("admit_row", "admit_lora"))
        for row, lora_id in zip(rows, ids, strict=True):
            self._ids[row] = lora_id

    def by_adapter(self, rows: Sequence[int]) -> list[tuple[LoRAAdapter, list[int]]]:
        """Return each adapter with those of `rows` that use it. Rows of the base model are left out. `rows` has no
        duplicates."""
        found: dict[int, list[int]] = {}
        for row in rows:
            if self._ids[row]:
                found.setdefault(self._ids[row], []).append(row)
        return [(self._find(lora_id), held) for lora_id, held in found.items()]
