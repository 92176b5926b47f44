"""Metrics of a run, computed from the records of its requests as `vllm bench serve` defines them. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specrs.bench.records import RequestRecord
from specrs.errors import InvalidConfigError, check_number, invalid_config

NS_PER_MS, NS_PER_S = 1e6, 1e9
LATENCIES = ("ttft", "tpot", "itl", "e2el")
GOODPUT = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Distribution:
    """Distribution of n values in milliseconds. If n is 0, every statistic is 0, as in vLLM."""

    values: NDArray[np.float64]

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return float(self.values.mean()) if self.values.size else 0.0

    @property
    def median(self) -> float:
        """Percentile 50."""
        return self.percentile(50.0)

    @property
    def std(self) -> float:
        """Standard deviation over all n, not n - 1."""
        return float(self.values.std()) if self.values.size else 0.0

    def percentile(self, percent: float) -> float:
        """Return a percentile, interpolated linearly between the two values next to it."""
        return float(np.percentile(self.values, percent)) if self.values.size else 0.0


@dataclass(frozen=True)
class ServeMetrics:
    """Metrics of one run. Only requests that succeeded count, except in `failed`. `duration` is in seconds."""

    completed: int
    failed: int
    duration: float
    total_input: int
    total_output: int
    good: int
    """Number of requests within all goodput limits."""
    peak_output_throughput: float
    """Maximum number of tokens in one second, counted in whole seconds from the first request. A request's chunks share
    its tokens evenly."""
    peak_concurrency: int
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2el: Distribution

    @property
    def request_throughput(self) -> float:
        """Requests per second."""
        return self.completed / self.duration

    @property
    def request_goodput(self) -> float:
        """Requests within all goodput limits, per second."""
        return self.good / self.duration

    @property
    def output_throughput(self) -> float:
        """Generated tokens per second."""
        return self.total_output / self.duration

    @property
    def total_token_throughput(self) -> float:
        """Tokens of prompts and outputs per second."""
        return (self.total_input + self.total_output) / self.duration

    def latency(self, name: str) -> Distribution:
        """Return the distribution of `name`, one of `LATENCIES`."""
        distribution: Distribution = getattr(self, name)
        return distribution


def compute(
    records: Sequence[RequestRecord], duration_ns: int, goodput: Mapping[str, float] | None = None
) -> ServeMetrics:
    """Compute the metrics of a run that took `duration_ns`. `goodput` maps names of latencies to limits in
    milliseconds.

    A request with fewer than two tokens has no TPOT, which counts as 0 against a limit.
    """
    done = [record for record in records if record.success]
    limits = goodput or {}

    def good(record: RequestRecord) -> bool:
        seen = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
        return all(seen[name] <= limit * NS_PER_MS for name, limit in limits.items())

    return ServeMetrics(
        completed=len(done),
        failed=len(records) - len(done),
        duration=duration_ns / NS_PER_S,
        total_input=sum(record.input_tokens for record in done),
        total_output=sum(record.output_tokens for record in done),
        good=sum(map(good, done)),
        peak_output_throughput=_peak_tokens(done),
        peak_concurrency=_peak_concurrency(done),
        ttft=_milliseconds([record.ttft for record in done]),
        tpot=_milliseconds([record.tpot for record in done if record.tpot is not None]),
        itl=_milliseconds([gap for record in done for gap in record.itls]),
        e2el=_milliseconds([record.latency for record in done]),
    )


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Parse limits such as `ttft:200 tpot:50`, in milliseconds. Raises `InvalidConfigError` for unknown names and wrong
    forms."""
    limits: dict[str, float] = {}
    for pair in pairs:
        name, colon, text = pair.partition(":")
        try:
            value = float(text)
        except ValueError:
            colon = ""
            value = 0.0
        if not colon or name not in GOODPUT:
            raise invalid_config("--goodput", pair, f"must be NAME:MILLISECONDS, NAME one of {', '.join(GOODPUT)}")
        limits[name] = check_number(InvalidConfigError, f"--goodput {name}", value, 0.0)
    return limits


def _milliseconds(nanoseconds: Sequence[float]) -> Distribution:
    return Distribution(np.array(nanoseconds, dtype=np.float64) / NS_PER_MS)


def _peak_tokens(done: Sequence[RequestRecord]) -> float:
    if not done:
        return 0.0
    first = min(record.start for record in done)
    buckets: dict[int, float] = {}
    for record in done:
        share = record.output_tokens / len(record.events)
        for event in record.events:
            second = (event - first) // int(NS_PER_S)
            buckets[second] = buckets.get(second, 0.0) + share
    return max(buckets.values())


def _peak_concurrency(done: Sequence[RequestRecord]) -> int:
    """Return the maximum number of requests in flight at once. A request that ends as another starts does not overlap
    it."""
    changes = sorted([(record.start, 1) for record in done] + [(record.events[-1], -1) for record in done])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak
