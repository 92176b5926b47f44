"""`specrs demo` on two of the bundled prompts: what it prints is complete, and the picture exists."""

from pathlib import Path

import pytest
from specrs.cli import main
from specrs.pair.prompts import PROMPTS


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("specrs.pair.prompts.PROMPTS", PROMPTS[:2])
    picture = tmp_path / "out.png"
    argv = ["demo", "--k", "1,3", "--max-tokens", "12", "--dtype", "float64", "--plot", str(picture)]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert PROMPTS[0] in captured.out
    assert "its continuation: vanilla, K = 1, K = 3, auto\n" in captured.out
    assert [line.split()[:1] for line in captured.out.splitlines() if line.startswith("auto")] == [["auto"], ["auto:"]]
    table = [line.split() for line in captured.out.splitlines() if line.startswith(("vanilla", "K = "))]
    assert [row[:3] for row in table[1:]] == [["K", "=", "1"], ["K", "=", "3"]]
    assert [len(row) for row in table] == [3, 3 + 4 + 1, 3 + 4 + 3]
    assert "All 6 texts with drafts equal vanilla's, token for token." in captured.out
    assert "tokens" in captured.err  # the progress bar
    assert picture.read_bytes().startswith(b"\x89PNG")
