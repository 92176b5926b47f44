"""Recordings of steps: their records and results in a file, to be replayed on any runner. Keeps no text.

A record holds all that a step needs, except extras (`RequestExtras`). So a fault can be repeated on another machine, on
the other runner, or under a debugger. A replay runs all steps from the first on, because row state and KV are what the
earlier steps left. It needs a fresh runner with the settings of the recorded one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrs.backends.ring import Header, Layout, RingSlot, section_arrays
from specrs.core import HEADER_FIELDS, Scheduler
from specrs.errors import EngineError


class Executor(Protocol):
    """Part of a runner that a replay needs."""

    def execute(self, slot: RingSlot, header: Header) -> None:
        """Execute or enqueue the step planned in `slot.record`."""

    def wait(self, slot: RingSlot) -> None:
        """Wait until `slot.results` has the step's results."""


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """Results of one sequence in a step."""

    step_id: int
    sequence: int
    """Index of the sequence in the step."""
    counts: dict[str, int]
    """Results by section name, except `tokens`."""
    tokens: list[int]
    """Emitted tokens."""


@dataclass(slots=True)
class Recording:
    """Recorded steps in order. `engine.watch = recording` adds each step when it settles."""

    layouts: dict[str, Layout]
    """For `record`, its `header` and `results`: offset and length, in elements, of each section."""
    num_speculative_tokens: int
    records: list[NDArray[np.int64]] = field(default_factory=list)
    results: list[NDArray[np.int64]] = field(default_factory=list)

    @classmethod
    def of(cls, scheduler: Scheduler, num_speculative_tokens: int) -> Recording:
        """Return an empty recording for the steps that `scheduler` plans."""
        return cls(layouts_of(scheduler), num_speculative_tokens)

    def __call__(self, slot: RingSlot, header: Header, ms: float) -> None:
        """Copy a settled step. This makes a recording a `specrs.engine.engine.Watch`."""
        self.records.append(slot.record.copy())
        self.results.append(slot.results.copy())

    def __len__(self) -> int:
        return len(self.records)

    def sequences(self) -> list[SequenceResult]:
        """Return the results of all sequences, decoding ones and prompt chunks, step by step."""
        both = zip(self.records, self.results, strict=True)
        return [sequence for record, results in both for sequence in self._sequences(record, results)]

    def save(self, path: Path) -> None:
        """Write the recording to `path` as a compressed NumPy archive. Records are mostly zeros."""
        about = {"layouts": self.layouts, "num_speculative_tokens": self.num_speculative_tokens}
        with path.open("wb") as file:
            np.savez_compressed(
                file, about=np.array(json.dumps(about)), records=np.array(self.records), results=np.array(self.results)
            )

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Return the recording that `save` wrote to `path`.

        Raises:
            EngineError: the file is not a recording.
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
            raise EngineError(f"path={str(path)!r}: not a recording of steps: {error}") from error

    def replay(
        self,
        runner: Executor,
        scheduler: Scheduler,
        make_slot: Callable[[Scheduler, int], RingSlot] = RingSlot,
    ) -> Recording:
        """Run every step on a fresh `runner`, one after the other. Return a recording of the same steps with its
        results.

        Args:
            scheduler: has the same settings, for the layouts of its buffers. It plans nothing.
            make_slot: makes the slot that the runner reads, for the scheduler and its K.

        Raises:
            EngineError: the layouts differ, naming the first section that does; or a step needs extras, or a LoRA
                adapter, and the runner has none.
        """
        check_layouts(self.layouts, layouts_of(scheduler))
        again = Recording(self.layouts, self.num_speculative_tokens)
        slot = make_slot(scheduler, self.num_speculative_tokens)
        for record in self.records:
            slot.record[:] = record
            header = slot.header()
            if getattr(runner, "loras", None) is None and slot.record_arrays["admit_lora"][: header.num_admitted].any():
                raise EngineError(f"step {header.step_id} needs a LoRA adapter, which no record holds")
            runner.execute(slot, header)
            runner.wait(slot)
            again(slot, header, 0.0)
        return again

    def _sequences(self, record: NDArray[np.int64], results: NDArray[np.int64]) -> Iterator[SequenceResult]:
        header, sections = Header.of(record), section_arrays(results, self.layouts["results"])
        tokens = sections["tokens"].reshape(-1, self.num_speculative_tokens + 1)
        for sequence in range(header.num_decode + header.num_prefill):
            counts = {name: int(sections[name][sequence]) for name in sections if name != "tokens"}
            yield SequenceResult(header.step_id, sequence, counts, tokens[sequence, : counts["num_emitted"]].tolist())


def layouts_of(scheduler: Scheduler) -> dict[str, Layout]:
    """Return the layouts of the record, its header and the results of `scheduler`."""
    header = {name: (index, 1) for index, name in enumerate(HEADER_FIELDS)}
    return {"record": scheduler.record_layout(), "header": header, "results": scheduler.results_layout()}


def check_layouts(recorded: dict[str, Layout], given: dict[str, Layout]) -> None:
    """Compare layouts by buffer. Raises EngineError, which names the first section that differs."""
    for buffer, sections in given.items():
        before = recorded.get(buffer, {})
        for name in before.keys() | sections.keys():
            was, now = before.get(name), sections.get(name)
            if was != now:
                raise EngineError(
                    f"{buffer}.{name}={now}: the recording has {was} (offset, length); replay it with the settings "
                    f"and the version that it was recorded with"
                )
