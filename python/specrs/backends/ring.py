"""Record and result buffers of the steps in flight. A slot is reused only after its step has settled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specrs.core import HEADER_FIELDS, Scheduler
from specrs.record_fields import HeaderFields
from specrs.verify.token_logprobs import TokenLogprobs

Layout = dict[str, tuple[int, int]]
"""Offset and length, in elements, of each section of a flat buffer."""


class Header(HeaderFields):
    """Header of a step's record: numbers of sequences, chunks and tokens in the step. Immutable."""

    __slots__ = ()

    @classmethod
    def of(cls, record: NDArray[np.int64]) -> Header:
        """Return the header of a planned record."""
        return cls(*record[: len(HEADER_FIELDS)].tolist())


@dataclass(frozen=True, slots=True)
class DraftFault:
    """Failure of a drafter on the device. The step went on without its drafts."""

    error: Exception
    blocks: NDArray[np.int64]
    """Ids of KV blocks that the drafter should have written before it drafts, and did not."""


class RingSlot:
    """Buffers of one step: the record, into which the Rust core plans, and the results, which the runner writes.

    `record`, `results` and `settled` are flat int64. `record_arrays`, `results_arrays` and `settled_arrays` are views
    of their sections by name.
    """

    def __init__(self, scheduler: Scheduler, num_speculative_tokens: int) -> None:
        self.record = self._buffer(scheduler.record_size)
        self.results = self._buffer(scheduler.results_size)
        self.settled: NDArray[np.int64] = np.zeros(scheduler.settled_size, dtype=np.int64)
        self.record_arrays = section_arrays(self.record, scheduler.record_layout())
        self.results_arrays = section_arrays(self.results, scheduler.results_layout())
        self.settled_arrays = section_arrays(self.settled, scheduler.settled_layout())
        self.tokens = self.results_arrays["tokens"].reshape(-1, num_speculative_tokens + 1)
        """[B, K+1], part of the results: emitted tokens. From the first rejected draft on, column i holds draft i,
        counted from 1."""
        self.started = 0.0  # when it was planned, by time.perf_counter
        self.executed = -1  # id of the last step that the runner finished, or enqueued completely
        self.delivered = -1  # id of the last step whose results all requests have
        self.logprobs: dict[int, TokenLogprobs] = {}  # by sequence, if its request wants any
        self.prompt_logprobs: list[tuple[int, int, TokenLogprobs]] = []  # request id, first position, values
        self.pooled: list[tuple[int, NDArray[np.float32]]] = []  # request id, result of a request with pooling
        self.draft_fault: DraftFault | None = None  # failure in the last step
        self.merged = False  # in the last step, prompt chunks were rows of the verification pass
        self._grammar_masks: NDArray[np.int32] | None = None

    def _buffer(self, size: int) -> NDArray[np.int64]:
        return np.zeros(size, dtype=np.int64)

    def grammar_masks(self, first: int, count: int, width: int, words: int) -> NDArray[np.int32]:
        """Return memory for the grammar masks of `count` sequences from `first` on: `width` rows of `words` int32 each.
        It is allocated at the first call and kept between steps."""
        if self._grammar_masks is None:
            sequences, most = self.tokens.shape
            self._grammar_masks = np.empty((sequences, most, words), dtype=np.int32)
        return self._grammar_masks[first : first + count, :width]

    def drafter_failed(self, error: Exception, lost: NDArray[np.int64] | None = None) -> None:
        """Record a failure of the drafter. Keeps the step's first `error`, and adds the blocks in `lost`, whose KV was
        not written."""
        blocks = np.zeros(0, np.int64) if lost is None else lost
        if self.draft_fault is not None:
            error, blocks = self.draft_fault.error, np.concatenate([self.draft_fault.blocks, blocks])
        self.draft_fault = DraftFault(error, blocks)

    @property
    def has_ended(self) -> bool:
        """True if the last step that was executed or enqueued has finished."""
        return True

    @property
    def is_enqueued(self) -> bool:
        """True if `execute` may return before the step has finished, as on a GPU."""
        return False

    def header(self) -> Header:
        """Return the header of the planned step's record: how many sequences, chunks and rows it has."""
        return Header.of(self.record)


def section_arrays(flat: NDArray[np.int64], layout: Layout) -> dict[str, NDArray[np.int64]]:
    """Return views of the sections of a flat buffer, by name."""
    return {name: flat[offset : offset + length] for name, (offset, length) in layout.items()}


class Ring:
    """`depth + 1` slots in rotation: step i uses slot i modulo their number. The scheduler knows which steps are in
    flight."""

    def __init__(
        self,
        scheduler: Scheduler,
        num_speculative_tokens: int,
        depth: int,
        make_slot: Callable[[Scheduler, int], RingSlot] = RingSlot,
    ) -> None:
        self.depth = depth
        self._slots = [make_slot(scheduler, num_speculative_tokens) for _ in range(depth + 1)]

    def slot(self, step_id: int) -> RingSlot:
        """Return the slot of step `step_id`: a step in flight, the last settled step, or the next step to plan."""
        return self._slots[step_id % len(self._slots)]
