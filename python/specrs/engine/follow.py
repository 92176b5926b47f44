"""Runs a rank other than 0: connects, loads its part of the weights, and runs every step that rank 0 sends. Plans
nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from specrs.backends.rank_loras import ReceivedLoRAs
from specrs.backends.ranks import checksum
from specrs.backends.ring import Header, Ring, RingSlot
from specrs.backends.table import backend_of, device_of_rank
from specrs.config import EngineConfig
from specrs.engine.plan import plan_engine
from specrs.engine.weights import load_weights
from specrs.errors import SpecrsError
from specrs.parallel.connection import BEGUN, DID, Beat, Connection, DisconnectedError, ExchangeError, Kind
from specrs.parallel.ranks import Ranks
from specrs.parallel.start import Meeting, follow_under_torchrun

logger = logging.getLogger("specrs")


def serve_under_torchrun(config: EngineConfig) -> int:
    """Run rank 0's steps in a torchrun process that is not rank 0. Return the exit code."""
    connection, meeting = follow_under_torchrun(config.tensor_parallel_size, config.distributed_timeout)
    return serve_rank(connection, lambda setup: meeting, lost=lambda: os._exit(1))


def serve_rank(connection: Connection, meet: Callable[[dict[str, Any]], Meeting], *, lost: Callable[[], None]) -> int:
    """Run the steps that rank 0 sends until it ends. Return the exit code: 0 if rank 0 has said that it ends, otherwise
    1.

    `meet` takes rank 0's first message and returns the addresses at which the ranks connect to each other. `lost` is
    called in another thread if rank 0 is gone, or if a step on a GPU did not finish.
    """
    rank = "a rank"
    try:
        message = connection.receive_news()
        setup = message.json()
        rank = f"rank {setup['rank']} of {setup['size']}"
        _follow(connection, meet(setup), EngineConfig(**setup["config"]), lost)
        return 0
    except DisconnectedError as fault:
        logger.error("%s ends, because rank 0 %s", rank, fault)
    except BaseException as fault:
        tell_fault(connection, fault)
        if not isinstance(fault, SpecrsError):
            logger.exception("%s failed", rank)
    finally:
        connection.close()
    return 1


def tell_fault(connection: Connection, fault: BaseException) -> None:
    """Send rank 0 the reason why this rank ends."""
    kind, what = (Kind.LOST, str(fault)) if isinstance(fault, ExchangeError) else (Kind.FAILED, repr(fault))
    with contextlib.suppress(DisconnectedError):
        connection.send(kind, what.encode())


def _follow(connection: Connection, meeting: Meeting, config: EngineConfig, lost: Callable[[], None]) -> None:
    """Run this rank from its setup to the end of the engine."""
    assert config.threads is not None
    torch.set_num_threads(config.threads)
    connection.send_json(Kind.HERE, {})
    begun: list[Ranks] = []
    with contextlib.closing(Beat(connection, lambda: BEGUN.pack(begun[0].num_begun if begun else 0), lost)):
        ranks = connect(meeting, config)
        begun.append(ranks)
        device = str(ranks.device)
        with backend_of(device).current(device):
            _serve(connection, ranks, config, lost)
        ranks.close()


def _serve(connection: Connection, ranks: Ranks, config: EngineConfig, lost: Callable[[], None]) -> None:
    backend, blueprint = plan_engine(config, load_weights(config, ranks))
    connection.send_json(Kind.READY, {"num_blocks": backend.num_blocks(blueprint)})
    started = connection.receive_news()
    if started.kind == Kind.END:
        return
    blocks = started.json()["num_blocks"]
    scheduler = blueprint.scheduler(blocks)  # plans nothing here, and knows the layout of records
    loras = ReceivedLoRAs(blueprint.weights.decoder) if config.enable_lora else None
    runner = backend.make_runner(blueprint, scheduler, blocks, ranks, None if loras is None else loras.get)
    ring = Ring(scheduler, blueprint.num_speculative_tokens, blueprint.depth, backend.slot_type(blueprint.device))
    steps = 0
    with contextlib.closing(runner), contextlib.closing(Reporter(connection, runner.wait, lost)) as reporter:
        while (message := connection.receive_news()).kind != Kind.END:
            if message.kind != Kind.STEP:
                assert loras is not None, f"{message.kind.name}: the engine has no LoRA adapters"
                loras.receive(message)
                continue
            slot = ring.slot(steps)
            reporter.wait_until_told(steps - ring.depth - 1)  # of the step that had the slot before
            record = np.frombuffer(message.body, dtype=np.int64)
            slot.record[: len(record)] = record
            header = slot.header()
            runner.execute(slot, header)
            slot.draft_fault = None  # rank 0's counts, and its engine plans by it
            reporter.executed(steps, slot, header)
            steps += 1


class Reporter:
    """Reporter of each step's outcome to rank 0, in order. A step that is only enqueued is reported from a thread,
    because the next step is enqueued before it has ended."""

    def __init__(self, connection: Connection, wait: Callable[[RingSlot], None], lost: Callable[[], None]) -> None:
        """Prepare to report. `wait(slot)` returns when the step in `slot` has ended. If it raises, rank 0 gets a
        report, and the thread calls `lost`."""
        self._connection, self._wait, self._lost = connection, wait, lost
        self._queue: queue.SimpleQueue[tuple[int, RingSlot, Header] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._told = -1  # the last step that was
        self._thread: threading.Thread | None = None

    def executed(self, number: int, slot: RingSlot, header: Header) -> None:
        """Report step `number` to rank 0. A step that has ended is reported before this returns. One that is only
        enqueued is reported by a thread when it has ended, and a fault of that report calls `lost`.

        Raises DisconnectedError for a step that has ended, if rank 0 has closed the connection or does not accept the
        message in time.
        """
        if not slot.is_enqueued:
            self._tell(number, slot, header)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="specrs-rank-results", daemon=True)
            self._thread.start()
        self._queue.put((number, slot, header))

    def wait_until_told(self, number: int) -> None:
        """Wait until step `number`, and so all earlier ones, is reported to rank 0."""
        with self._changed:
            self._changed.wait_for(lambda: self._told >= number)

    def _tell(self, number: int, slot: RingSlot, header: Header) -> None:
        self._connection.send(Kind.DONE, DID.pack(number, checksum(slot, header)))
        with self._changed:
            self._told = number
            self._changed.notify_all()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                self._wait(work[1])
                self._tell(*work)
            except BaseException as fault:
                tell_fault(self._connection, fault)
                self._lost()
                return

    def close(self) -> None:
        """Report the steps that are still enqueued, and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()


def connect(meeting: Meeting, config: EngineConfig) -> Ranks:
    """Connect to all other ranks and return the connections. Waits for them.

    Raises:
        ExchangeError: another rank has ended or did not connect in time.
        InvalidConfigError: this rank shares its device with another one.
    """
    device = device_of_rank(config.device, meeting.size, meeting.place)
    timeout = meeting.exchange_timeout(config.distributed_timeout)
    ranks = Ranks(meeting.store, meeting.rank, meeting.size, address=meeting.address, timeout=timeout)
    backend_of(device).connect_ranks(ranks, device, meeting, config)
    return ranks
