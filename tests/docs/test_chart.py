"""The README's chart is drawn from a committed results file, and shows its numbers."""

import json
import re
from pathlib import Path

import pytest
from module_files import load_file

ROOT = Path(__file__).parents[2]
chart = load_file("plot_chart", ROOT / "benches/plot_chart.py")


@pytest.fixture(scope="module")
def results() -> Path:
    """Results from which the README's chart is drawn: the file that docs/benchmarks.md names."""
    (name,) = re.findall(r"plot_chart\.py (benches/results/[\w.]+\.json)", (ROOT / "docs/benchmarks.md").read_text())
    return ROOT / name


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pictures_are_those_of_the_file(theme: str, results: Path) -> None:
    data = json.loads(results.read_text())
    lines = data["sets"][chart.SET]["lines"]
    made = chart.svg(chart.rows(lines), *chart.texts(data, chart.SET), chart.THEMES[theme])
    assert (ROOT / f"docs/chart-{theme}.svg").read_text() == made, f"python benches/plot_chart.py {results}"
    assert f"docs/chart-{theme}.svg" in (ROOT / "README.md").read_text()


def test_the_page_has_the_picture_s_numbers(results: Path) -> None:
    """Check that every number next to a bar is in the table of docs/benchmarks.md that the chart belongs to."""
    page = (ROOT / "docs/benchmarks.md").read_text()
    section = page[page.index("### Quantized files") :].partition("\n### ")[0]
    numbers = re.findall(r">(\d+) <tspan", (ROOT / "docs/chart-light.svg").read_text())
    assert len(numbers) == 2 * len(chart.rows(json.loads(results.read_text())["sets"][chart.SET]["lines"]))
    assert [number for number in numbers if not re.search(rf"\b{number}\b", section)] == []


def test_the_fastest_of_an_engine_s_drafters_is_shown() -> None:
    def line(engine: str, k: int, speed: float, method: str = "") -> dict[str, object]:
        return {"engine": engine, "k": k, "medians": {"decode_tokens_per_s": speed}, "method": method}

    lines = [line("b", 0, 9), line("b", 5, 12, "ngram"), line("specrs", 0, 1), line("specrs", 5, 3, "ngram")]
    lines += [line("specrs", 5, 4, "suffix"), line("a", 0, 2), line("a", 5, 20, "ngram")]
    rows = chart.rows(lines)
    assert [(row.engine, row.plain, row.drafts, row.drafter) for row in rows] == [
        ("specrs", 1, 4, "suffix"),
        ("a", 2, 20, "ngram"),
        ("b", 9, 12, "ngram"),
    ]
    with pytest.raises(ValueError, match="a: needs a line without drafts"):
        chart.rows([line("a", 5, 1)])
