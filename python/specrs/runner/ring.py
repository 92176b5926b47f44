"""Upload and result buffers of the launches in flight. Holds no row state; a slot is reused only after its launch
has settled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specrs.core import HEADER_FIELDS, Scheduler
from specrs.verify.token_logprobs import TokenLogprobs

Layout = dict[str, tuple[int, int]]


@dataclass(slots=True)  # not frozen, which takes three times as long to make, twice a launch
class Header:
    """Counts of one launch, the first elements of its record, in the order of `HEADER_FIELDS`. Not to be changed."""

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
    num_constraints: int

    @classmethod
    def of(cls, record: NDArray[np.int64]) -> Header:
        """The header of a planned record."""
        return cls(*record[: len(HEADER_FIELDS)].tolist())


def used_part(header: Header, layout: Layout, *, constraints: bool) -> int:
    """Elements from the record's begin behind which a launch reads nothing: most of a record is of prompts and of
    requests that are admitted. `constraints` are the last section, which is read on the host alone."""
    if constraints and header.num_constraints:
        return layout["constraint"][0] + header.num_constraints
    # Slots of prompt chunks are there for each KV group, as many as tokens may be.
    before_last_group = layout["prefill_slot"][1] - layout["prefill_token"][1]
    for name, before, count in (
        ("upload_token", 0, header.num_upload_tokens),
        ("draft_slot", 0, header.num_draft_tokens),
        ("prefill_slot", before_last_group, header.num_prefill_tokens),
    ):
        if count:
            return layout[name][0] + before + count
    return layout["prefill_token"][0]


@dataclass(frozen=True, slots=True)
class DraftFault:
    """A drafter on the device that failed in a launch, which went on without its drafts."""

    error: Exception
    blocks: NDArray[np.int64]
    """Whose draft KV it was to write before any draft, and has not."""


class RingSlot:
    """One launch's buffers: the record that Rust plans into, the results that the runner reports into.

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
        """[B, K+1], of the results: the emitted tokens; drafts from the first rejected one on, draft i (from 1) in
        column i."""
        self.started = 0.0  # when it was planned, by time.perf_counter
        self.executed = -1  # id of the last launch that the runner took to its end, or enqueued as a whole
        self.delivered = -1  # id of the last launch whose results all requests have
        self.logprobs: dict[int, TokenLogprobs] = {}  # by entry, where its request wants any
        self.prompt_logprobs: list[tuple[int, int, TokenLogprobs]] = []  # request id, first position, values
        self.draft_fault: DraftFault | None = None  # of the launch that ran last
        self.merged = False  # of that launch: prompt chunks were rows of its verification
        self._grammar_masks: NDArray[np.int32] | None = None

    def _buffer(self, size: int) -> NDArray[np.int64]:
        return np.zeros(size, dtype=np.int64)

    def grammar_masks(self, first: int, count: int, width: int, words: int) -> NDArray[np.int32]:
        """Room for the masks of `count` entries from `first` on, `width` rows of `words` int32 each; kept between
        launches, and made when a launch first asks for it."""
        if self._grammar_masks is None:
            entries, most = self.tokens.shape
            self._grammar_masks = np.empty((entries, most, words), dtype=np.int32)
        return self._grammar_masks[first : first + count, :width]

    def drafter_failed(self, error: Exception, lost: NDArray[np.int64] | None = None) -> None:
        """Note what the drafter raised, the first of it, and the blocks whose KV it has `lost`, all of it."""
        blocks = np.zeros(0, np.int64) if lost is None else lost
        if self.draft_fault is not None:
            error, blocks = self.draft_fault.error, np.concatenate([self.draft_fault.blocks, blocks])
        self.draft_fault = DraftFault(error, blocks)

    @property
    def has_ended(self) -> bool:
        """Whether its last launch, which was executed or enqueued, has come to its end."""
        return True

    @property
    def is_enqueued(self) -> bool:
        """Whether a launch may return before it has come to its end, as on a GPU."""
        return False

    def header(self) -> Header:
        """The planned launch's counts."""
        return Header.of(self.record)


def section_arrays(flat: NDArray[np.int64], layout: Layout) -> dict[str, NDArray[np.int64]]:
    """Views of the sections of a flat buffer, by name."""
    return {name: flat[offset : offset + length] for name, (offset, length) in layout.items()}


class Ring:
    """`depth + 1` slots, used in turn: launch i has slot i modulo their number. Which launches are in flight only the
    scheduler knows."""

    def __init__(
        self,
        scheduler: Scheduler,
        num_speculative_tokens: int,
        depth: int,
        make_slot: Callable[[Scheduler, int], RingSlot] = RingSlot,
    ) -> None:
        self.depth = depth
        self._slots = [make_slot(scheduler, num_speculative_tokens) for _ in range(depth + 1)]

    def slot(self, launch_id: int) -> RingSlot:
        """The slot of a launch in flight, of the last that settled, or of the next."""
        return self._slots[launch_id % len(self._slots)]
