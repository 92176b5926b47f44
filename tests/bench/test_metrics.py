"""Figures of a run against the definitions, computed here in exact fractions from the same times."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.bench.metrics import compute, parse_goodput
from specrs.bench.records import RequestRecord
from specrs.errors import InvalidConfigError

NS = 10**9


@st.composite
def records(draw: st.DrawFn) -> list[RequestRecord]:
    found = []
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 3 * NS))
        gaps = draw(st.lists(st.integers(0, NS), min_size=1, max_size=6))
        events = [start + sum(gaps[: i + 1]) for i in range(len(gaps))]
        tokens = draw(st.integers(len(events), 3 * len(events)))
        failed = draw(st.booleans()) and draw(st.booleans())
        found.append(
            RequestRecord(
                start=start, events=events, input_tokens=draw(st.integers(0, 50)), output_tokens=tokens,
                error="broke" if failed else None,
            )
        )  # fmt: skip
    return found


def mean(values: list[Fraction]) -> float:
    return float(sum(values) / len(values)) if values else 0.0


def percentile(values: list[Fraction], percent: int) -> float:
    """Return a percentile, linear between neighbours as numpy's default."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = Fraction(percent, 100) * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


@given(records(), st.integers(1, 20 * NS))
def test_figures_are_the_definitions(found: list[RequestRecord], duration: int) -> None:
    metrics = compute(found, duration)
    good = [record for record in found if record.error is None]
    assert (metrics.completed, metrics.failed) == (len(good), len(found) - len(good))
    seconds = Fraction(duration, NS)
    output = sum(record.output_tokens for record in good)
    inputs = sum(record.input_tokens for record in good)
    exact = {
        "request_throughput": len(good) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (inputs + output) / seconds,
    }
    for name, value in exact.items():
        assert getattr(metrics, name) == pytest.approx(float(value), rel=1e-12)
    ms = Fraction(1, 10**6)
    expected = {
        "ttft": [(record.events[0] - record.start) * ms for record in good],
        "e2el": [(record.events[-1] - record.start) * ms for record in good],
        "itl": [
            (after - before) * ms
            for record in good
            for before, after in zip(record.events, record.events[1:], strict=False)
        ],
        "tpot": [
            Fraction(record.events[-1] - record.events[0], record.output_tokens - 1) * ms
            for record in good
            if record.output_tokens > 1
        ],
    }
    for name, values in expected.items():
        distribution = metrics.latency(name)
        assert distribution.mean == pytest.approx(mean(values), rel=1e-12, abs=1e-12)
        assert distribution.median == pytest.approx(percentile(values, 50), rel=1e-12, abs=1e-12)
        for percent in (1, 90, 99):
            assert distribution.percentile(percent) == pytest.approx(percentile(values, percent), rel=1e-12, abs=1e-12)


def record(start: int, events: list[int], tokens: int | None = None) -> RequestRecord:
    return RequestRecord(start=start, events=events, output_tokens=tokens or len(events), error=None)


def test_concurrency_counts_half_open_spans() -> None:
    found = [record(0, [5]), record(5, [9]), record(2, [3, 8]), record(7, [12])]
    assert compute(found, 12).peak_concurrency == 3
    assert compute(found[:2], 12).peak_concurrency == 1


def test_peak_throughput_shares_tokens_over_chunks() -> None:
    found = [record(10, [10, 10 + NS // 2, 10 + 3 * NS // 2], tokens=6), record(10 + NS, [10 + NS + 1], tokens=3)]
    assert compute(found, 2 * NS).peak_output_throughput == 5.0  # 2 of the first and 3 of the second


def test_goodput() -> None:
    limits = parse_goodput(["ttft:100", "tpot:10"])
    fast = record(0, [100 * 10**6, 110 * 10**6])
    late = record(0, [101 * 10**6, 102 * 10**6])
    slow = record(0, [1, 10**7 + 2])
    single = record(0, [100 * 10**6])  # no TPOT to miss
    metrics = compute([fast, late, slow, single], 2 * NS, limits)
    assert metrics.good == 2
    assert metrics.request_goodput == 1.0


@pytest.mark.parametrize("pair", ["ttft", "ttft:x", "itl:3", "tpot:-1", "tpot:nan", ":3"])
def test_goodput_that_means_nothing(pair: str) -> None:
    with pytest.raises(InvalidConfigError, match="--goodput"):
        parse_goodput([pair])


def test_nothing_succeeded() -> None:
    metrics = compute([RequestRecord()], NS)
    assert (metrics.completed, metrics.failed, metrics.ttft.mean, metrics.peak_output_throughput) == (0, 1, 0.0, 0.0)
