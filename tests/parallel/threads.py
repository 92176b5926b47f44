"""Ranks as threads of one process, each with connections of its own. Holds no tests."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from specrs.parallel.ranks import Ranks
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

ResultT = TypeVar("ResultT")
TIMEOUT = 20.0


def on_ranks(size: int, work: Callable[[Ranks], ResultT], timeout: float = TIMEOUT) -> list[ResultT]:
    """Return what `work` returns on each of `size` ranks, which run at once. If some raise, raises the first error,
    because the others may follow from it.

    Connections are kept until all ranks have returned. gloo resets connections that it closes, and another rank may
    still have to read from them, or be connecting.
    """
    store, kept = dist.HashStore(), []

    def one(rank: int) -> ResultT:
        ranks = Ranks(store, rank, size, address="127.0.0.1", timeout=timeout)
        kept.append(ranks)
        return work(ranks)

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(one, rank) for rank in range(size)]
        for ended in as_completed(running):
            ended.result()
    return [ended.result() for ended in running]


@pytest.fixture
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one kernel at a time, because Triton's interpreter replaces functions in Triton's modules while a kernel
    runs."""
    run, running = InterpretedFunction.run, threading.Lock()

    def alone(self: Any, *args: Any, **named: Any) -> Any:
        with running:
            return run(self, *args, **named)

    monkeypatch.setattr(InterpretedFunction, "run", alone)


@pytest.fixture
def norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute norms in float64. Rounded to fp32 as in transformers, a difference of 1e-16 between sums of ranks would
    become 1e-6 in a logit."""
    to_fp32 = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_fp32(x))
