"""What a rank other than 0 does: it connects, loads its part, and runs every launch that rank 0 tells of. Plans
nothing."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from specrs.config import EngineConfig
from specrs.engine.blueprint import Blueprint
from specrs.engine.runners import make_runner, num_blocks
from specrs.engine.threads import VARIABLE, physical_cores
from specrs.engine.weights import load_weights
from specrs.errors import SpecrsError
from specrs.parallel.connection import BEGUN, DID, Beat, Connection, DisconnectedError, Kind
from specrs.parallel.ranks import ExchangeError, Ranks
from specrs.parallel.start import Meeting, follow_under_torchrun, torchrun_rank
from specrs.runner.ranks import checksum
from specrs.runner.ring import RingSlot

logger = logging.getLogger("specrs")


def serve_under_torchrun(config: EngineConfig) -> int:
    """On a rank other than 0: serve rank 0's launches; the exit code."""
    connection, meeting = follow_under_torchrun(config.tensor_parallel_size, config.distributed_timeout)
    return serve_rank(connection, lambda setup: meeting, lost=lambda: os._exit(1))


def serve_rank(connection: Connection, meet: Callable[[dict[str, Any]], Meeting], *, lost: Callable[[], None]) -> int:
    """Serve the launches that rank 0 tells of, until it ends; the exit code, 1 unless it has said so.

    `meet`: where the ranks meet, from what rank 0 says first. `lost` is called in another thread when rank 0 is gone.
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
    except ExchangeError as fault:
        _tell(connection, Kind.LOST, str(fault))
    except BaseException as fault:
        _tell(connection, Kind.FAILED, repr(fault))
        if not isinstance(fault, SpecrsError):
            logger.exception("%s failed", rank)
    finally:
        connection.close()
    return 1


def _tell(connection: Connection, kind: Kind, what: str) -> None:
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
        blueprint = Blueprint(config, load_weights(config, ranks)).with_kv_groups()
        connection.send_json(Kind.READY, {"num_blocks": num_blocks(blueprint)})
        started = connection.receive_news()
        if started.kind == Kind.END:
            return
        blocks = started.json()["num_blocks"]
        scheduler = blueprint.scheduler(blocks)  # plans nothing here, and knows the layout of records
        runner = make_runner(blueprint, scheduler, blocks, ranks)
        slot = RingSlot(scheduler, blueprint.num_speculative_tokens, pinned=False)
        launches = 0
        with contextlib.closing(runner):
            while (message := connection.receive_news()).kind == Kind.LAUNCH:
                record = np.frombuffer(message.body, dtype=np.int64)
                slot.record[: len(record)] = record
                header = slot.header()
                runner.launch(slot, header)
                slot.draft_fault = None  # rank 0's counts, and its engine plans by it
                connection.send(Kind.DONE, DID.pack(launches, checksum(slot, header)))
                launches += 1


def connect(meeting: Meeting, config: EngineConfig) -> Ranks:
    """The connections to all other ranks; waits for them. Raises ExchangeError."""
    timeout = meeting.exchange_timeout(config.distributed_timeout)
    ranks = Ranks(meeting.store, meeting.rank, meeting.size, address=meeting.address, timeout=timeout)
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
