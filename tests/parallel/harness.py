"""Engines whose other ranks are threads of this process. Holds no tests."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.follow import serve_rank
from specrs.parallel.connection import Connection
from specrs.parallel.start import LOCAL, Meeting
from specrs.parallel.team import Team


@contextlib.contextmanager
def engine_on_threads(config: EngineConfig, *, exit_code: int = 0) -> Iterator[Engine]:
    """Run an engine of `config` whose other ranks are threads, with the exchanges and connections of processes. At the
    end, checks that these ranks end with `exit_code`."""
    codes: list[int] = []
    threads: list[threading.Thread] = []

    def lead(size: int, timeout: float, module: str, setup: dict[str, Any]) -> tuple[Team, Meeting]:
        store, ours = dist.HashStore(), {}

        def serve(rank: int, end: socket.socket) -> None:
            meeting = Meeting(store, rank, size, LOCAL)
            codes.append(serve_rank(Connection(end, timeout), lambda _: meeting, lost=lambda: None))

        for rank in range(1, size):
            one, other = socket.socketpair()
            ours[rank] = Connection(one, timeout)
            threads.append(threading.Thread(target=serve, args=(rank, other)))
            threads[-1].start()
        team = Team(ours, timeout=timeout)
        team.setup(lambda rank: {**setup, "rank": rank, "size": size})
        return team, Meeting(store, 0, size, LOCAL)

    engine = build_engine(config, lead=lead)
    try:
        yield engine
    finally:
        engine.close()
        for thread in threads:
            thread.join()
    assert codes == [exit_code] * (config.tensor_parallel_size - 1)
