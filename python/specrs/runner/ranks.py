"""A launch on every rank: rank 0 tells the others of its record and runs it as they do. Plans nothing."""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from specrs.drafters.base import DrafterCounts
from specrs.errors import RankLostError
from specrs.parallel.connection import Kind
from specrs.parallel.team import Team
from specrs.runner.cpu import CpuRunner
from specrs.runner.extras import ExtrasLookup
from specrs.runner.ring import Header, Layout, RingSlot, used_part

if TYPE_CHECKING:
    from specrs.runner.cuda.runner import CudaRunner  # and Triton


class LeadingRunner:
    """Rank 0's runner. An exception in a launch, here or elsewhere, ends the engine: ranks would no longer agree. (A
    drafter's is none on a CPU: `specrs.runner.host`.)"""

    def __init__(self, runner: CpuRunner | CudaRunner, team: Team, layout: Layout, end: Callable[[], None]) -> None:
        """`runner` executes rank 0's part; `layout` is that of the record. `end` is called once: when this is closed,
        or not used any more."""
        self.runner = runner
        self.team = team
        self._layout = layout
        self._num_launches = 0
        self._untold: deque[tuple[int, RingSlot, Header]] = deque()  # launches whose results were not compared yet
        self._end = weakref.finalize(self, end)

    @property
    def num_target_passes(self) -> int:
        """See `Runner`; like what follows."""
        return self.runner.num_target_passes

    @num_target_passes.setter
    def num_target_passes(self, value: int) -> None:
        self.runner.num_target_passes = value

    @property
    def drafter(self) -> DrafterCounts | None:
        """What drafts on this rank."""
        return self.runner.drafter

    @property
    def kv_cache(self) -> Any:
        """Rank 0's part of the target's."""
        return self.runner.kv_cache

    def use_extras(self, lookup: ExtrasLookup) -> None:
        """Grammars are rank 0's alone: it hands their masks to the others."""
        self.runner.use_extras(lookup)

    def launch(self, slot: RingSlot, header: Header) -> None:
        """Execute the launch on every rank. An interrupt waits until it has ended, so that none of them is left in it.

        Raises RankLostError, which names the rank that is the cause.
        """
        with _held_interrupts():
            used = used_part(header, self._layout, constraints=True)
            self.team.send(Kind.LAUNCH, slot.record[:used].view(np.uint8).data)
            try:
                self.runner.launch(slot, header)
            except BaseException as fault:
                raise self.team.failed(fault) from fault
            self._untold.append((self._num_launches, slot, header))
            self._num_launches += 1
            self._tell()

    def wait(self, slot: RingSlot) -> None:
        """Block until the launch of `slot` has delivered its results. Raises RankLostError."""
        try:
            self.runner.wait(slot)
        except Exception as fault:
            raise self.team.failed(fault) from fault
        self._tell()

    def _tell(self) -> None:
        """Have the results of launches compared that have ended."""
        while self._untold and self._untold[0][1].has_ended:
            number, slot, header = self._untold.popleft()
            self.team.done(number, checksum(slot, header))

    def close(self) -> None:
        """End all ranks, behind the last launch."""
        with contextlib.suppress(RankLostError):
            for _, slot, _ in list(self._untold):
                self.wait(slot)
        self.runner.close()
        self._end()


def checksum(slot: RingSlot, header: Header) -> int:
    """Of what an executed launch reported. Tokens behind those emitted mean nothing."""
    count, arrays = header.num_decode + header.num_prefill, slot.results_arrays
    told = [arrays[name][:count] for name in ("num_emitted", "num_accepted", "num_drafted", "flags", "finish_reason")]
    tokens = slot.tokens[:count]
    emitted = tokens[np.arange(tokens.shape[1]) < told[0][:, None]]
    return zlib.crc32(np.concatenate([*told, emitted]).data)


@contextlib.contextmanager
def _held_interrupts() -> Iterator[None]:
    """Keep back SIGINT until the end. Python hands signals to the main thread alone."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[-1])
