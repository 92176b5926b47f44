"""Published measurements of two targets and five drafters: other K are forecast from two K of each."""

from statistics import fmean

import pytest
from specrs.bench.results import read
from specrs.cli import main
from specrs.forecast import Series, series

from tests.data_sets import data_file

FILE = "seed_bench_data.parquet"
SEEN = {"qwen": (1, 4), "llama70b": (3, 6)}


def all_series() -> list[Series]:
    return series(read(data_file(FILE)))


def test_unseen_k_within_four_percent_at_every_concurrency() -> None:
    found = all_series()
    assert {(item.workload[0], item.method) for item in found} == {
        (target, method) for target in SEEN for method in ("draft_model", "eagle3")
    }
    for item in found:
        seen = SEEN[item.workload[0]]
        assert max(item.concurrencies) == (256 if item.workload[0] == "qwen" else 64)
        for concurrency in item.concurrencies:
            rest = item.predict(concurrency, seen)
            assert {p.k for p in rest} == set(item.ks(concurrency)) - set(seen)
            assert len(rest) >= 4
            assert fmean(abs(p.error) for p in rest) < 0.04, (item.name, concurrency)


def test_the_forecast_reads_nothing_of_the_rows_it_predicts() -> None:
    """Check that the forecast reads nothing of the rows it predicts: with those rows spoiled it stays the same."""
    import dataclasses

    rows = read(data_file(FILE))
    spoiled = [
        row
        if row.vanilla or row.num_spec_toks in SEEN[row.analysis]
        else dataclasses.replace(row, mean_itl=1.0, mean_tpot=1.0, acceptance_length=1.0)
        for row in rows
    ]
    for before, after in zip(series(rows), series(spoiled), strict=True):
        seen = SEEN[before.workload[0]]
        for concurrency in before.concurrencies:
            pairs = zip(before.predict(concurrency, seen), after.predict(concurrency, seen), strict=True)
            assert all(one.forecast == other.forecast and one.measured != other.measured for one, other in pairs)


def test_throughput_departs_where_the_first_token_waits() -> None:
    for item in all_series():
        for concurrency in item.concurrencies:
            for k in item.ks(concurrency):
                part = item.departure(concurrency, k)
                assert part.tpot * part.first_token * part.load == pytest.approx(part.throughput, rel=1e-9)
                if part.throughput < 0.85 * part.tpot:
                    # not the decoding: the wait for a place in the batch, many times that of vanilla
                    assert part.first_token < 0.9
                    assert part.ttft_ms > 2 * part.vanilla_ttft_ms
                    assert part.load > 0.93


@pytest.mark.parametrize("concurrency", [None, "64"])
def test_the_command(concurrency: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["forecast", "--sweep", str(data_file(FILE)), "--fit-k", "3,6", "--draft-model", "meta-llama/Llama-3.2-1B"]
    assert main([*argv, *(["--concurrency", concurrency] if concurrency else [])]) == 0
    out = capsys.readouterr().out
    expected = "measured TPOT" if concurrency else "output tokens per second = TPOT x"
    assert expected in out
