"""Words that may not occur in comments, docstrings and docs, because a plainer word says more."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("benches", "docs", "examples", "fuzz", "kernels", "python", "rust", "scripts", "tests")
SUFFIXES = {".md", ".py", ".pyi", ".rs"}

WORDS = {
    r"nobody|whoever": "name the thread, request, client or module",
    r"no (?:branch )?predictor (?:knows|expects)": "say that the branch is mispredicted",
    r"owe[ds]?": "say what has to be handed over, and when",
    r"dearer|dear": "say slow, large or expensive, and by how much",
    r"vouche?[sd]?": "say untrusted",
    r"luckiest": "say too high on average",
    r"first_rows": "it is max_draft_lag",
}


def texts() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return [ROOT / "README.md", *(path for path in found if path != Path(__file__) and "target" not in path.parts)]


@pytest.mark.parametrize("word", WORDS)
def test_words(word: str) -> None:
    pattern = re.compile(rf"\b(?:{word})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == [], WORDS[word]
