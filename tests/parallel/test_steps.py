"""Steps of a GPU that run after the host enqueued them: enqueued while others run, reported when they have ended, in
order."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.cuda.slots import TensorSlot
from specrs.backends.ranks import LeadingRunner, checksum
from specrs.backends.ring import Header, Ring, RingSlot
from specrs.core import HEADER_FIELDS, Scheduler
from specrs.engine.follow import Reporter
from specrs.errors import RankLostError
from specrs.parallel.connection import DID, Connection, DisconnectedError, ExchangeError, Kind
from specrs.parallel.ranks import Ranks
from specrs.parallel.team import Team

from parallel.threads import on_ranks

TIMEOUT = 5.0


class Done:
    """A GPU event that the test sets."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def query(self) -> bool:
        return self.event.is_set()


def make_ring(depth: int = 2) -> Ring:
    scheduler = Scheduler(
        max_num_seqs=2,
        max_model_len=16,
        num_blocks=8,
        block_size=4,
        max_num_batched_tokens=8,
        num_speculative_tokens=0,
    )
    ring = Ring(scheduler, 0, depth, TensorSlot)
    for number in range(depth + 1):
        slot = ring.slot(number)
        assert isinstance(slot, TensorSlot)
        slot.done = Done()  # type: ignore[assignment]
        slot.record[:] = 0
        slot.record[HEADER_FIELDS.index("num_decode")] = 1
        slot.results[:] = number
    return ring


def done(slot: RingSlot) -> threading.Event:
    assert isinstance(slot, TensorSlot)
    found: Any = slot.done
    return found.event  # type: ignore[no-any-return]


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = socket.socketpair()
    connections = Connection(ours, TIMEOUT), Connection(theirs, TIMEOUT)
    yield connections
    for connection in connections:
        connection.close()


def wait(slot: RingSlot) -> None:
    assert done(slot).wait(TIMEOUT)


def test_results_are_reported_after_their_step(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    ring = make_ring()
    reporter = Reporter(theirs, wait, lost=lambda: pytest.fail("lost"))
    for number in range(2):
        reporter.executed(number, ring.slot(number), ring.slot(number).header())
    reporter.wait_until_told(-1)  # nothing had the slots before
    ours.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        ours.socket.recv(1)
    ours.socket.settimeout(TIMEOUT)
    done(ring.slot(1)).set()  # as no stream ends them: the first is still told first
    done(ring.slot(0)).set()
    for number in range(2):
        message = ours.receive()
        slot = ring.slot(number)
        assert (message.kind, DID.unpack(message.body)) == (Kind.DONE, (number, checksum(slot, slot.header())))
    reporter.wait_until_told(1)
    reporter.close()


def test_a_slot_is_not_used_again_before_it_was_reported(ends: tuple[Connection, Connection]) -> None:
    _, theirs = ends
    ring = make_ring()
    reporter = Reporter(theirs, wait, lost=lambda: pytest.fail("lost"))
    reporter.executed(0, ring.slot(0), ring.slot(0).header())
    free = threading.Thread(target=reporter.wait_until_told, args=(0,))
    free.start()
    free.join(0.05)
    assert free.is_alive()
    done(ring.slot(0)).set()
    free.join(TIMEOUT)
    assert not free.is_alive()
    reporter.close()


def test_a_step_that_does_not_end_is_reported_and_ends_the_rank(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    lost = threading.Event()

    def fail(slot: RingSlot) -> None:
        raise ExchangeError("rank 1 waited for another one, in what its GPU runs")

    slot = make_ring().slot(0)
    reporter = Reporter(theirs, fail, lost.set)
    reporter.executed(0, slot, slot.header())
    message = ours.receive()
    assert (message.kind, message.body) == (Kind.LOST, b"rank 1 waited for another one, in what its GPU runs")
    assert lost.wait(TIMEOUT)
    reporter.close()


def test_a_rank_waits_until_another_is_lost_or_for_a_time() -> None:
    """Check that a rank waits until another is lost or for a limited time. The number of exchanges begun tells which
    rank hangs."""

    def work(ranks: Ranks) -> tuple[str, str, int]:
        asked = iter([False, False, True])
        ranks.wait_for(lambda: next(asked))
        begun = ranks.num_begun
        with pytest.raises(ExchangeError) as late:
            ranks.wait_for(lambda: False)
        ranks.give_up()
        with pytest.raises(ExchangeError) as lost:
            ranks.wait_for(lambda: False)
        assert ranks.waiting_since is None
        return str(late.value), str(lost.value), begun

    for rank, found in enumerate(on_ranks(2, work, timeout=0.2)):
        late = f"rank {rank} waited for another one, in what its GPU runs"
        assert found == (late, f"rank {rank} waits for no other any more: one of them is lost", 1)


class Enqueuing:
    """A runner whose steps end when the test says so."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.executed: list[RingSlot] = []

    def execute(self, slot: RingSlot, header: Header) -> None:
        self.executed.append(slot)

    def wait(self, slot: RingSlot) -> None:
        self.ranks.wait_for(lambda: slot.has_ended)

    def close(self) -> None:
        """Do nothing: this runner has no threads."""


def lead(ranks: Ranks, connection: Connection) -> LeadingRunner:
    team = Team({1: connection}, timeout=1.0)
    team.ranks = ranks
    runner: Any = Enqueuing(ranks)
    return LeadingRunner(runner, team, team.close)


def listen(theirs: Connection) -> None:
    while True:
        theirs.receive_news()


def follow(theirs: Connection, ring: Ring, count: int) -> None:
    """Play another rank: report each of `count` steps as done, with the checksum of its slot in `ring`, and wait for
    the end."""
    for number in range(count):
        assert theirs.receive_news().kind == Kind.STEP
        slot = ring.slot(number)
        theirs.send(Kind.DONE, DID.pack(number, checksum(slot, slot.header())))
    assert theirs.receive_news().kind == Kind.END
    theirs.close()


def test_rank_0_compares_results_when_steps_have_ended(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends

    def work(ranks: Ranks) -> None:
        ring = make_ring()
        if ranks.rank:
            follow(theirs, ring, 3)
            return
        runner = lead(ranks, ours)
        for number in range(2):
            runner.execute(ring.slot(number), ring.slot(number).header())
        told = runner.team._done.copy()
        assert not told
        for number in range(2):
            done(ring.slot(number)).set()
        runner.wait(ring.slot(0))
        runner.wait(ring.slot(0))  # as after an interrupt
        runner.wait(ring.slot(1))
        runner.execute(ring.slot(2), ring.slot(2).header())  # which is not waited for
        done(ring.slot(2)).set()
        runner.close()
        assert runner.team.error is None
        assert not runner._untold

    on_ranks(2, work)


def test_other_results_of_an_enqueued_step_end_the_engine(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends

    def work(ranks: Ranks) -> None:
        ring = make_ring()
        if ranks.rank:
            assert theirs.receive_news().kind == Kind.STEP
            theirs.send(Kind.DONE, DID.pack(0, 1))
            with pytest.raises(DisconnectedError):
                listen(theirs)
            return
        runner = lead(ranks, ours)
        runner.execute(ring.slot(0), ring.slot(0).header())
        done(ring.slot(0)).set()
        runner.wait(ring.slot(0))

        def go_on() -> None:
            runner.execute(ring.slot(1), ring.slot(1).header())
            runner.wait(ring.slot(1))

        with pytest.raises(RankLostError, match="rank 1 of 2 came to other results than rank 0"):
            go_on()
        runner.close()

    on_ranks(2, work)


def test_a_rank_that_is_lost_ends_what_rank_0_waits_for(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends

    def work(ranks: Ranks) -> None:
        if ranks.rank:
            assert theirs.receive_news().kind == Kind.STEP
            theirs.close()
            return
        runner, slot = lead(ranks, ours), make_ring().slot(0)
        runner.execute(slot, slot.header())
        with pytest.raises(RankLostError, match="rank 1 of 2 has closed its connection"):
            runner.wait(slot)
        runner.close()

    on_ranks(2, work)


def test_the_cuda_runner_waits_for_its_events_by_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    slot, waited = make_ring().slot(0), []
    runner: Any = CudaRunner.__new__(CudaRunner)

    class Sampling:
        ranks = type("", (), {"wait_for": staticmethod(lambda ended: waited.append(ended()))})

    runner.sampling = Sampling
    runner.wait(slot)
    done(slot).set()
    runner.wait(slot)
    assert waited == [False, True]
