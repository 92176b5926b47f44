"""The host of a step on several ranks: a drafter that fails on one rank fails on all, and masks reach all."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from specrs.backends.cpu.host import StepHost
from specrs.backends.extras import RequestExtras
from specrs.core import SAMPLING_STEPS
from specrs.errors import EngineError
from specrs.parallel.ranks import ExchangeError, Ranks
from torch import Tensor

from parallel.threads import on_ranks

VOCAB = 70
HEAD_PREFILL, CATCH_UP, DRAFT = STAGES = 1, 2, 4
"""Numbers of the stages, as in the core."""


class Fault(Exception):
    """Error that a stage raises here."""


class Slot:
    """The part of a ring slot that the host reads: two sequences of up to two drafts."""

    tokens = np.zeros((2, 3), dtype=np.int64)

    def grammar_masks(self, first: int, count: int, width: int, words: int) -> NDArray[np.int32]:
        """Return room for masks that still holds an earlier step's."""
        return np.full((count, width, words), 7, dtype=np.int32)


def begun(ranks: Ranks) -> StepHost:
    """Return a host in a step that has drafts and no grammar."""
    ranks.connect_drafting()
    host = StepHost(VOCAB, ranks=ranks)
    assert host.has_ranks
    assert host.begin(Slot(), np.array([0, 1])) is host  # type: ignore[arg-type]
    return host


def stage(host: StepHost, which: int, work: Callable[[], object]) -> bool:
    """Run a stage as the core does. Return whether it failed on any rank."""
    error: Exception | None = None
    host.enter(which)
    try:
        work()
    except Exception as fault:
        error = fault
    return host.leave(which, error)


@pytest.mark.parametrize("which", STAGES)
@pytest.mark.parametrize("failing", [[1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("exchanges", [0, 1, 3])
def test_all_ranks_come_to_the_same(failing: list[int], exchanges: int, which: int) -> None:
    """Check that all ranks get the same outcome. With exchanges in the stage, others wait for the failed rank; later
    steps work, and sums of one step never reach another."""

    def work(ranks: Ranks) -> tuple[bool, Exception | None, bool, Exception | None, list[float]]:
        host, sums = begun(ranks), []

        def drafts(step: int, fails: bool) -> None:
            for i in range(exchanges):
                if fails and i == exchanges // 2:
                    raise Fault(ranks.rank)
                sums.append(float(ranks.add_(torch.tensor([10.0**step]))))
            if fails:
                raise Fault(ranks.rank)

        failed = stage(host, which, lambda: drafts(0, ranks.rank in failing))
        cause = host.cause
        host.finish()
        del sums[:]
        host.begin(Slot(), np.array([0]))  # type: ignore[arg-type]
        later = stage(host, which, lambda: drafts(1, False))
        sums.append(float(ranks.add_(torch.tensor([100.0]))))  # as the target's passes do, outside of the stage
        return failed, cause, later, host.cause, sums

    for rank, (failed, cause, later, cause_later, sums) in enumerate(on_ranks(3, work)):
        assert failed
        if rank in failing:
            assert isinstance(cause, Fault)
            assert cause.args == (rank,)
        else:
            assert isinstance(cause, EngineError)
            assert not isinstance(cause, ExchangeError)
            assert f"it failed on rank {failing[0]} of 3" in str(cause)
        assert not later
        assert cause_later is None
        assert sums == [30.0] * exchanges + [300.0]


def test_stages_of_one_step_fail_each_for_itself() -> None:
    """Check that stages of one step fail independently, on different ranks."""

    def work(ranks: Ranks) -> list[tuple[bool, str]]:
        host, found = begun(ranks), []
        for which, failing in ((HEAD_PREFILL, 0), (CATCH_UP, None), (DRAFT, 1)):

            def drafts(failing: int | None = failing) -> None:
                ranks.add_(torch.ones(1))
                if ranks.rank == failing:
                    raise Fault(f"rank {ranks.rank}")

            failed = stage(host, which, drafts)
            found.append((failed, str(host.cause)))
        return found

    first, second = on_ranks(2, work)
    assert [failed for failed, _ in first] == [failed for failed, _ in second] == [True, False, True]
    assert first[0][1] == "rank 0"
    assert "rank 0 of 2" in second[0][1]
    assert "rank 1 of 2" in first[2][1]
    assert second[2][1] == "rank 1"


def test_other_ranks_log_what_failed_there_once(caplog: pytest.LogCaptureFixture) -> None:
    """Check that other ranks log their failures once. Rank 0's engine counts and reports its own."""
    caplog.set_level(logging.WARNING, "specrs")

    def work(ranks: Ranks) -> None:
        host = begun(ranks)

        def fail() -> None:
            raise Fault(f"here: {ranks.rank}")

        for _ in range(3):
            assert stage(host, DRAFT, fail)

    on_ranks(2, work)
    (logged,) = caplog.records
    assert logged.getMessage() == "on rank 1 of 2 the drafter failed"
    assert logged.exc_info is not None
    assert str(logged.exc_info[1]) == "here: 1"


class Countdown:
    """A matcher whose mask is the number of accepted tokens, and which rejects token 9."""

    def __init__(self) -> None:
        self.accepted = 0

    def fill_mask(self, out: NDArray[np.int32]) -> None:
        out[:] = 1 + self.accepted

    def accept(self, token_id: int) -> bool:
        self.accepted += token_id != 9
        return token_id != 9

    def rollback(self, num_tokens: int) -> None:
        self.accepted -= num_tokens


def admit(host: StepHost, rows: list[tuple[int, int, bool]]) -> None:
    """Admit requests. `rows`: row, request id, whether it has a grammar."""
    extras = 1 << SAMPLING_STEPS.index("extras")
    columns = zip(*[(row, request_id, extras * has) for row, request_id, has in rows], strict=True)
    names = ("admit_row", "admit_request_id", "admit_steps")
    host.admit({name: np.array(column) for name, column in zip(names, columns, strict=True)}, len(rows))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("in_stage", [False, True])
def test_masks_reach_all_ranks(size: int, in_stage: bool) -> None:
    """Check that masks reach all ranks, although only rank 0 has grammars. After a draft that is not allowed, every
    token is allowed; the drafts are undone in the matcher."""

    def work(ranks: Ranks) -> tuple[list[list[int]], int]:
        ranks.connect_drafting()
        host, matcher, masks = StepHost(VOCAB, ranks=ranks), Countdown(), []
        if ranks.rank == 0:
            host.extras = {11: RequestExtras(matcher)}.get  # type: ignore[arg-type]
        admit(host, [(0, 10, False), (1, 11, True)])
        for _ in range(2):
            assert host.begin(Slot(), np.array([0, 1])) is host  # type: ignore[arg-type]
            masks.append(host.start_grammar(1, 1).tolist())

            def drafts() -> None:
                masks.extend(host.advance_grammar(1, token).tolist() for token in (4, 9))

            if in_stage:
                assert not stage(host, DRAFT, drafts)
            else:
                drafts()
            host.finish()
        return masks, matcher.accepted

    words = -(-VOCAB // 32)
    found = on_ranks(size, work)
    assert [masks for masks, _ in found] == [[[1] * words, [2] * words, [-1] * words] * 2] * size
    assert [accepted for _, accepted in found] == [0] * size


def test_a_drafter_that_fails_between_two_masks() -> None:
    """Check a drafter that fails when some ranks have the mask after the first draft and one has not: the next step
    begins with the right mask."""

    def work(ranks: Ranks) -> list[list[int]]:
        ranks.connect_drafting()
        host, masks = StepHost(VOCAB, ranks=ranks), []
        if ranks.rank == 0:
            host.extras = {11: RequestExtras(Countdown())}.get  # type: ignore[arg-type]
        admit(host, [(1, 11, True)])
        for fails in (True, False):
            host.begin(Slot(), np.array([1]))  # type: ignore[arg-type]
            masks.append(host.start_grammar(0, 1).tolist())

            def drafts(fails: bool = fails) -> None:
                host.advance_grammar(0, 4)
                if fails and ranks.rank == 1:
                    raise Fault(1)
                host.advance_grammar(0, 5)

            assert stage(host, DRAFT, drafts) == fails
            host.finish()
        return masks

    words = -(-VOCAB // 32)
    assert on_ranks(2, work) == [[[1] * words] * 2] * 2


def test_a_step_without_grammars_and_ranks_asks_for_nothing() -> None:
    host = StepHost(VOCAB)
    assert not host.has_ranks
    assert host.begin(Slot(), np.array([0, 1])) is None  # type: ignore[arg-type]
    admit(host, [(0, 10, False), (1, 11, True)])
    assert host.begin(Slot(), np.array([0])) is None  # type: ignore[arg-type]
    assert host.begin(Slot(), np.array([0, 1])) is host  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="request 11: the step needs its extras, which are in no record"):
        host.start_grammar(1, 1)
    admit(host, [(1, 12, False)])
    assert host.begin(Slot(), np.array([0, 1])) is None  # type: ignore[arg-type]


def test_a_rank_that_is_lost_ends_the_step() -> None:
    """Check that a lost rank ends the step: `leave` raises on the others, so that none goes on alone."""

    def work(ranks: Ranks) -> str:
        host = begun(ranks)
        if ranks.rank:
            return ""
        with pytest.raises(ExchangeError) as caught:
            stage(host, DRAFT, lambda: None)
        return str(caught.value)

    assert "rank 0 waited for another one" in on_ranks(2, work, timeout=0.5)[0]


def test_none_drafts_before_all_are_connected() -> None:
    """Check that no rank drafts before all are connected. Otherwise it might close connections that another is still
    making."""
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


def test_numbers_and_arrays_of_all_ranks() -> None:
    """Check that a number of each rank is gathered by all ranks, in the order of ranks, and that an array of rank 0 is
    copied into the memory of every rank."""

    def work(ranks: Ranks) -> tuple[list[int], list[int], bool]:
        array = np.full((2, 2), 5 * ranks.rank - 1, dtype=np.int32)[0]
        found = ranks.take_first_array(array)
        return ranks.gather_numbers(3 * ranks.rank), array.tolist(), found is array

    assert on_ranks(3, work) == [([0, 3, 6], [-1, -1], True)] * 3
