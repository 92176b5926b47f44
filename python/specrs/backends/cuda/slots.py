"""Ring slots and results as tensors, for passes that torch runs. Holds no row state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrs.backends.ring import Layout, RingSlot
from specrs.core import DRAFTER_DEVICE, Scheduler


@dataclass(frozen=True, slots=True)
class Results:
    """Results of an iteration, views of one results buffer. Index i is the step's sequence i."""

    num_emitted: Tensor  # [B] int64
    num_accepted: Tensor  # [B] int64
    num_drafted: Tensor  # [B] int64
    flags: Tensor  # [B] int64, FLAG_* bits
    finish_reason: Tensor  # [B] int64, FINISH_NONE, FINISH_STOP or FINISH_LENGTH
    tokens: Tensor  # [B, K+1] int64, emitted tokens; from the first rejected draft on, column i has draft i

    @classmethod
    def of(cls, sections: Mapping[str, Tensor], num_speculative_tokens: int) -> Results:
        """Return views of the sections of a results buffer, for the engine's K."""
        return cls(
            num_emitted=sections["num_emitted"],
            num_accepted=sections["num_accepted"],
            num_drafted=sections["num_drafted"],
            flags=sections["flags"],
            finish_reason=sections["finish_reason"],
            tokens=sections["tokens"].view(-1, num_speculative_tokens + 1),
        )

    def narrow(self, start: int, length: int) -> Results:
        """Return views for the sequences [start, start + length)."""
        return Results(*(tensor.narrow(0, start, length) for tensor in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all sections."""
        return self.num_emitted, self.num_accepted, self.num_drafted, self.flags, self.finish_reason, self.tokens


class TensorSlot(RingSlot):
    """A ring slot whose buffers are also tensors: `views` and `results_view` are views of them by section name.

    With `pinned` the memory is page-locked, so that a GPU copies it without the host. `done` is recorded after the copy
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
        """True if the last step that was enqueued has finished."""
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]

    @property
    def is_enqueued(self) -> bool:
        """True on a GPU, where `execute` may return before the step has finished."""
        return self.done is not None


def section_views(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Return views of the sections of a flat buffer, by name."""
    return {name: flat.narrow(0, offset, length) for name, (offset, length) in layout.items()}


def host_drafts(sections: Mapping[str, Tensor], max_num_seqs: int) -> Tensor:
    """Return `draft_token` of a record's sections as `[R, K]` int64: `seq_k` columns of row i are for sequence i."""
    return sections["draft_token"].view(max_num_seqs, -1)


def drafted_on_host(sections: Mapping[str, Tensor], num_decode: int) -> Tensor:
    """Return which decoding sequences have their drafts in the record, `[num_decode]` bool."""
    return sections["seq_drafter"][:num_decode] != DRAFTER_DEVICE


def blocks_of(slots: Tensor, block_size: int) -> NDArray[np.int64]:
    """Return the ids of the blocks of KV slots `[N]` on the host, ascending. Slot -1 belongs to no block."""
    return np.unique(slots[slots >= 0].numpy() // block_size)
