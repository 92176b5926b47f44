"""Costs of steps, measured by replays of graphs, and K = `auto` on a simulated GPU.

It has the costs of a model of the time: Qwen3-32B with Qwen3-1.7B on an H200, at InstructCoder's acceptance. Graphs
with LoRA adapters of rank 16 take longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import specrs.backends.cuda.step_costs as step_costs
from specrs.backends.cuda.shapes import Buckets, LogitsMode, Shape, batch_buckets
from specrs.backends.cuda.step_costs import SECONDS, replayed_costs
from specrs.core import CostModel, SpeculationPlanner

K, MAX_NUM_SEQS, TOKENS = 5, 256, 200
BUCKETS = Buckets(batch_buckets(MAX_NUM_SEQS), K, every_k=True)
ACCEPTED = np.array([0.72, 0.52, 0.34, 0.27, 0.21])
ROWS = [1, 64, 128, 256, 384, 512, 768, 1024, 1536]
PRODUCTS_MS = [16.4, 16.8, 17.3, 26.6, 38.9, 51.6, 72.7, 96.8, 145.0]
LM_HEAD_MS = [0.37, 0.4, 0.5, 0.7, 1.0, 1.3, 1.8, 2.4, 3.6]
BATCHES, DRAFT_MS = [1, 16, 64, 128, 256], [1.26, 1.45, 2.43, 3.25, 5.6]
KV_MS = 1.5 / 64
"""Milliseconds of attention per request, which the replay of a graph without requests does not have."""


LORA_MS, LORA_ROW_MS = 2.0, 0.02
"""Milliseconds that a graph with adapters takes more: 512 kernels of 4 us each, and the outputs of each row, which are
written and read once more."""


def pass_ms(batch: int, k: int, rows: int, has_lora: bool = False) -> float:
    """Return the simulated milliseconds of a graph without requests."""
    target = np.interp(rows, ROWS, PRODUCTS_MS) + np.interp(rows, ROWS, LM_HEAD_MS)
    more = 0.3 if rows <= 64 else 1.1 + 0.006 * (rows - 64)
    more += LORA_MS + LORA_ROW_MS * rows if has_lora else 0.0
    return float(target + more + k * np.interp(batch, BATCHES, DRAFT_MS))


@dataclass
class Device:
    """A simulated GPU with a clock. The first replay of a graph takes 2 % longer."""

    seconds: float = 0.0
    known: set[Shape] = field(default_factory=set)
    has_lora: bool = False

    def replay_ms(self, shape: Shape) -> float:
        ms = pass_ms(shape.batch, shape.max_k, shape.rows, self.has_lora) * (1 if shape in self.known else 1.02)
        self.known.add(shape)
        self.seconds += ms / 1e3
        return ms

    def costs(self) -> CostModel:
        found = replayed_costs(BUCKETS, set(BUCKETS.whole_shapes()), self.replay_ms, clock=lambda: self.seconds)
        assert found is not None
        return found


def test_replays_take_five_seconds_and_give_the_cost_of_each_count() -> None:
    """Check that replays take at most five seconds, and give the cost of each number of rows: that of the next larger
    graph. Sizes between two timed ones are interpolated."""
    device = Device()
    costs = device.costs()
    assert device.seconds <= SECONDS
    timed = {shape.batch for shape in device.known}
    assert {1, 256} < timed
    assert len(timed) > len(BUCKETS.batches) / 2
    for count in range(1, MAX_NUM_SEQS + 1):
        batch = BUCKETS.batch(count)
        assert batch is not None
        for k in range(K + 1):
            truth = pass_ms(batch, k, batch * (k + 1))
            tolerance = 0.021 if batch in timed else 0.06
            assert costs.ms(count, k) == pytest.approx(truth, rel=tolerance), (count, k)


def test_a_table_shifted_by_one_batch_size_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = step_costs._shapes

    def shifted(buckets: Buckets, *, on_host: bool) -> dict[int, list[Shape]]:
        found = shapes(buckets, on_host=on_host)
        sizes = list(found)
        return {size: found[other] for size, other in zip(sizes, [*sizes[1:], sizes[-1]], strict=True)}

    monkeypatch.setattr(step_costs, "_shapes", shifted)
    with pytest.raises(AssertionError):
        test_replays_take_five_seconds_and_give_the_cost_of_each_count()


def test_without_graphs_nothing_is_timed() -> None:
    assert replayed_costs(BUCKETS, (), Device().replay_ms) is None


def test_drafts_in_the_record_have_graphs_of_their_own() -> None:
    """Check that drafts from the host have graphs of their own, timed without draft passes."""
    buckets = Buckets([1, 4], 3, every_k=True, mixes=True)
    timed: list[Shape] = []

    def replay_ms(shape: Shape) -> float:
        timed.append(shape)
        return 50.0 + shape.depth

    for on_host in (False, True):
        timed.clear()
        costs = replayed_costs(buckets, set(buckets.whole_shapes()), replay_ms, on_host=on_host)
        assert costs is not None
        assert {shape.depth for shape in timed if shape.max_k} == ({0} if on_host else {1, 2, 3})
        assert costs.ms(4, 3) == (50.0 if on_host else 53.0)


class Served:
    """Simulates `batch` concurrent requests on the device, with K chosen by the planner. With `has_lora`, one of them
    has a LoRA adapter, so every step runs a graph with adapters."""

    def __init__(self, batch: int) -> None:
        self.batch, self.random, self.has_lora = batch, np.random.default_rng(batch), False
        self.planner = SpeculationPlanner(
            max_num_seqs=MAX_NUM_SEQS,
            num_speculative_tokens=K,
            costs=Device().costs(),
            catch_up_ms=0.02,
            lora_costs=Device(has_lora=True).costs(),
        )
        self.chances = ACCEPTED / np.array([1.0, *ACCEPTED[:-1]])
        self.rows, self.lags = np.arange(batch), np.zeros(batch, dtype=np.int64)
        self.left = self.random.integers(2, TOKENS, batch)
        self.seen: set[tuple[int, int, bool]] = set()

    def admit(self, row: int) -> None:
        """Start a new request on `row`. Row 0 has the adapter, if there is one."""
        self.left[row] = TOKENS
        self.planner.reset(row, has_lora=self.has_lora and row == 0)

    def ms(self, ks: np.ndarray) -> float:
        """Return the milliseconds of a step: of one graph for the whole iteration if there is one with these K, else
        the sum of its passes."""
        planned = sorted(ks.tolist(), reverse=True)
        shape = BUCKETS.whole(planned, LogitsMode.GREEDY)
        if shape is not None:
            return pass_ms(shape.batch, shape.max_k, shape.rows, self.has_lora) + self.batch * KV_MS
        chained = BUCKETS.chained(planned, LogitsMode.GREEDY)
        assert chained is not None
        return pass_ms(chained.batch, chained.max_k, chained.rows, self.has_lora) + self.batch * KV_MS + 0.3

    def run(self, seconds: float) -> float:
        """Serve for `seconds` of simulated time. Return expected tokens per millisecond."""
        tokens, ms = 0.0, 0.0
        while ms < 1e3 * seconds:
            ks = np.zeros(self.batch, dtype=np.int64)
            self.planner.decide(self.rows, np.minimum(K, self.left - 1), self.lags, ks)
            drafted = np.arange(K) < ks[:, None]
            took = self.ms(ks)
            tokens += self.batch + float((drafted * ACCEPTED).sum())
            ms += took
            graph = (self.batch, int(ks.max()), self.has_lora)
            first = graph not in self.seen
            self.seen.add(graph)
            stands = (self.random.random((self.batch, K)) < self.chances) & drafted
            accepted = np.cumprod(stands, axis=1).sum(axis=1)
            timed = took * self.random.uniform(0.98, 1.02) * (3.0 if first else 1.0)
            self.planner.settle(self.rows, ks, ks, accepted, timed)
            self.left -= accepted + 1
            for row in np.flatnonzero(self.left <= 0):
                self.admit(int(row))
        return tokens / ms

    def best_fixed(self) -> float:
        """Return the expected tokens per millisecond of the best K that is the same for all requests."""
        lengths = 1.0 + np.array([0.0, *np.cumsum(ACCEPTED)])
        return max(self.batch * lengths[k] / self.ms(np.full(self.batch, k)) for k in range(K + 1))


@pytest.mark.parametrize("batch", [1, 4, 16, 64, 128, 256])
def test_auto_is_as_fast_as_the_best_fixed_k_after_two_seconds(batch: int) -> None:
    served = Served(batch)
    served.run(2.0)
    assert served.run(8.0) >= 0.98 * served.best_fixed()


@pytest.mark.parametrize("batch", [1, 16, 64, 128, 256])
def test_auto_is_as_fast_as_the_best_fixed_k_with_adapters(batch: int) -> None:
    """Check `auto` where a request with an adapter comes and goes. Each kind of step has its own best K at once: no
    time is left to learn the other kind's costs anew."""
    served = Served(batch)
    served.run(2.0)
    for has_lora in (True, False):
        served.has_lora = has_lora
        served.admit(0)
        assert served.run(8.0) >= 0.98 * served.best_fixed(), has_lora


@pytest.mark.parametrize("batch", [128, 256])
def test_looking_again_costs_little_in_large_batches(batch: int) -> None:
    """Check a minute, in which probes come several times. One request that drafts more makes all others pay."""
    served = Served(batch)
    served.run(2.0)
    assert served.run(60.0) >= 0.985 * served.best_fixed()
