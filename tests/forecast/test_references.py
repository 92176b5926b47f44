"""The published analysis of full against piecewise CUDA graphs, from its inputs: every figure within rounding."""

import json
from pathlib import Path

import pytest
from specrs.cli import main
from specrs.core import CostModel
from specrs.forecast import PassTimes, forecast, pass_reductions, tpot_reductions

LENGTHS = [1.80, 2.40, 2.87, 3.28, 3.53, 3.70, 3.90, 4.04]
TARGET, DRAFT = 23.65, 2.27
INSIDE_TARGET, INSIDE_DRAFT = 24.36, 2.50


def test_a_tpot_of_10_46_at_4_drafts_implies_a_draft_pass_of_2_66() -> None:
    draft = CostModel.implied_draft_ms(10.46, 4, LENGTHS[3], TARGET)
    assert round(draft, 2) == 2.66
    assert 4 * draft + TARGET == pytest.approx(34.31, abs=0.005)


def test_speedups_and_the_move_of_the_best_k() -> None:
    implied = CostModel.implied_draft_ms(10.46, 4, LENGTHS[3], TARGET)
    current = forecast(PassTimes(implied, TARGET, TARGET).model(), LENGTHS)
    expected = forecast(PassTimes(DRAFT, TARGET, TARGET).model(), LENGTHS)
    assert current.rows[4].tpot_ms == pytest.approx(10.46, abs=1e-9)
    assert round(current.rows[4].speedup, 2) == 2.26
    assert round(expected.rows[4].speedup, 2) == 2.37
    assert round(expected.best.speedup, 3) == 2.385
    assert (current.best_k, expected.best_k) == (4, 5)


def test_tpot_at_5_drafts_before_and_after() -> None:
    inside = forecast(PassTimes(INSIDE_DRAFT, INSIDE_TARGET, TARGET).model(), LENGTHS)
    alone = forecast(PassTimes(DRAFT, TARGET, TARGET).model(), LENGTHS)
    assert inside.best_k == alone.best_k == 5
    assert inside.rows[5].tpot_ms == pytest.approx(10.43, abs=0.02)
    assert alone.rows[5].tpot_ms == pytest.approx(9.91, abs=0.02)
    assert tpot_reductions(inside, alone)[4].share == pytest.approx(0.049, abs=0.002)


def test_table_1() -> None:
    inside, alone = PassTimes(INSIDE_DRAFT, INSIDE_TARGET, TARGET), PassTimes(DRAFT, TARGET, TARGET)
    draft, target = pass_reductions(inside, alone)
    assert (f"{draft.share:.1%}", f"{target.share:.1%}") == ("9.2%", "2.9%")


def test_the_command_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ",".join(map(str, LENGTHS))
    picture, numbers = tmp_path / "out.png", tmp_path / "out.json"
    times = ["--target-ms", "23.65", "--observed-tpot", "4=10.46", "--compare", "2.27,23.65"]
    assert main(["forecast", *times, "--acceptance-lengths", lengths, "--json", str(numbers)]) == 0
    out = capsys.readouterr().out
    assert "T_d = 2.665 ms, implied by a TPOT of 10.46 ms at K = 4" in out
    assert "best K: 4 (10.460 ms, 2.261x) and 5 (9.915 ms, 2.385x)" in out
    first, second = json.loads(numbers.read_text())["forecasts"]
    assert (first["best_k"], second["best_k"]) == (4, 5)
    times = ["--draft-ms", "2.5", "--target-ms", "24.36", "--vanilla-ms", "23.65", "--compare", "2.27,23.65"]
    assert main(["forecast", *times, "--acceptance-lengths", lengths, "--plot", str(picture)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["draft", "2.50", "ms", "2.27", "ms", "9.2%"] in rows
    assert ["target", "24.36", "ms", "23.65", "ms", "2.9%"] in rows
    assert picture.read_bytes().startswith(b"\x89PNG")
