"""Upload and result buffers of the launches in flight. Holds no row state; a slot is reused only after its launch
has settled."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrs.core import Scheduler
from specrs.runner.accept import Results
from specrs.verify.logprobs import TokenLogprobs

if TYPE_CHECKING:
    from specrs.engine.request import Request

Layout = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Header:
    """Counts of one launch, the first words of its record."""

    launch_id: int
    num_decode: int
    num_prefill: int
    num_prefill_tokens: int
    num_draft_chunks: int
    num_draft_tokens: int
    num_admitted: int
    num_upload_tokens: int
    num_block_updates: int
    max_k: int
    num_preempted: int


class RingSlot:
    """One launch's buffers: the record that Rust plans into, the results that the device reports into.

    All are flat int64; `record`, `results` and `settled` are numpy arrays owned here, `views` and `results_view` are
    torch views of the same memory by section name.
    """

    def __init__(self, scheduler: Scheduler, max_num_seqs: int, num_speculative_tokens: int) -> None:
        self.record: NDArray[np.int64] = np.zeros(scheduler.record_size, dtype=np.int64)
        self.results: NDArray[np.int64] = np.zeros(scheduler.results_size, dtype=np.int64)
        self.settled: NDArray[np.int64] = np.zeros(scheduler.settled_size, dtype=np.int64)
        self.views = _views(self.record, scheduler.record_layout())
        results = _views(self.results, scheduler.results_layout())
        self.results_view = Results(
            num_emitted=results["num_emitted"],
            num_accepted=results["num_accepted"],
            num_drafted=results["num_drafted"],
            flags=results["flags"],
            tokens=results["tokens"].view(max_num_seqs, num_speculative_tokens + 1),
        )
        self.logprobs: dict[int, TokenLogprobs] = {}  # by entry, where its request wants any
        self.prompt_logprobs: list[tuple[Request, int, TokenLogprobs]] = []  # request, first position, values
        self.settled_view = _views(self.settled, scheduler.settled_layout())

    def header(self) -> Header:
        """The planned launch's counts."""
        return Header(*self.record[:11].tolist())


def _views(buffer: NDArray[np.int64], layout: Layout) -> dict[str, Tensor]:
    flat = torch.from_numpy(buffer)
    return {name: flat.narrow(0, offset, length) for name, (offset, length) in layout.items()}


class Ring:
    """`depth + 1` slots, handed out in turn: `depth` launches in flight and one being planned."""

    def __init__(self, scheduler: Scheduler, max_num_seqs: int, num_speculative_tokens: int, depth: int) -> None:
        self._free = deque(RingSlot(scheduler, max_num_seqs, num_speculative_tokens) for _ in range(depth + 1))
        self.in_flight: deque[RingSlot] = deque()

    @property
    def next(self) -> RingSlot:
        """The slot that the next launch is planned into."""
        return self._free[0]

    def launch(self) -> None:
        """`next` now belongs to a launch in flight."""
        self.in_flight.append(self._free.popleft())

    @property
    def oldest(self) -> RingSlot:
        """The slot of the oldest launch in flight; IndexError if there is none."""
        return self.in_flight[0]

    def settle(self) -> None:
        """`oldest` has settled; its slot may be planned into again."""
        self._free.append(self.in_flight.popleft())
