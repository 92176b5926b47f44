"""A drafter that fails on one rank: every rank takes back what its own has done, and drafts again in later launches."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from specrs.errors import EngineError
from specrs.parallel.ranks import ExchangeError, Ranks
from specrs.runner.draft_guard import DraftGuard, Stage
from torch import Tensor

from parallel.threads import on_ranks


class Slot:
    """What a guard tells a slot."""

    def __init__(self) -> None:
        self.draft_fault: Any = None
        self.lost: list[int] = []

    def drafter_failed(self, error: Exception, lost: NDArray[np.int64]) -> None:
        self.draft_fault = error
        self.lost += lost.tolist()


class Fault(Exception):
    """What fails."""


def launch(guard: DraftGuard, work: Callable[[], object]) -> Slot:
    """One whose only stage is `work`, which was to write into block 7."""
    slot = Slot()
    guard.begin(slot)  # type: ignore[arg-type]
    with guard.stage(Stage.CATCH_UP, lambda: np.array([7])):
        work()
    guard.settle()
    return slot


@pytest.mark.parametrize("failing", [[1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("exchanges", [False, True])
def test_all_ranks_come_to_the_same(failing: list[int], exchanges: bool) -> None:
    def work(ranks: Ranks) -> tuple[Slot, Slot, int]:
        ranks.connect_drafting()
        guard, sums = DraftGuard(), []
        guard.ranks = ranks

        def stage(fails: bool) -> None:
            if fails:
                raise Fault(ranks.rank)
            if exchanges:
                sums.append(int(ranks.add_(torch.ones(1))))

        slots = [launch(guard, lambda fails=fails: stage(fails)) for fails in (ranks.rank in failing, False)]
        return (*slots, sum(sums))

    for rank, (failed, later, sums) in enumerate(on_ranks(3, work)):
        if rank in failing:
            assert isinstance(failed.draft_fault, Fault)
            assert failed.draft_fault.args == (rank,)
        else:
            assert isinstance(failed.draft_fault, EngineError)
            assert f"it failed on rank {failing[0]} of 3" in str(failed.draft_fault)
        assert failed.lost == [7]
        assert later.draft_fault is None
        assert later.lost == []
        assert sums == 3 * exchanges  # of the later launch alone


def test_none_drafts_before_all_are_connected() -> None:
    """Else it may close connections that another is still making."""
    told, order = threading.Event(), []

    def work(ranks: Ranks) -> None:
        connect, begin = ranks._connect, ranks.gather

        def connected(store: Any) -> Any:
            group = connect(store)
            if ranks.rank == 0:
                told.wait()  # until the other goes on: to what waits for this one, or to what it was connected for
            order.append("connected")
            return group

        def gather(x: Tensor) -> Tensor:
            told.set()
            return begin(x)

        ranks._connect, ranks.gather = connected, gather  # type: ignore[method-assign]
        ranks.connect_drafting()
        order.append("drafts")
        told.set()

    on_ranks(2, work)
    assert order == ["connected"] * 2 + ["drafts"] * 2


def test_a_rank_that_is_given_up_is_not_waited_for() -> None:
    def work(ranks: Ranks) -> str:
        if ranks.rank:
            return ""
        ranks.given_up.set()
        with pytest.raises(ExchangeError) as caught:
            ranks.connect_drafting()
        return str(caught.value)

    assert "one of them is lost" in on_ranks(2, work, timeout=2.0)[0]


def test_notices_come_beside_a_sum() -> None:
    """Of `look_up`, whose result stays what it is."""

    def work(ranks: Ranks) -> tuple[list[float], tuple[int, ...]]:
        ranks.notice = 5 * ranks.rank
        table = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16) * (1 + ranks.rank)
        return ranks.look_up(table, torch.tensor([1])).view(-1).tolist(), ranks.notices

    assert on_ranks(2, work) == [([3.0, -4.0], (0, 5))] * 2
