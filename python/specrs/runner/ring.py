"""Upload and result buffers of the launches in flight. Holds no row state; a slot is reused only after its launch
has settled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrs.core import HEADER_FIELDS, Scheduler
from specrs.verify.logprobs import TokenLogprobs

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


@dataclass(frozen=True, slots=True)
class DraftFault:
    """A drafter on the device that failed in a launch, which went on without its drafts."""

    error: Exception
    blocks: NDArray[np.int64]
    """Whose draft KV it was to write before any draft, and has not."""


class RingSlot:
    """One launch's buffers: the record that Rust plans into, the results that the device reports into.

    All are flat int64; `record`, `results` and `settled` are numpy arrays, `views` and `results_view` are torch views
    of the same memory by section name. With `pinned` the memory is page-locked, so that a GPU copies it by itself;
    `done` is then recorded behind the copy of the results.
    """

    def __init__(self, scheduler: Scheduler, num_speculative_tokens: int, *, pinned: bool) -> None:
        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, pin_memory=pinned)

        self.pinned_record, self.pinned_results = zeros(scheduler.record_size), zeros(scheduler.results_size)
        self.record: NDArray[np.int64] = self.pinned_record.numpy()
        self.results: NDArray[np.int64] = self.pinned_results.numpy()
        self.settled: NDArray[np.int64] = np.zeros(scheduler.settled_size, dtype=np.int64)
        self.views = section_views(self.pinned_record, scheduler.record_layout())
        self.results_view = Results.of(
            section_views(self.pinned_results, scheduler.results_layout()), num_speculative_tokens
        )
        # The same as numpy, for what the host looks at in every launch: slicing a tensor takes ten times as long.
        self.record_arrays = section_arrays(self.record, scheduler.record_layout())
        self.results_arrays = section_arrays(self.results, scheduler.results_layout())
        self.started = 0.0  # when it was planned, by time.perf_counter
        self.executed = -1  # id of the last launch that the runner took to its end, or enqueued as a whole
        self.delivered = -1  # id of the last launch whose results all requests have
        self.done = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self.logprobs: dict[int, TokenLogprobs] = {}  # by entry, where its request wants any
        self.prompt_logprobs: list[tuple[int, int, TokenLogprobs]] = []  # request id, first position, values
        self.draft_fault: DraftFault | None = None  # of the launch that ran last
        self.merged = False  # of that launch: prompt chunks were rows of its verification
        self._grammar_masks: NDArray[np.int32] | None = None
        self.settled_arrays = section_arrays(self.settled, scheduler.settled_layout())

    def grammar_masks(self, first: int, count: int, width: int, words: int) -> NDArray[np.int32]:
        """Room for the masks of `count` entries from `first` on, `width` rows of `words` int32 each; kept between
        launches, and made when a launch first asks for it."""
        if self._grammar_masks is None:
            entries, most = self.results_view.tokens.shape
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
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]

    def header(self) -> Header:
        """The planned launch's counts."""
        return Header.of(self.record)


def blocks_of(slots: Tensor, block_size: int) -> NDArray[np.int64]:
    """The blocks of KV slots `[N]` on the host, -1 for none, ascending."""
    return np.unique(slots[slots >= 0].numpy() // block_size)


def section_views(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The sections of a flat buffer by name."""
    return {name: flat.narrow(0, offset, length) for name, (offset, length) in layout.items()}


def section_arrays(flat: NDArray[np.int64], layout: Layout) -> dict[str, NDArray[np.int64]]:
    """The same of a numpy buffer."""
    return {name: flat[offset : offset + length] for name, (offset, length) in layout.items()}


class Ring:
    """`depth + 1` slots, used in turn: launch i has slot i modulo their number. Which launches are in flight only the
    scheduler knows."""

    def __init__(self, scheduler: Scheduler, num_speculative_tokens: int, depth: int, *, pinned: bool) -> None:
        self.depth = depth
        self._slots = [RingSlot(scheduler, num_speculative_tokens, pinned=pinned) for _ in range(depth + 1)]

    def slot(self, launch_id: int) -> RingSlot:
        """The slot of a launch in flight, of the last that settled, or of the next."""
        return self._slots[launch_id % len(self._slots)]
