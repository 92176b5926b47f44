"""Ranks as threads of one process, each with connections of its own. Holds no tests."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch.distributed as dist
from specrs.parallel.ranks import Ranks
from triton.runtime.interpreter import InterpretedFunction

ResultT = TypeVar("ResultT")
TIMEOUT = 20.0


def on_ranks(size: int, work: Callable[[Ranks], ResultT], timeout: float = TIMEOUT) -> list[ResultT]:
    """What `work` returns on each of `size` ranks, which run at once.

    Connections are kept until all have returned: gloo resets those that it closes, and another rank may still have to
    read from them, or be connecting.
    """
    store, kept = dist.HashStore(), []

    def one(rank: int) -> ResultT:
        ranks = Ranks(store, rank, size, address="127.0.0.1", timeout=timeout)
        kept.append(ranks)
        return work(ranks)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.fixture
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter puts functions of its own into Triton's modules while a kernel runs."""
    run, running = InterpretedFunction.run, threading.Lock()

    def alone(self: Any, *args: Any, **named: Any) -> Any:
        with running:
            return run(self, *args, **named)

    monkeypatch.setattr(InterpretedFunction, "run", alone)
