"""Draws the README's chart from one file of `bench_cpu_peers.py`: tokens per second, plain and with drafts, by engine.

    python benches/plot_chart.py benches/results/FILE.json   # writes docs/chart-light.svg and docs/chart-dark.svg

Each engine has two bars: its median without drafts and the best of its medians with drafts. Measures nothing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SET = "chats-files"
"""Name of the set in the README's chart."""
NAMES = {"openvino": "OpenVINO GenAI"}
DRAFTERS = {"": "draft model", "ngram": "n-grams", "suffix": "suffix decoding", "ngram,suffix": "n-grams or suffixes"}
THEMES = {
    "light": {"back": "#ffffff", "text": "#1f2328", "faint": "#59636e", "plain": "#b7bdc5", "drafts": "#0969da"},
    "dark": {"back": "#0d1117", "text": "#f0f6fc", "faint": "#9198a1", "plain": "#484f58", "drafts": "#4493f8"},
}
WIDTH, LEFT, BAR, STEP, TOP = 720, 150, 18, 62, 64
"""Sizes in pixels: width of the chart, width of the engines' names, height of a bar, distance from one engine to the
next, height of the title."""


@dataclass(frozen=True)
class Row:
    """One engine of the chart: tokens per second without drafts and with its fastest drafter, whose name is
    `drafter`."""

    engine: str
    plain: float
    drafts: float
    drafter: str


def rows(lines: list[dict[str, Any]]) -> list[Row]:
    """Read each engine's bars from the measured cases of a set, specrs first, then the fastest.

    Raises `ValueError` if an engine was not measured both ways.
    """
    found = []
    for engine in {line["engine"]: None for line in lines}:
        speeds = [(x["medians"]["decode_tokens_per_s"], x) for x in lines if x["engine"] == engine and x["medians"]]
        plain = [speed for speed, line in speeds if line["k"] == 0]
        drafted = [(speed, line) for speed, line in speeds if line["k"] != 0]
        if not plain or not drafted:
            raise ValueError(f"{engine}: needs a line without drafts and one with them")
        speed, line = max(drafted, key=lambda pair: pair[0])
        found.append(Row(engine, max(plain), speed, line.get("method", "")))
    return sorted(found, key=lambda row: (row.engine != "specrs", -row.drafts))


def svg(bars: list[Row], title: str, caption: str, theme: dict[str, str]) -> str:
    """Draw the chart as one SVG that needs no other file."""
    height = TOP + STEP * len(bars) + 34
    scale = (WIDTH - LEFT - 190) / max(max(row.plain, row.drafts) for row in bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="14">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="{theme["back"]}"/>',
        f'<text x="16" y="30" font-size="17" font-weight="600" fill="{theme["text"]}">{escape(title)}</text>',
    ]
    for i, row in enumerate(bars):
        y = TOP + STEP * i
        name = escape(NAMES.get(row.engine, row.engine))
        weight = ' font-weight="600"' if row.engine == "specrs" else ""
        parts.append(f'<text x="16" y="{y + BAR + 6}"{weight} fill="{theme["text"]}">{name}</text>')
        drafter = escape(DRAFTERS.get(row.drafter, row.drafter))
        for at, speed, kind, label in ((0, row.plain, "plain", "plain"), (1, row.drafts, "drafts", drafter)):
            width = speed * scale
            top = y + at * (BAR + 4)
            parts += [
                f'<rect x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR}" rx="3" fill="{theme[kind]}"/>',
                f'<text x="{LEFT + width + 8:.1f}" y="{top + 14}" fill="{theme["text"]}">{speed:.0f} '
                f'<tspan fill="{theme["faint"]}">{label}</tspan></text>',
            ]
    parts.append(
        f'<text x="16" y="{height - 14}" font-size="12" fill="{theme["faint"]}">{escape(caption)}</text></svg>'
    )
    return "\n".join(parts) + "\n"


def texts(data: dict[str, Any], name: str) -> tuple[str, str]:
    """Make title and caption from the results file: model, weights, machine, threads and rounds."""
    setting = data["sets"][name]["setting"]
    model = setting["title"].split(",")[0]
    weights = {line["engine"]: line["dtype"] for line in data["sets"][name]["lines"]}
    own = weights.pop("specrs")
    others = "".join(f"; {NAMES.get(who, who)}: {kind.upper()}" for who, kind in weights.items() if kind != own)
    return (
        f"{model} {own.upper()}: tokens per second on a CPU",
        f"{data['machine']['processor']}, {setting['threads']} threads, one request at a time, greedy, "
        f"{setting['new_tokens']} tokens each; medians of {data['rounds']} rounds{others}",
    )


def main() -> None:
    """Write the chart of one set of results as two SVG files, for light and dark pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="JSON file that bench_cpu_peers.py wrote")
    parser.add_argument("--set", default=SET, help=f"set of that file; default: {SET}")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the pictures; default: docs")
    args = parser.parse_args()
    data = json.loads(args.file.read_text(encoding="utf-8"))
    bars = rows(data["sets"][args.set]["lines"])
    for theme, colours in THEMES.items():
        path = args.out / f"chart-{theme}.svg"
        path.write_text(svg(bars, *texts(data, args.set), colours), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
