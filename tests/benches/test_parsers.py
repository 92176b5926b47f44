"""benches/bench_parsers.py: its texts are calls of their formats, and its command writes a row for each text."""

import json
import sys
from pathlib import Path

import bench_parsers
import pytest
from specrs.server.parsers.base import Arguments, CallStart
from specrs.server.parsers.table import REASONING_PARSERS, TOOL_PARSERS, new_reasoning_parser


def test_there_is_a_call_in_every_format() -> None:
    assert bench_parsers.CALLS.keys() == TOOL_PARSERS.keys()
    for name, text in bench_parsers.CALLS.items():
        parser = TOOL_PARSERS[name]()
        events = parser.feed(text) + parser.finish()
        assert [event.name for event in events if isinstance(event, CallStart)] == [bench_parsers.NAME]
        arguments = json.loads("".join(event.text for event in events if isinstance(event, Arguments)))
        found = {key: str(value) for key, value in arguments.items()}
        assert found == {key: str(value) for key, value in bench_parsers.ARGUMENTS.items()}


def test_there_is_reasoning_in_every_format() -> None:
    for name in REASONING_PARSERS:
        text = bench_parsers.OPENED.get(name, "") + bench_parsers.CONTENT
        found = new_reasoning_parser(name, opened=True).feed(text, final=True)
        assert found == (bench_parsers.CONTENT, "")


def test_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    argv = ["--streams", "2", "--rounds", "2", "--formats", "none", "hermes", "granite", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_parsers.py", *argv])
    bench_parsers.main()
    report = json.loads(out.read_text(encoding="utf-8"))
    rows = [(row["parser"], row["text"]) for row in report["rows"]]
    of_hermes = [("hermes", text) for text in ("content", "call", "reader")]
    assert rows == [("none", "reader"), *of_hermes, ("granite", "reasoning")]
    assert all(row["us_per_step"] > 0 for row in report["rows"])
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
