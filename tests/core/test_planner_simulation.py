"""The planner on published costs and acceptance of drafters of Qwen3-32B and Llama-3.3-70B, concurrency 1 to 256.

Requests come and go. Costs are the measured ITL of every K and concurrency, and drafts are accepted by the fitted
acceptance curve. A choice of K counts with its expected gain, so that only the planner's own mistakes show.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from specrs.bench.results import read
from specrs.core import CostModel, SpeculationPlanner
from specrs.forecast import Series, series

from tests.data_sets import data_file

TOKENS = 250  # output tokens of a request
NUM_STEPS = 1500
NUM_DRAFTERS = 5  # drafters in the file


class Engine:
    """Simulates `batch` concurrent requests with different acceptance: `spread` is the standard deviation of the
    logarithm of the odds."""

    def __init__(self, costs: CostModel, chances: NDArray[np.float64], batch: int, spread: float) -> None:
        self.costs, self.chances, self.batch, self.spread = costs, chances, batch, spread
        self.random = np.random.default_rng(batch)
        self.planner = SpeculationPlanner(max_num_seqs=batch, num_speculative_tokens=len(chances), costs=costs)
        self.rows, self.lags = np.arange(batch), np.zeros(batch, dtype=np.int64)
        self.own = np.stack([self.temper() for _ in range(batch)])
        self.left = self.random.integers(2, TOKENS, batch)  # ends spread evenly, as where requests arrive one by one
        ks = range(1, len(chances) + 1)
        self.increments = np.array(
            [[0.0] + [costs.ms(c, k) - costs.ms(c, k - 1) for c in range(1, batch + 1)] for k in ks]
        )
        self.fixed_ms = np.array([costs.ms(batch, k) / batch for k in (0, *ks)])
        self.ms = 0.0
        self.others = np.zeros(len(chances) + 1)  # milliseconds that each fixed K takes for the same tokens

    def temper(self) -> NDArray[np.float64]:
        """Return the conditional acceptance of a new request."""
        odds = self.chances / (1 - self.chances) * np.exp(self.spread * self.random.standard_normal())
        return np.asarray(odds / (1 + odds))

    def run_step(self) -> None:
        """Run one step with the K that the planner chooses."""
        k, most = np.zeros(self.batch, dtype=np.int64), len(self.chances)
        self.planner.decide(self.rows, np.minimum(most, self.left - 1), self.lags, k)
        drafted = np.arange(most) < k[:, None]
        counts = drafted.sum(axis=0)
        ms = self.costs.ms(self.batch, 0) + float(self.increments[np.arange(most), counts].sum())
        self.ms += ms
        gains = np.cumprod(self.own, axis=1)
        lengths = 1.0 + np.concatenate([np.zeros((self.batch, 1)), np.cumsum(gains, axis=1)], axis=1)
        tokens = 1.0 + (gains * drafted).sum(axis=1)
        self.others += (tokens[:, None] / lengths).sum(axis=0) * self.fixed_ms
        stands = (self.random.random((self.batch, most)) < self.own) & drafted
        accepted = np.cumprod(stands, axis=1).sum(axis=1)
        self.planner.settle(self.rows, k, k, accepted, ms * self.random.uniform(0.97, 1.03))
        self.left -= accepted + 1
        for row in np.flatnonzero(self.left <= 0):
            self.own[row], self.left[row] = self.temper(), TOKENS
            self.planner.reset(int(row))

    def speedups(self) -> NDArray[np.float64]:
        """Return the speed-up over each fixed K, for the same tokens of the same requests."""
        for _ in range(NUM_STEPS):
            self.run_step()
        return self.others / self.ms


def costs_of(item: Series) -> CostModel:
    """Return the measured milliseconds of an iteration, by concurrency and K."""
    ks = sorted(set.intersection(*(set(item.ks(c)) for c in item.concurrencies)))
    table = [
        [item.vanilla[c].mean_tpot] + [float(np.mean(item.rows[c][k].mean_itl)) for k in ks] for c in item.concurrencies
    ]
    return CostModel(item.concurrencies, [0, *ks], table)


@pytest.fixture(scope="module", params=range(NUM_DRAFTERS))
def item(request: pytest.FixtureRequest) -> Series:
    """Return each drafter of the file in turn."""
    drafters = series(read(data_file("seed_bench_data.parquet")))
    assert len(drafters) == NUM_DRAFTERS
    return drafters[request.param]


@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_never_below_vanilla_and_close_to_the_best_fixed_k(item: Series, spread: float) -> None:
    costs = costs_of(item)
    for concurrency in item.concurrencies:
        curve = item.acceptance(concurrency)
        chances = np.array([curve.first] + [curve.ratio] * (costs.ks[-1] - 1))
        speedups = Engine(costs, chances, concurrency, spread).speedups()
        assert speedups[0] >= 1.0, f"{item.name} at {concurrency}: slower than without drafts"
        assert speedups.min() >= 0.98, f"{item.name} at {concurrency}: K = {np.argmin(speedups)} is faster"


def test_a_useless_draft_ends_at_no_drafts(item: Series) -> None:
    costs = costs_of(item)
    for concurrency in (1, 8, max(item.concurrencies)):
        engine = Engine(costs, np.full(costs.ks[-1], 0.02), concurrency, 0.0)
        assert engine.speedups()[0] >= 0.985, f"{item.name} at {concurrency}"
        engine.ms, engine.others = 0.0, engine.others * 0.0
        assert engine.speedups()[0] >= 0.992, f"{item.name} at {concurrency}, once it is known"
