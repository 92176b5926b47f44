"""Ring slots and results as tensors, for passes that torch runs. Holds no row state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrs.core import Scheduler
from specrs.runner.ring import Layout, RingSlot


@dataclass(frozen=True, slots=True)
class Results:
    """Where an iteration reports, views of one ring slot; index i is the launch's entry i."""

    num_emitted: Tensor  # [B] int64
    num_accepted: Tensor  # [B] int64
    num_drafted: Tensor  # [B] int64
    flags: Tensor  # [B] int64, FLAG_* bits
    finish_reason: Tensor  # [B] int64, FINISH_NONE, FINISH_STOP or FINISH_LENGTH
    tokens: Tensor  # [B, K+1] int64, the emitted; drafts from the first rejected one on, draft i (from 1) in column i

    @classmethod
    def of(cls, sections: Mapping[str, Tensor], num_speculative_tokens: int) -> Results:
        """The sections of a results buffer, for the engine's K."""
        return cls(
            num_emitted=sections["num_emitted"],
            num_accepted=sections["num_accepted"],
            num_drafted=sections["num_drafted"],
            flags=sections["flags"],
            finish_reason=sections["finish_reason"],
            tokens=sections["tokens"].view(-1, num_speculative_tokens + 1),
        )

    def narrow(self, start: int, length: int) -> Results:
        """The same views for entries [start, start + length)."""
        return Results(*(tensor.narrow(0, start, length) for tensor in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        """All sections."""
        return self.num_emitted, self.num_accepted, self.num_drafted, self.flags, self.finish_reason, self.tokens


class TensorSlot(RingSlot):
    """A slot whose buffers are tensors, too: `views` and `results_view` are views of them by section name.

    With `pinned` the memory is page-locked, so that a GPU copies it by itself; `done` is then recorded after the copy
    of the results.
    """

    def __init__(self, scheduler: Scheduler, num_speculative_tokens: int, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._made: list[Tensor] = []
        super().__init__(scheduler, num_speculative_tokens)
        self.pinned_record, self.pinned_results = self._made
        self.views = section_views(self.pinned_record, scheduler.record_layout())
        self.results_view = Results.of(
            section_views(self.pinned_results, scheduler.results_layout()), num_speculative_tokens
        )
        self.done = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def _buffer(self, size: int) -> NDArray[np.int64]:
        self._made.append(torch.zeros(size, dtype=torch.int64, pin_memory=self._pinned))
        array: NDArray[np.int64] = self._made[-1].numpy()
        return array

    @property
    def has_ended(self) -> bool:
        """See `RingSlot`."""
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]

    @property
    def is_enqueued(self) -> bool:
        """See `RingSlot`."""
        return self.done is not None


def section_views(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Views of the sections of a flat buffer, by name."""
    return {name: flat.narrow(0, offset, length) for name, (offset, length) in layout.items()}


def blocks_of(slots: Tensor, block_size: int) -> NDArray[np.int64]:
    """Return the blocks of KV slots `[N]` on the host, -1 for none, ascending."""
    return np.unique(slots[slots >= 0].numpy() // block_size)
