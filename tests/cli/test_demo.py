"""`specrs demo` on bundled prompts: its output is complete with any drafter, and the picture exists."""

import shutil
from pathlib import Path

import pytest
from specrs.cli import main
from specrs.pair import EAGLE3, TARGET
from specrs.pair.prompts import PROMPTS
from sweep import stride


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


@pytest.mark.parametrize("method", ["eagle3", "ngram", "suffix", "suffix,draft_model"][:: stride(3)])
def test_demo_of_another_drafter(
    method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specrs.pair.prompts.PROMPTS", PROMPTS[:1])
    config = f'{{"method": "{method}"}}'
    assert main(["demo", "--k", "3", "--max-tokens", "40", "--dtype", "float64", "--speculative-config", config]) == 0
    printed = capsys.readouterr().out
    assert f"drafts by {method};" in printed
    row = next(line.split() for line in printed.splitlines() if line.startswith("K = 3"))
    assert float(row[5]) > 1.0, "it drafted"
    assert "All 2 texts with drafts equal vanilla's, token for token." in printed


def test_demo_of_the_bundled_hybrid(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Check the demo of the bundled hybrid: its MTP head drafts at K from 1 to 4, on the prompts of the pair."""
    monkeypatch.setattr("specrs.pair.prompts.PROMPTS", PROMPTS[:1])
    assert main(["demo", "--model", "hybrid", "--max-tokens", "24"]) == 0
    printed = capsys.readouterr().out
    assert "float32\nbundled hybrid: 3.5 M parameters, MTP head 0.41 M; 1 prompts, 24 tokens each" in printed
    assert PROMPTS[0] in printed
    assert "its continuation: vanilla, K = 1, K = 2, K = 3, K = 4, auto\n" in printed
    row = next(line.split() for line in printed.splitlines() if line.startswith("K = 4"))
    assert float(row[5]) > 1.0, "it drafted"
    assert "All 5 texts with drafts equal vanilla's, token for token." in printed
    assert main(["demo", "--model", "hybrid", "--head", str(EAGLE3)]) == 2
    assert "--head=" in capsys.readouterr().err


def test_demo_of_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check the demo of another model: each drafter without weights, and a head, next to plain decoding; chats use the
    model's template."""
    monkeypatch.setattr("specrs.cli.demo.chats.CHATS", ("one two one two one two", "def f(x): return x"))
    folder = tmp_path / "a-model"
    shutil.copytree(TARGET, folder)
    picture = tmp_path / "out.png"
    argv = ["demo", "--model", str(folder), "--k", "2,4", "--max-tokens", "24", "--dtype", "float64"]
    assert main([*argv, "--head", str(EAGLE3), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "a-model, drafts from the text and by the head eagle3; 2 prompts" in printed
    assert "--- a prompt\none two one two one two" in printed
    names = ["vanilla", *(f"{name} K = {k}" for name in ("ngram", "suffix", "eagle3") for k in (2, 4)), "auto"]
    assert f"its continuation: {', '.join(names)}\n" in printed
    rows = [line for line in printed.splitlines() if line.startswith(tuple(name + "  " for name in names))]
    assert [row[:14].strip() for row in rows] == names
    assert "All 14 texts with drafts equal vanilla's, token for token." in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["demo", "--head", str(EAGLE3)]) == 2
    assert "--head=" in capsys.readouterr().err
    # nothing drafts for another model but what is named
    assert main([*argv, "--speculative-config", '{"method": "draft_model"}']) == 2
    assert "speculative_config.model" in capsys.readouterr().err
