"""`specrs forecast --measure` with every kind of drafter: what it prints is complete."""

import json
from pathlib import Path

import pytest
from specrs.cli import main
from specrs.forecast.measure import measure
from specrs.pair import HYBRID
from specrs.pair.prompts import PROMPTS
from specrs.sampling import SamplingParams

from forecast.clock import count_passes

MEASURE = ["forecast", "--measure", "--k", "1,3", "--max-tokens", "24", "--num-prompts", "1", "--rounds", "1"]


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "suffix", "suffix,draft_model"])
def test_measure(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    count_passes(monkeypatch, draft_token_ms=0.5)
    file = tmp_path / "forecast.json"
    assert main([*MEASURE, "--speculative-config", f'{{"method": "{method}"}}', "--json", str(file)]) == 0
    names = [forecast["name"] for forecast in json.loads(file.read_text())["forecasts"]]
    # What cannot draft by itself is not timed by itself.
    assert names == (["inside", "alone"] if method == "draft_model" else ["forecast"])
    assert "T_d" in capsys.readouterr().out


def test_measure_of_an_mtp_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    count_passes(monkeypatch, draft_token_ms=0.5)
    file = tmp_path / "forecast.json"
    assert main([*MEASURE, "--model", str(HYBRID), "--json", str(file)]) == 0
    (forecast,) = json.loads(file.read_text())["forecasts"]
    assert forecast["name"] == "forecast"
    assert "T_d" in capsys.readouterr().out


def test_acceptance_lengths_count_iterations_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    count_passes(monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    # A pattern of five tokens is rare, so most iterations have no draft, whose own acceptance would say 2 and more.
    config = {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 5}
    found = measure(None, config, [1, 3], PROMPTS[:1], params, rounds=1, dtype="float64", max_model_len=512)
    assert found.alone is None
    for k, length in found.acceptance_lengths.items():
        assert 1.0 <= length < 1.0 + k
