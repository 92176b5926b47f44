"""The scheduler through Python, as a state machine: wrong calls raise, and change nothing.

Two schedulers get the same right calls; one of them also gets wrong calls. Their records, settled results and counters
must always stay equal. A simulated device accepts random numbers of drafts.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray
from specrs import core
from specrs.core import PLAN_STEP, CachedDrafter, Scheduler

Buffer = NDArray[np.int64]
StepSequence = tuple[int, int, bool]
"""Row, K, and whether it emits."""
COUNTERS = ["num_waiting", "num_running", "num_in_flight", "num_free_blocks", "num_preemptions", "num_cached_tokens"]


class CoreMachine(RuleBasedStateMachine):
    """State machine of a property test: two schedulers that get the same calls, the lengths on the device, and the
    steps in flight."""

    @initialize(
        rows=st.integers(1, 4),
        block_size=st.integers(1, 5),
        spare=st.integers(0, 12),
        k=st.integers(0, 4),
        depth=st.integers(1, 3),
        caching=st.booleans(),
        policy=st.tuples(st.sampled_from([0, 4, 64]), st.sampled_from([0, 3]), st.sampled_from([0, 2])),
    )
    def start(
        self, rows: int, block_size: int, spare: int, k: int, depth: int, caching: bool, policy: tuple[int, int, int]
    ) -> None:
        self.k, self.depth, self.block_size = k, depth, block_size
        config = {
            "max_num_seqs": rows,
            "max_model_len": 40,
            "num_blocks": -(-40 // block_size) + spare,
            "block_size": block_size,
            "max_num_batched_tokens": 16,
            "num_speculative_tokens": k,
            "drafter": CachedDrafter(max_model_len=36),
            "max_in_flight": depth,
            "num_reserved_decode_tokens": policy[0],
            "long_prefill_token_threshold": policy[1],
            "priority_aging_steps": policy[2],
            "enable_prefix_caching": caching,
        }
        self.both = [Scheduler(**config), Scheduler(**config)]
        first = self.both[0]
        self.record = [np.zeros(first.record_size, np.int64) for _ in self.both]
        self.settled = [np.zeros(first.settled_size, np.int64) for _ in self.both]
        self.left = [0] * rows
        self.in_flight: deque[tuple[int, list[StepSequence]]] = deque()
        self.live: list[int] = []
        self.next_id = 0

    @rule(length=st.integers(1, 30), text=st.integers(0, 2), output=st.integers(1, 9), reuse=st.booleans())
    def add(self, length: int, text: int, output: int, reuse: bool) -> None:
        # An id may come again after its request's end, while its old row is in flight too.
        request_id = 0 if reuse and 0 not in self.live else self.next_id
        self.next_id = max(self.next_id, request_id + 1)
        for scheduler in self.both:
            scheduler.add_request(
                request_id,
                np.arange(length) + 100 * text,
                limit=min(length + output, 40),
                num_speculative_tokens=self.k,
                priority=request_id % 2,
            )
        self.live.append(request_id)

    @rule()
    def plan(self) -> None:
        status = [scheduler.plan(record) for scheduler, record in zip(self.both, self.record, strict=True)]
        assert status[0] == status[1]
        if status[0] != PLAN_STEP:
            return
        np.testing.assert_array_equal(*self.record)
        at = {name: self.record[0][o : o + n] for name, (o, n) in self.both[0].record_layout().items()}
        header = dict(zip(core.HEADER_FIELDS, at["header"].tolist(), strict=False))
        step_id, decode, prefill = header["step_id"], header["num_decode"], header["num_prefill"]
        for i in range(header["num_admitted"]):
            self.left[at["admit_row"][i]] = int(at["admit_limit"][i] - at["admit_num_tokens"][i])
        last = [True] * decode + (at["chunk_is_last"][:prefill] == 1).tolist()
        count = decode + prefill
        rows, ks = at["seq_row"][:count].tolist(), at["seq_k"][:count].tolist()
        self.in_flight.append((step_id, list(zip(rows, ks, last, strict=True))))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        step_id, sequences = self.in_flight.popleft()
        results = self._results(sequences, [data.draw(st.integers(0, k)) for _, k, _ in sequences])
        for scheduler, settled in zip(self.both, self.settled, strict=True):
            scheduler.settle(step_id, results, settled)
        np.testing.assert_array_equal(*self.settled)
        layout = self.both[0].settled_layout()
        ids, reasons = (
            self.settled[0][layout[name][0] :][: len(sequences)] for name in ("request_id", "finish_reason")
        )
        self.live = [i for i in self.live if i not in set(ids[reasons != core.FINISH_NONE].tolist())]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), preempt=st.booleans())
    def disturb(self, data: st.DataObject, preempt: bool) -> None:
        request_id = data.draw(st.sampled_from(self.live))
        outcomes = []
        for scheduler in self.both:
            try:
                (scheduler.preempt if preempt else scheduler.abort)(request_id)
                outcomes.append("done")
            except core.NotRunningError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        if not preempt:
            self.live.remove(request_id)

    @rule(which=st.integers(0, 40))
    def wrong(self, which: int) -> None:
        """Make one of the wrong calls, on the second scheduler alone."""
        calls = self._wrong_calls()
        kind, call = calls[which % len(calls)]
        with pytest.raises(kind) as caught:
            call(self.both[1])
        assert isinstance(caught.value, core.SpecrsError)
        assert any(character.isdigit() for character in str(caught.value)), "the numbers are in the message"

    @invariant()
    def equal_and_sound(self) -> None:
        for name in COUNTERS:
            assert getattr(self.both[0], name) == getattr(self.both[1], name), name
        assert self.both[0].acceptance().histogram == self.both[1].acceptance().histogram
        for scheduler in self.both:
            scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "both"):
            return
        for request_id in self.live:
            for scheduler in self.both:
                scheduler.abort(request_id)
        while self.in_flight:
            step_id, sequences = self.in_flight.popleft()
            for scheduler, settled in zip(self.both, self.settled, strict=True):
                scheduler.settle(step_id, self._results(sequences, [0] * len(sequences)), settled)
        for scheduler in self.both:
            assert scheduler.num_free_blocks == scheduler.num_blocks

    def _results(self, sequences: list[StepSequence], accepted: list[int]) -> Buffer:
        """Return the results of a device that accepts so many drafts where it may. All tokens are 7."""
        results = np.zeros(self.both[0].results_size, np.int64)
        at = {name: results[o : o + n] for name, (o, n) in self.both[0].results_layout().items()}
        at["tokens"][:] = 7
        for i, ((row, k, emits), m) in enumerate(zip(sequences, accepted, strict=True)):
            drafted = max(0, min(k, self.left[row] - 1))
            m = min(m, drafted)
            emitted = m + 1 if emits and self.left[row] > 0 else 0
            self.left[row] -= emitted
            at["num_drafted"][i], at["num_accepted"][i], at["num_emitted"][i] = drafted, m, emitted
            ends = emitted > 0 and self.left[row] == 0
            at["finish_reason"][i] = core.FINISH_LENGTH if ends else core.FINISH_NONE
        return results

    def _wrong_calls(self) -> list[tuple[type[Exception], Callable[[Scheduler], Any]]]:
        prompt, settled = np.arange(3), self.settled[1]
        results = np.zeros(self.both[0].results_size, np.int64)
        calls: list[tuple[type[Exception], Callable[[Scheduler], Any]]] = [
            (core.InvalidRequestError, lambda s: s.add_request(-1, prompt, limit=5)),
            (core.InvalidRequestError, lambda s: s.add_request(10**6, prompt, limit=3)),
            (core.InvalidRequestError, lambda s: s.add_request(10**6, prompt, limit=41)),
            (core.InvalidRequestError, lambda s: s.add_request(10**6, prompt - 1, limit=5)),
            (core.InvalidRequestError, lambda s: s.add_request(10**6, prompt, limit=5, num_speculative_tokens=99)),
            (core.InvalidBufferError, lambda s: s.add_request(10**6, np.arange(8)[::2], limit=5)),
            (core.InvalidBufferError, lambda s: s.add_request(10**6, prompt.astype(np.int32), limit=5)),
            (core.UnknownRequestError, lambda s: s.abort(10**6)),
            (core.UnknownRequestError, lambda s: s.preempt(10**6)),
            (core.InvalidBufferError, lambda s: s.plan(np.zeros(3, np.int64))),
            (core.InvalidBufferError, lambda s: s.plan(self.record[1].astype(np.float64))),
            (core.InvalidBufferError, lambda s: s.settle(0, results[:-1].copy(), settled)),
        ]
        calls += [
            (core.DuplicateRequestError, lambda s, i=i: s.add_request(i, prompt, limit=5))  # type: ignore[misc]
            for i in self.live[:2]
        ]
        if not self.in_flight:
            return [*calls, (core.SettleOrderError, lambda s: s.settle(10**6, results, settled))]
        step_id, sequences = self.in_flight[0]
        layout = self.both[0].results_layout()

        def changed(name: str, value: int) -> Callable[[Scheduler], Any]:
            wrong = results.copy()
            wrong[layout[name][0]] = value
            return lambda s: s.settle(step_id, wrong, settled)

        # Settled before, not yet planned, and out of order.
        calls += [
            (core.SettleOrderError, lambda s, i=i: s.settle(i, results, settled))  # type: ignore[misc]
            for i in {step_id - 1, step_id + 1, step_id + len(self.in_flight)} - {-1}
        ]
        changes = [
            ("num_drafted", sequences[0][1] + 1),
            ("num_accepted", 1),
            ("num_emitted", 2),
            ("finish_reason", 9),
            ("flags", 64),
        ]
        calls += [(core.InvalidResultsError, changed(name, value)) for name, value in changes]
        return calls


CoreMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)
TestCoreMachine = CoreMachine.TestCase
