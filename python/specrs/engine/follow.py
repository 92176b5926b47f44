"""What a rank other than 0 does: it connects, loads its part, and runs every launch that rank 0 tells of. Plans
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

from specrs.config import EngineConfig
from specrs.engine.blueprint import Blueprint
from specrs.engine.device import current, device_of_rank, device_type
from specrs.engine.runners import make_runner, num_blocks, slot_type
from specrs.engine.threads import VARIABLE, physical_cores
from specrs.engine.weights import load_weights
from specrs.errors import SpecrsError
from specrs.parallel.connection import BEGUN, DID, Beat, Connection, DisconnectedError, Kind
from specrs.parallel.gpus import connect_gpus
from specrs.parallel.ranks import ExchangeError, Ranks
from specrs.parallel.start import Meeting, follow_under_torchrun, torchrun_rank
from specrs.runner.ranks import checksum
from specrs.runner.ring import Header, Ring, RingSlot

logger = logging.getLogger("specrs")


def serve_under_torchrun(config: EngineConfig) -> int:
    """On a rank other than 0: serve rank 0's launches; the exit code."""
    connection, meeting = follow_under_torchrun(config.tensor_parallel_size, config.distributed_timeout)
    return serve_rank(connection, lambda setup: meeting, lost=lambda: os._exit(1))


def serve_rank(connection: Connection, meet: Callable[[dict[str, Any]], Meeting], *, lost: Callable[[], None]) -> int:
    """Serve the launches that rank 0 tells of, until it ends; the exit code, 1 unless it has said so.

    `meet`: where the ranks meet, from what rank 0 says first. `lost` is called in another thread when rank 0 is gone,
    or when a launch on a GPU did not come to its end.
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
    """Tell rank 0 why this rank ends."""
    kind, what = (Kind.LOST, str(fault)) if isinstance(fault, ExchangeError) else (Kind.FAILED, repr(fault))
    with contextlib.suppress(DisconnectedError):
        connection.send(kind, what.encode())


def _follow(connection: Connection, meeting: Meeting, config: EngineConfig, lost: Callable[[], None]) -> None:
    """A rank other than 0, from its setup to the end of the engine."""
    assert config.threads is not None
    torch.set_num_threads(config.threads)
    connection.send_json(Kind.HERE, {})
    begun: list[Ranks] = []
    with contextlib.closing(Beat(connection, lambda: BEGUN.pack(begun[0].num_begun if begun else 0), lost)):
        ranks = connect(meeting, config)
        begun.append(ranks)
        with current(ranks.device):
            _serve(connection, ranks, config, lost)
        ranks.close()


def _serve(connection: Connection, ranks: Ranks, config: EngineConfig, lost: Callable[[], None]) -> None:
    blueprint = Blueprint(config, load_weights(config, ranks)).with_kv_groups()
    connection.send_json(Kind.READY, {"num_blocks": num_blocks(blueprint)})
    started = connection.receive_news()
    if started.kind == Kind.END:
        return
    blocks = started.json()["num_blocks"]
    scheduler = blueprint.scheduler(blocks)  # plans nothing here, and knows the layout of records
    runner = make_runner(blueprint, scheduler, blocks, ranks)
    ring = Ring(scheduler, blueprint.num_speculative_tokens, blueprint.depth, slot_type(blueprint))
    launches = 0
    with contextlib.closing(runner), contextlib.closing(Reporter(connection, runner.wait, lost)) as reporter:
        while (message := connection.receive_news()).kind == Kind.LAUNCH:
            slot = ring.slot(launches)
            reporter.wait_until_told(launches - ring.depth - 1)  # of the launch that had the slot before
            record = np.frombuffer(message.body, dtype=np.int64)
            slot.record[: len(record)] = record
            header = slot.header()
            runner.launch(slot, header)
            slot.draft_fault = None  # rank 0's counts, and its engine plans by it
            reporter.launched(launches, slot, header)
            launches += 1


class Reporter:
    """Tells rank 0 what came of each launch, in their order: of one that is enqueued in a thread of its own, because
    the next is to be enqueued before it has ended."""

    def __init__(self, connection: Connection, wait: Callable[[RingSlot], None], lost: Callable[[], None]) -> None:
        """`wait(slot)` returns when the launch in `slot` has ended. Where it raises, rank 0 is told, and `lost` called
        in the thread."""
        self._connection, self._wait, self._lost = connection, wait, lost
        self._queue: queue.SimpleQueue[tuple[int, RingSlot, Header] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._told = -1  # the last launch that was
        self._thread: threading.Thread | None = None

    def launched(self, number: int, slot: RingSlot, header: Header) -> None:
        """A launch was executed or enqueued. Raises DisconnectedError."""
        if not slot.is_enqueued:
            self._tell(number, slot, header)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="specrs-rank-results", daemon=True)
            self._thread.start()
        self._queue.put((number, slot, header))

    def wait_until_told(self, number: int) -> None:
        """Return when rank 0 was told of launch `number`, and so of all before."""
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
        """Tell of what is enqueued, and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()


def connect(meeting: Meeting, config: EngineConfig) -> Ranks:
    """The connections to all other ranks; waits for them.

    Raises:
        ExchangeError: they did not come about.
        InvalidConfigError: this rank has no device to itself.
    """
    device = device_of_rank(config.device, meeting.size, meeting.place)
    timeout = meeting.exchange_timeout(config.distributed_timeout)
    ranks = Ranks(meeting.store, meeting.rank, meeting.size, address=meeting.address, timeout=timeout)
    if device_type(device) == "cuda":
        ranks.device = torch.device(device)
        try:
            with current(device):
                ranks.exchanges = connect_gpus(ranks, meeting.store, ranks.device, timeout, meeting.place[1])
        except RuntimeError as fault:
            raise ExchangeError(f"rank {meeting.rank} could not connect to the other GPUs: {fault}") from fault
        return ranks
    speculative = config.speculative_config
    if speculative is not None and not speculative.on_host:
        ranks.connect_drafting()
    return ranks


def threads_of_rank(config: EngineConfig) -> int:
    """Of torch's passes and of the native ones: as many as are asked for, else its share of the cores."""
    for given in (config.threads, os.environ.get(VARIABLE), os.environ.get("OMP_NUM_THREADS")):
        if isinstance(given, int) or (given is not None and given.strip().isdecimal()):
            return max(1, int(given))
    here = os.environ.get("LOCAL_WORLD_SIZE") if torchrun_rank() is not None else None
    return max(1, physical_cores() // (config.tensor_parallel_size if here is None else int(here)))
