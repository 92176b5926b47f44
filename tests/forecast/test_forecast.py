"""Forecasts against arithmetic written out here, the command's wrong input, and a measurement of the bundled pair."""

import json
from pathlib import Path

import pytest
from specrs.bench.results import SweepRow, write
from specrs.cli import main
from specrs.core import CostModel
from specrs.errors import InvalidConfigError
from specrs.forecast import PassTimes, forecast, series, verification_growth
from specrs.models.loader import load_config

from forecast.clock import count_passes


def row(k: int, concurrency: int = 1, **changes: object) -> SweepRow:
    """Return a made-up measurement: T_d = 1, T_t = 10, ITL without drafts 9, acceptance 0.5 * 0.5^i."""
    length = 1.0 + sum(0.5 * 0.5**i for i in range(k))
    itl = 10.0 + k if k else 9.0
    values: dict[str, object] = {
        "dataset": "made up", "temp": 0.0, "concurrency": concurrency, "benchmark_duration_s": 10.0, "n_reqs": 50,
        "req_throughput": 5.0, "mean_ttft": 20.0, "median_ttft": 20.0, "p99_ttft": 30.0, "mean_tpot": itl / length,
        "median_tpot": itl / length, "p99_tpot": itl / length, "mean_itl": itl, "median_itl": itl, "p99_itl": itl,
        "output_token_throughput": 500.0, "sd_method": "draft_model" if k else "None", "num_spec_toks": k,
        "draft_model": "org/draft" if k else "None", "tp": 1, "acceptance_rate": 50.0 if k else None,
        "acceptance_length": length if k else None, "analysis": "unit",
    }  # fmt: skip
    return SweepRow(**(values | changes))  # type: ignore[arg-type]


def test_rows_and_choices() -> None:
    model = CostModel.lines([1, 10], [1.0, 8.0], [10.0, 10.0], [9.0, 9.0])
    result = forecast(model, [1.5, 1.75], beyond=[1.875, 1.9, 1.95])
    assert [(r.k, r.itl_ms, r.acceptance_length) for r in result.rows] == [
        (0, 9.0, 1.0),
        (1, 11.0, 1.5),
        (2, 12.0, 1.75),
    ]
    assert [r.tpot_ms for r in result.rows] == pytest.approx([9.0, 11 / 1.5, 12 / 1.75])
    assert [r.speedup for r in result.rows] == pytest.approx([1.0, 13.5 / 11, 15.75 / 12])
    # 13/1.875, 14/1.9, 15/1.95 are all below 9, but only the given ones may be best
    assert (result.best_k, result.last_paying_k) == (2, 5)
    # at K = 1: (10 + 1 + 7 (b - 1) / 9) / 1.5 < 9 up to b = 4.2; at K = 2: (12 + 14 (b - 1) / 9) / 1.75 < 9 up to 3.4
    assert result.break_even_batch == 5


def test_predictions_of_a_sweep_without_noise_are_exact() -> None:
    rows = [row(k, c) for c in (1, 4) for k in (0, 1, 3, 5, 7)]
    (item,) = series(rows)
    assert item.concurrencies == [1, 4]
    for concurrency in item.concurrencies:
        assert [p.k for p in item.predict(concurrency, [1, 3])] == [5, 7]
        assert all(abs(p.error) < 1e-6 for p in item.predict(concurrency, [1, 3]))


def test_of_repeated_rows_the_median_run_holds() -> None:
    runs = [row(1, mean_tpot=tpot, mean_itl=10 * tpot) for tpot in (9.0, 3.0, 5.0)]
    (item,) = series([row(0, mean_tpot=8.0), row(0, mean_tpot=6.0), *runs, row(3)])
    assert item.rows[1][1] is runs[2]
    assert item.vanilla[1].mean_tpot == 6.0


def test_departure_is_told_from_first_tokens() -> None:
    slow = row(3, mean_ttft=20.0 + 99 * row(3).mean_tpot)  # a request takes twice its decoding
    (item,) = series([row(0), slow])
    part = item.departure(1, 3)
    assert slow.output_len == 100.0
    vanilla = 20 + 99 * 9.0
    assert part.first_token == pytest.approx(vanilla / slow.latency_ms / part.tpot)
    assert part.throughput == pytest.approx(1.0)
    assert part.tpot * part.first_token * part.load == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(0)], "at least one with num_spec_toks above 0"),
        ([row(1), row(3)], "must have a row 'None' (vanilla)"),
        ([row(0), row(3)], "must be at least two, for a line of ITL against K"),
        ([row(0), row(1), row(3, mean_itl=5.0)], "must not be negative"),
        ([row(0), row(1), row(3, acceptance_length=None)], "acceptance_length"),
    ],
)
def test_sweeps_that_cannot_be_forecast(rows: list[SweepRow], message: str) -> None:
    def use() -> None:
        (item,) = series(rows)
        item.line(1)
        item.acceptance(1)

    with pytest.raises(InvalidConfigError) as caught:
        use()
    assert message in str(caught.value)


def test_a_noisy_concurrency_is_left_out_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.parquet"
    write(path, [row(0), row(1), row(3), row(0, 8), row(1, 8), row(3, 8, mean_itl=5.0)], {})
    assert main(["forecast", "--sweep", str(path)]) == 0
    assert "concurrency 8 left out: T_d of unit, draft_model, draft at concurrency 8" in capsys.readouterr().out


def test_verifications_read_more_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that verification reads more experts. With two of four experts for each row, an expert is read with
    probability 1 - 1/4 for 2 rows, and 1 - 1/8 for 3."""
    raw = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 7,
        "hidden_size": 2,
        "intermediate_size": 5,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    config = load_config(tmp_path)
    # Norms, q, k, v and o, the LM head, the router; and experts of 3 x 2 x 100.
    others = 2 + 2 + 2 + (2 + 2) + 4 * 4 + 7 * 2 + 4 * 2
    assert config.num_parameters == others + 2 * 600
    growth = verification_growth(config, 2)
    assert growth == pytest.approx([(others + share * 2400) / (others + 1200) for share in (3 / 4, 7 / 8)])
    costs = PassTimes(1.0, 9.0, 8.0).model(growth)
    assert costs.table == [pytest.approx([8.0, 1 + 9 * growth[0], 2 + 9 * growth[1]])]
    argv = ["forecast", "--target-ms", "9", "--draft-ms", "1", "--acceptance-lengths", "1.5,1.7"]
    assert main([*argv, "--model", str(tmp_path)]) == 0
    assert f"T_t times {growth[0]:.2f} at K = 1, {growth[1]:.2f} at K = 2" in capsys.readouterr().out


LENGTHS = ["--acceptance-lengths", "1.5,1.7"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "must come from one of --sweep, --measure, --itl, --target-ms"),
        (["--target-ms", "9", "--itl", "1=2,3=4"], "must come from one of"),
        (["--target-ms", "9", *LENGTHS], "--draft-ms"),
        (["--target-ms", "9", "--draft-ms", "1"], "one of --acceptance-lengths, --acceptance-rates"),
        (["--target-ms", "9", "--draft-ms", "-1", *LENGTHS], "draft_ms=-1"),
        (["--target-ms", "9", "--draft-ms", "nan", *LENGTHS], "draft_ms=NaN"),
        (["--itl", "3=4", *LENGTHS], "at least two K"),
        (["--target-ms", "9", "--observed-tpot", "4=5,5=6", *LENGTHS], "must be one K=MS"),
        (["--target-ms", "9", "--draft-ms", "1", "--acceptance-lengths", "2.5"], "from 1 to 2"),
        (["--target-ms", "9", "--draft-ms", "1", "--acceptance-lengths", "x"], "is not a list of numbers"),
        (["--target-ms", "9", "--draft-ms", "1", *LENGTHS, "--compare", "1"], "T_d,T_t"),
        (["--target-ms", "9", "--draft-ms", "1", *LENGTHS, "--max-k", "0"], "--max-k"),
        (["--sweep", "nowhere.parquet"], "is not there"),
        (["--measure", "--k", "3"], "at least two different numbers"),
        (["--sweep", "x.parquet", "--compare", "1,2"], "--compare=[1.0, 2.0]: has no meaning with --sweep"),
        (["--measure", "--vanilla-ms", "3"], "--vanilla-ms=3.0: has no meaning with --measure"),
        (["--itl", "1=2,3=4", "--draft-ms", "1", *LENGTHS], "--draft-ms=1.0: has no meaning with --itl"),
        (["--target-ms", "9", "--draft-ms", "1", *LENGTHS, "--fit-k", "1,3"], "--fit-k=[1, 3]: has no meaning with"),
    ],
)
def test_wrong_input_is_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", *argv]) == 2
    err = capsys.readouterr().err
    assert message in err.splitlines()[-1]


def test_sweep_options_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.parquet"
    write(path, [row(0), row(1), row(3)], {})
    for more, message in (
        (["--draft-model", "other"], "must be one of org/draft"),
        (["--concurrency", "2"], "must be one of 1"),
        (["--fit-k", "1"], "no concurrency of unit"),
        (["--fit-k", "1,2", "--concurrency", "1"], "must be among those measured: 1, 3"),
        (["--plot", str(tmp_path / "x.png")], "needs --concurrency"),
    ):
        assert main(["forecast", "--sweep", str(path), *more]) == 2
        assert message in capsys.readouterr().err


def test_itl_by_k_and_rates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", "--itl", "1=11,3=13,5=15", "--vanilla-ms", "9", "--acceptance-rates", "0.5,0.25"]) == 0
    out = capsys.readouterr().out
    assert "T_d = 1.00 +- 0.00 ms (slope), T_t = 10.00 +- 0.00 ms (intercept); R^2 = 1.0000" in out
    assert "   2      12.00    1.75       6.857    1.312x   best" in out


def test_measured_here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check `--measure` with a simulated clock that only passes advance: 1 ms for the draft's, 10 ms for the
    target's."""
    count_passes(monkeypatch)
    picture = tmp_path / "out.png"
    argv = ["forecast", "--measure", "--k", "1,3,5", "--max-tokens", "32", "--num-prompts", "2", "--rounds", "1"]
    assert main([*argv, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "T_d = 1.00 +- 0.00 ms (slope), T_t = 10.00 +- 0.00 ms (intercept); R^2 = 1.0000" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["draft", "1.00", "ms", "1.00", "ms", "0.0%"] in rows
    assert ["target", "10.00", "ms", "10.00", "ms", "0.0%"] in rows
    assert picture.read_bytes().startswith(b"\x89PNG")
