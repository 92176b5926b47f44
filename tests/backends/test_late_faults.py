"""A head's pass over prompt chunks is enqueued after the event of the step's results. If it fails, the failure is known
before anything reads the step, because the engine reads no step before `execute` has returned. With several ranks the
failure is raised, and no slot has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from specrs.backends.ring import RingSlot
from specrs.engine.engine import Engine

from .cuda_engines import generate
from .test_cuda_drafters import Bench, bench  # noqa: F401 (a fixture)
from .test_cuda_runner import GREEDY


class Event:
    """The event of a slot's results. As soon as it is recorded, something could read them."""

    def __init__(self, slot: Any) -> None:
        self._slot = slot
        self.readable: list[bool] = []
        self.faulty: list[bool] = []

    def record(self) -> None:
        self.readable.append(self._slot.executed == self._slot.header().step_id)
        self.faulty.append(self._slot.draft_fault is not None)

    def synchronize(self) -> None:
        assert self._slot.executed == self._slot.header().step_id, "a step is waited for that is still enqueued"

    def query(self) -> bool:
        return True


def give_events(engine: Engine) -> list[Event]:
    slots: list[Any] = engine.ring._slots
    for slot in slots:
        slot.done = Event(slot)
    return [slot.done for slot in slots]


def fail_late(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Make the head's passes over prompt chunks raise. Returns a list that gets an element for each failure."""
    failures: list[bool] = []

    def draft(*_: Any) -> None:
        failures.append(True)
        raise RuntimeError("late")

    runner: Any = engine.runner
    monkeypatch.setattr(runner._chunks, "draft", draft)
    return failures


@pytest.fixture
def engine(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Engine:  # noqa: F811
    return bench.engine("fitted head", "rejection", gpu=True, monkeypatch=monkeypatch)


def test_a_late_fault_is_known_before_the_step_is_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    events, failures = give_events(engine), fail_late(engine, monkeypatch)
    requests = generate(engine, [GREEDY] * 3, 3)
    assert all(request.error is None for request in requests)
    assert failures
    assert not any(any(event.faulty) for event in events), "these faults come after the event"
    assert not any(any(event.readable) for event in events)
    assert engine.stats().draft_errors == {"eagle3": len(failures)}


def test_a_late_fault_ends_a_step_of_several_ranks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a fault is raised if there are several ranks, which have enqueued their part of the pass. No slot has
    it, where a thread that waits for the event could miss it."""
    runner: Any = engine.runner
    failures = fail_late(engine, monkeypatch)
    monkeypatch.setattr(runner.sampling, "ranks", SimpleNamespace(wait_for=lambda _done: None))
    with pytest.raises(RuntimeError, match=r"^late$"):
        generate(engine, [GREEDY] * 3, 3)
    assert failures == [True]
    slots: list[Any] = engine.ring._slots
    assert not any(slot.draft_fault for slot in slots)


def test_a_step_that_is_read_too_early_is_seen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    events, execute = give_events(engine), engine.runner.execute

    def hurried(slot: RingSlot, header: Any) -> None:
        slot.executed = header.step_id
        execute(slot, header)

    monkeypatch.setattr(engine.runner, "execute", hurried)
    generate(engine, [GREEDY] * 3, 2)
    assert any(any(event.readable) for event in events)
