"""Steps that run as late as a GPU may run them: records must stay as planned until then, and results are read only
after `wait`. Steps are deferred whole, not op by op."""

import random
from collections import deque
from collections.abc import Callable

import pytest
import specrs.backends.ring as ring
from specrs.backends.ring import Header, RingSlot
from specrs.core import InvalidResultsError
from specrs.engine.engine import Engine
from specrs.sampling import SamplingParams

from .cuda_engines import generate
from .test_cuda_runner import GREEDY, Pair, make_pair

UNREAD = -(1 << 40)
"""Value of results whose step has not run."""


class Deferred:
    """A stream that runs its steps when `wait` is called, and sometimes earlier."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._rng = random.Random(seed)
        self._execute: Callable[[RingSlot, Header], None] = engine.runner.execute
        self._queue: deque[tuple[RingSlot, Header, bytes]] = deque()
        self.most = 0
        engine.runner.execute = self.execute  # type: ignore[method-assign]
        engine.runner.wait = self.wait  # type: ignore[method-assign]

    def execute(self, slot: RingSlot, header: Header) -> None:
        slot.results[:] = UNREAD
        self._queue.append((slot, header, slot.record.tobytes()))
        self.most = max(self.most, len(self._queue))
        if self._rng.random() < 0.3:
            self._run()

    def wait(self, slot: RingSlot) -> None:
        while any(queued is slot for queued, _, _ in self._queue):
            self._run()

    def _run(self) -> None:
        slot, header, record = self._queue.popleft()
        assert slot.record.tobytes() == record, "a record was overwritten in flight"
        self._execute(slot, header)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


PARAMS = [GREEDY, SamplingParams(temperature=0.8), GREEDY]


def run(pair: Pair, monkeypatch: pytest.MonkeyPatch, seed: int | None) -> tuple[list[list[int]], int]:
    engine = pair.engine(gpu=True, monkeypatch=monkeypatch)
    stream = None if seed is None else Deferred(engine, seed)
    texts = [request.output_token_ids for request in generate(engine, PARAMS, 4)]
    return texts, 0 if stream is None else stream.most


def test_late_steps_write_the_same(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = run(pair, monkeypatch, None)
    texts, most = run(pair, monkeypatch, 0)
    assert texts == expected
    assert most == 2, "two steps were in flight"


def test_a_record_overwritten_in_flight_is_seen(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring.Ring, "slot", lambda self, step_id: self._slots[0])
    with pytest.raises(Exception, match="overwritten in flight"):
        run(pair, monkeypatch, 0)


def test_results_read_before_they_are_there_are_seen(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deferred, "wait", lambda self, slot: None)
    with pytest.raises(InvalidResultsError):
        run(pair, monkeypatch, 0)
