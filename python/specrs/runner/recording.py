"""Launches as a file: records and what came of them, replayed on any runner. Plans nothing and keeps no text.

A record is all that a launch needs, but for extras (`RequestExtras`), so a fault seen once can be run again: on another
machine, on the other runner, under a debugger. Launches are replayed from the first on, because row state and KV are
what the earlier ones left. Their runner must be fresh, and built with the settings of the one that was recorded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrs.core import Scheduler
from specrs.errors import EngineError
from specrs.runner.ring import Header, Layout, RingSlot, section_arrays


class Launches(Protocol):
    """The part of a runner that a replay asks for."""

    def launch(self, slot: RingSlot, header: Header) -> None:
        """Execute or enqueue the launch planned in `slot.record`."""

    def wait(self, slot: RingSlot) -> None:
        """Return when `slot.results` hold what the launch reported."""


@dataclass(frozen=True, slots=True)
class EntryResult:
    """What a launch reported of one of its entries."""

    launch_id: int
    entry: int
    counts: dict[str, int]
    """By the names of the results' sections, but `tokens`."""
    tokens: list[int]
    """Those emitted."""


@dataclass(slots=True)
class Recording:
    """Launches in their order. `engine.watch = recording` adds every launch that settles whole."""

    layouts: dict[str, Layout]
    """Of `record` and `results`: sections by name, offset and length."""
    num_speculative_tokens: int
    records: list[NDArray[np.int64]] = field(default_factory=list)
    results: list[NDArray[np.int64]] = field(default_factory=list)

    @classmethod
    def of(cls, scheduler: Scheduler, num_speculative_tokens: int) -> Recording:
        """An empty recording of the launches that `scheduler` plans."""
        return cls(layouts_of(scheduler), num_speculative_tokens)

    def __call__(self, slot: RingSlot, header: Header, ms: float) -> None:
        """Copy a settled launch; see `specrs.engine.engine.Watch`."""
        self.records.append(slot.record.copy())
        self.results.append(slot.results.copy())

    def __len__(self) -> int:
        return len(self.records)

    def entries(self) -> list[EntryResult]:
        """What was reported of every entry, decoding and prompt chunks alike, launch by launch."""
        both = zip(self.records, self.results, strict=True)
        return [entry for record, results in both for entry in self._entries(record, results)]

    def save(self, path: Path) -> None:
        """Write it as a numpy archive, compressed: a record is mostly zeros."""
        about = {"layouts": self.layouts, "num_speculative_tokens": self.num_speculative_tokens}
        with path.open("wb") as file:
            np.savez_compressed(
                file, about=np.array(json.dumps(about)), records=np.array(self.records), results=np.array(self.results)
            )

    @classmethod
    def load(cls, path: Path) -> Recording:
        """What `save` wrote.

        Raises:
            EngineError: the file holds something else.
        """
        try:
            with np.load(path, allow_pickle=False) as archive:
                about = json.loads(str(archive["about"]))
                records, results = list(archive["records"]), list(archive["results"])
            layouts = {
                buffer: {name: (offset, length) for name, (offset, length) in sections.items()}
                for buffer, sections in about["layouts"].items()
            }
            return cls(layouts, about["num_speculative_tokens"], records, results)
        except (OSError, ValueError, KeyError) as error:
            raise EngineError(f"path={str(path)!r}: not a recording of launches: {error}") from error

    def replay(
        self,
        runner: Launches,
        scheduler: Scheduler,
        make_slot: Callable[[Scheduler, int], RingSlot] = RingSlot,
    ) -> Recording:
        """Hand every launch to a fresh `runner`, one after the other; the same launches with what it reported.

        Args:
            scheduler: one of the same settings, for the layouts of its buffers; it plans nothing.
            make_slot: makes the slot that the runner reads, for the scheduler and its K.

        Raises:
            EngineError: the layouts differ, naming the first section that does; or a launch needs extras, or a LoRA
                adapter, and the runner has none.
        """
        check_layouts(self.layouts, layouts_of(scheduler))
        again = Recording(self.layouts, self.num_speculative_tokens)
        slot = make_slot(scheduler, self.num_speculative_tokens)
        for record in self.records:
            slot.record[:] = record
            header = slot.header()
            if getattr(runner, "loras", None) is None and slot.record_arrays["admit_lora"][: header.num_admitted].any():
                raise EngineError(f"launch {header.launch_id} needs a LoRA adapter, which no record holds")
            runner.launch(slot, header)
            runner.wait(slot)
            again(slot, header, 0.0)
        return again

    def _entries(self, record: NDArray[np.int64], results: NDArray[np.int64]) -> Iterator[EntryResult]:
        header, sections = Header.of(record), section_arrays(results, self.layouts["results"])
        tokens = sections["tokens"].reshape(-1, self.num_speculative_tokens + 1)
        for entry in range(header.num_decode + header.num_prefill):
            counts = {name: int(sections[name][entry]) for name in sections if name != "tokens"}
            yield EntryResult(header.launch_id, entry, counts, tokens[entry, : counts["num_emitted"]].tolist())


def layouts_of(scheduler: Scheduler) -> dict[str, Layout]:
    """The layouts of the buffers that `scheduler` plans into and settles from."""
    return {"record": scheduler.record_layout(), "results": scheduler.results_layout()}


def check_layouts(recorded: dict[str, Layout], given: dict[str, Layout]) -> None:
    """Raises EngineError naming the first section of `recorded` that lies elsewhere in `given`."""
    for buffer, sections in recorded.items():
        for name in sections.keys() | given[buffer].keys():
            was, now = sections.get(name), given[buffer].get(name)
            if was != now:
                raise EngineError(
                    f"{buffer}.{name}={now}: the recording has {was} (offset, length); replay it with the settings "
                    f"and the version that it was recorded with"
                )
