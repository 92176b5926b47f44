"""Runner of rank 0 in tensor parallelism: sends each step's record to the other ranks and runs it with them."""

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

from specrs.backends.base import Runner
from specrs.backends.extras import ExtrasLookup
from specrs.backends.ring import Header, RingSlot
from specrs.core import CostModel
from specrs.drafters.base import DrafterCounts
from specrs.errors import RankLostError
from specrs.parallel.connection import Kind
from specrs.parallel.team import Team

if TYPE_CHECKING:
    from specrs.backends.rank_loras import LeadingLoRAs  # and torch


class LeadingRunner:
    """Runner of rank 0. An exception in a step, on any rank, ends the engine, because ranks would no longer agree.

    Exceptions of a drafter on a CPU do not end it: see `specrs.backends.cpu.host`.
    """

    def __init__(self, runner: Runner, team: Team, end: Callable[[], None], loras: LeadingLoRAs | None = None) -> None:
        """Wrap `runner`, which executes rank 0's part. `end` is called once: when this is closed or garbage collected.
        `loras` sends LoRA adapters to the other ranks; None: no request has one."""
        self.runner = runner
        self.team = team
        self.loras = loras
        self._num_steps = 0
        self._untold: deque[tuple[int, RingSlot, Header]] = deque()  # steps whose results are not compared yet
        self._end = weakref.finalize(self, end)

    @property
    def num_target_passes(self) -> int:
        """Number of passes of the target so far."""
        return self.runner.num_target_passes

    @num_target_passes.setter
    def num_target_passes(self, value: int) -> None:
        self.runner.num_target_passes = value

    @property
    def drafter(self) -> DrafterCounts | None:
        """The drafter on this rank. None without speculation."""
        return self.runner.drafter

    @property
    def supports_pooling(self) -> bool:
        """True if rank 0's own runner returns the hidden states of requests with pooling."""
        return self.runner.supports_pooling

    @property
    def is_native(self) -> bool:
        """False, because steps wait for other ranks and their times differ."""
        return False

    def step_costs(self, *, on_host: bool, has_lora: bool = False) -> CostModel | None:
        """Return None: a replay on one rank would wait for the others."""
        return None

    @property
    def kv_cache(self) -> Any:
        """Rank 0's part of the target's KV cache."""
        return self.runner.kv_cache

    def use_extras(self, lookup: ExtrasLookup) -> None:
        """Set the function that finds the grammar of a request id. Rank 0 alone has grammars, and sends their masks to
        the others."""
        self.runner.use_extras(lookup)

    def execute(self, slot: RingSlot, header: Header) -> None:
        """Execute the step in `slot.record` on every rank. SIGINT is held back until the end, so that no rank is left
        inside a step.

        Raises RankLostError, which names the rank that failed.
        """
        with _held_interrupts():
            if self.loras is not None and header.num_admitted:
                self.loras.send_new(slot.record_arrays["admit_lora"][: header.num_admitted].tolist())
            self.team.send(Kind.STEP, slot.record[: header.used_len].view(np.uint8).data)
            try:
                self.runner.execute(slot, header)
            except BaseException as fault:
                raise self.team.failed(fault) from fault
            self._untold.append((self._num_steps, slot, header))
            self._num_steps += 1
            self._tell()

    def wait(self, slot: RingSlot) -> None:
        """Block until the step in `slot` has delivered its results. Raises RankLostError if a rank has failed, ended or
        does not respond."""
        try:
            self.runner.wait(slot)
        except Exception as fault:
            raise self.team.failed(fault) from fault
        self._tell()

    def _tell(self) -> None:
        """Send the checksums of finished steps to the team, which compares them among ranks."""
        while self._untold and self._untold[0][1].has_ended:
            number, slot, header = self._untold.popleft()
            self.team.done(number, checksum(slot, header))

    def close(self) -> None:
        """Wait for the last step, then end all ranks."""
        with contextlib.suppress(RankLostError):
            for _, slot, _ in list(self._untold):
                self.wait(slot)
        self.runner.close()
        self._end()


def checksum(slot: RingSlot, header: Header) -> int:
    """Return the CRC-32 of a step's results. Tokens after the emitted ones are left out."""
    count, arrays = header.num_decode + header.num_prefill, slot.results_arrays
    told = [arrays[name][:count] for name in ("num_emitted", "num_accepted", "num_drafted", "flags", "finish_reason")]
    tokens = slot.tokens[:count]
    emitted = tokens[np.arange(tokens.shape[1]) < told[0][:, None]]
    return zlib.crc32(np.concatenate([*told, emitted]).data)


@contextlib.contextmanager
def _held_interrupts() -> Iterator[None]:
    """Hold back SIGINT until the end of the context. Does nothing outside the main thread, which alone gets signals."""
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
