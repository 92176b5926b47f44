"""A sweep's parquet file, and the figures drawn from ours and from the published one."""

import dataclasses
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from specrs.bench import figures
from specrs.bench.results import COLUMNS, SweepRow, arrivals_warning, read, read_settings, write
from specrs.cli import main
from specrs.errors import InvalidConfigError

from tests.data_sets import data_file
from tests.forecast.test_forecast import row

SEED = "seed_bench_data.parquet"


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    path, rows = tmp_path / "sweep.parquet", [row(0), row(3), row(5, 8)]
    write(path, rows, {"model": None, "seed": 3})
    assert read(path) == rows
    assert read_settings(path) == {"model": None, "seed": 3}
    write(path, rows[:1], {})
    assert read(path) == rows[:1]
    assert [item.name for item in tmp_path.iterdir()] == ["sweep.parquet"]


def test_columns_and_types_are_those_of_the_published_file(tmp_path: Path) -> None:
    path = tmp_path / "sweep.parquet"
    write(path, [row(0), row(1)], {})
    ours, theirs = (parquet.read_schema(p).remove_metadata() for p in (path, data_file(SEED)))
    assert ours == theirs


def test_the_published_file_is_read_whole() -> None:
    rows = read(data_file(SEED))
    assert len(rows) == 262
    assert sum(item.vanilla for item in rows) == 16
    assert all((item.acceptance_length is None) == item.vanilla for item in rows)


def test_derived_figures() -> None:
    item = row(1, benchmark_duration_s=10.0, n_reqs=50, output_token_throughput=500.0, mean_ttft=20.0, mean_tpot=2.0)
    assert item.output_len == 100.0
    assert item.latency_ms == 20 + 99 * 2


def test_rows_that_arrivals_limit_are_reported() -> None:
    # 218 ms a request: 4.36 a second keep 0.95 places taken, 1 a second 0.218
    timed = {"benchmark_duration_s": 10.0, "mean_ttft": 20.0, "mean_tpot": 2.0}

    def rate(requests: int, concurrency: int) -> SweepRow:
        row_of = row(1, concurrency, n_reqs=10 * requests, output_token_throughput=100.0 * requests, **timed)
        return dataclasses.replace(row_of, req_throughput=float(requests))

    assert rate(4, 1).mean_in_flight == pytest.approx(4 * 0.218)
    assert arrivals_warning([rate(4, 1), rate(16, 4)]) is None
    told = arrivals_warning([rate(4, 1), rate(1, 1), rate(1, 2)])
    assert told is not None
    assert told.startswith("warning: arrivals limit 2 of 3 rows: ")
    assert "(at concurrency 2 0.22 were in flight on average)" in told
    assert "--request-rate inf" in told


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"temp": [0.0]}, "lacks the columns dataset, concurrency"),
        ({name: ["x"] for name in COLUMNS}, "row 0, temp='x': must be a number"),
        ({**{name: [1] for name in COLUMNS}, "dataset": [None]}, "row 0, dataset=None: must be a string"),
        ({**dataclasses.asdict(row(1)), "concurrency": [1.5]}, "row 0, concurrency=1.5: must be an integer"),
    ],
)
def test_files_without_what_is_needed(columns: dict[str, list[object]], message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    cells = {name: value if isinstance(value, list) else [value] for name, value in columns.items()}
    parquet.write_table(pyarrow.table(cells), path)
    with pytest.raises(InvalidConfigError) as caught:
        read(path)
    assert message in str(caught.value)


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.parquet"
    bad.write_text("no parquet")
    for path, message in ((bad, "could not be read as parquet"), (tmp_path / "x.parquet", "is not there")):
        assert main(["bench", "plot", str(path)]) == 2
        assert message in capsys.readouterr().err


def lines(figure: object, panel: int) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each line of a panel, by label."""
    axes = figure.axes[panel]  # type: ignore[attr-defined]
    found = {line.get_label(): line for line in axes.get_lines() if not str(line.get_label()).startswith("_")}
    return {str(label): list(zip(*line.get_data(), strict=True)) for label, line in found.items()}


def made_up() -> list[SweepRow]:
    """Return rows of a sweep with made-up tokens per second, for two drafters and two concurrencies."""
    tokens = {
        ("None", 0, 1): 100.0, ("None", 0, 4): 300.0,
        ("draft_model", 1, 1): 150.0, ("draft_model", 3, 1): 200.0, ("draft_model", 1, 4): 330.0,
        ("draft_model", 3, 4): 270.0, ("eagle3", 1, 1): 170.0, ("eagle3", 3, 1): 160.0,
    }  # fmt: skip
    return [
        row(k, c, sd_method=method, draft_model=f"org/{method}" if k else "None", output_token_throughput=value)
        for (method, k, c), value in tokens.items()
    ]


def test_what_the_figures_show() -> None:
    sweep = figures.Sweep(made_up())
    draws = {number: make for number, (_, make) in figures.FIGURES.items()}
    assert lines(draws[1](sweep), 0) == {"draft_model": [(1, 2.0), (4, 1.1)]}  # K = 3, then K = 1
    assert lines(draws[2](sweep), 0) == {"1": [(1, 1.5), (3, 2.0)], "4": [(1, 1.1), (3, 0.9)]}
    assert lines(draws[2](sweep), 1) == {"1": [(1, 1.7), (3, 1.6)]}
    assert lines(draws[3](sweep), 0) == {"eagle3": [(1, 1.7)]}
    # of K = 1 and 3 the drafters' best are 1.5 x 1.7 and 2.0 x 1.6
    assert lines(draws[4](sweep), 0) == {"draft_model, K=3": [(1, 2.0), (4, 0.9)], "eagle3, K=3": [(1, 1.6)]}
    acceptance = lines(draws[5](sweep), 0)
    assert acceptance["draft_model"] == [(1, 1.5), (3, 1.875)]
    throughput = lines(draws[6](sweep), 0)
    assert throughput["vanilla"] == [(1, 100.0), (4, 300.0)]
    assert throughput["draft_model, K=3"] == [(1, 200.0), (4, 270.0)]
    assert lines(draws[7](sweep), 0)["vanilla"] == [(1, 30.0), (4, 30.0)]
    assert figures.Sweep(made_up(), 1).k == {("unit", "made up", 0.0, 1): 1}


def test_the_band_is_from_least_to_most() -> None:
    rows = [*made_up(), row(1, 8, output_token_throughput=1.0, acceptance_length=1.25), row(0, 8)]
    rows = [
        dataclasses.replace(r, draft_model="org/draft_model") if r.concurrency == 8 and not r.vanilla else r
        for r in rows
    ]
    (band, _) = figures.FIGURES[5][1](figures.Sweep(rows)).axes[0].collections
    heights = {y for x, y in band.get_paths()[0].vertices if x == 1}
    assert heights == {1.25, 1.5}


@pytest.mark.parametrize("suffix", figures.FORMATS)
def test_the_command_draws_all_seven_of_the_published_file(suffix: str, tmp_path: Path) -> None:
    argv = ["bench", "plot", str(data_file(SEED)), "--output-dir", str(tmp_path), "--format", suffix]
    assert main([*argv, *([] if suffix == "png" else ["--figures", "5"])]) == 0
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert len(drawn) == (7 if suffix == "png" else 1)
    assert all(path.stat().st_size > 5000 for path in tmp_path.iterdir())


def test_what_cannot_be_drawn_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.parquet"
    write(path, [r for r in made_up() if r.sd_method != "eagle3"], {})
    assert main(["bench", "plot", str(path)]) == 0
    out = capsys.readouterr().out
    assert "left out: figure 3: there are no rows of its methods" in out
    assert len(list((tmp_path / "sweep").iterdir())) == 6
    for more, message in (
        (["--figures", "9"], "must be of 1 to 7"),
        (["--format", "bmp"], "png, svg, pdf"),
        (["--k", "9"], "--k=9"),
    ):
        assert main(["bench", "plot", str(path), *more]) == 2
        assert message in capsys.readouterr().err
