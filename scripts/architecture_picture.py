"""Draws docs/architecture.svg: the way of a request through the parts of specrs. One file for light and dark pages.

python scripts/architecture_picture.py
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs/architecture.svg"
WIDTH, HEIGHT = 880, 460
STYLE = """
  .back { fill: #ffffff } .box { fill: #f6f8fa; stroke: #8c959f } .step { fill: #ddf4ff; stroke: #0969da }
  text { fill: #1f2328 } .faint { fill: #59636e } .line { stroke: #59636e; fill: none } .tip { fill: #59636e }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117 } .box { fill: #161b22; stroke: #6e7681 } .step { fill: #0c2d4d; stroke: #4493f8 }
    text { fill: #f0f6fc } .faint { fill: #9198a1 } .line { stroke: #9198a1 } .tip { fill: #9198a1 }
  }
"""


@dataclass(frozen=True)
class Box:
    """One part of the picture: its name, what it does, its folder, and its place in pixels."""

    name: str
    does: str
    folder: str
    x: int
    y: int
    width: int
    height: int
    kind: str = "box"


BOXES = (
    Box("HTTP server", "OpenAI's API, templates, tools", "python/specrs/server", 20, 50, 230, 84),
    Box("LLM, AsyncLLM", "checks, text to token ids", "python/specrs/llm.py", 20, 230, 230, 84),
    Box("Engine", "the loop", "python/specrs/engine", 340, 50, 150, 380),
    Box("Scheduler", "who runs, KV blocks, number of drafts", "rust/core/src/scheduler", 600, 50, 260, 84),
    Box("Backend", "one step", "python/specrs/backends", 600, 160, 260, 160),
    Box("Drafter", "K guesses", "", 612, 244, 74, 60, "step"),
    Box("Target", "one pass", "", 693, 244, 74, 60, "step"),
    Box("Verifier", "accepts", "", 774, 244, 74, 60, "step"),
    Box("Outputs", "token ids to text, stop strings", "rust/text", 600, 346, 260, 84),
)
ARROWS = (
    (135, 134, 135, 230, ""),
    (105, 230, 105, 134, ""),
    (250, 260, 340, 260, "requests"),
    (340, 296, 250, 296, "tokens"),
    (490, 80, 600, 80, "1  plan"),
    (600, 112, 490, 112, "record"),
    (490, 215, 600, 215, "2  record"),
    (600, 280, 490, 280, "results"),
    (490, 376, 600, 376, "3  settle"),
    (600, 408, 490, 408, "new text"),
    (686, 274, 693, 274, ""),
    (767, 274, 774, 274, ""),
)
"""Lines from (x, y) to (x, y), each with the words above it."""


NOTES = ((20, 30, "from an HTTP client"), (20, 340, "or from a Python program"), (340, 30, "for every step: 1, 2, 3"))
"""Words outside the boxes, at (x, y)."""


def svg() -> str:
    """Return the picture as SVG text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="13">',
        "<title>The way of a request: server, LLM, engine, scheduler, backend, outputs</title>",
        f"<style>{STYLE}</style>",
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0 8 4 0 8z"/></marker>',
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
    ]
    parts += [f'<text class="faint" x="{x}" y="{y}">{words}</text>' for x, y, words in NOTES]
    for box in BOXES:
        middle = box.x + box.width / 2
        parts.append(
            f'<rect class="{box.kind}" x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6"/>'
        )
        lines = ((box.name, 'font-weight="600" font-size="15"'), (box.does, ""), (box.folder, 'class="faint"'))
        for row, (text, attributes) in enumerate(lines):
            if text:
                y = box.y + 25 + 21 * row
                parts.append(f'<text x="{middle:g}" y="{y}" text-anchor="middle" {attributes}>{escape(text)}</text>')
    for x, y, to_x, to_y, words in ARROWS:
        parts.append(f'<path class="line" marker-end="url(#tip)" d="M{x} {y} {to_x} {to_y}"/>')
        parts.append(f'<text class="faint" x="{(x + to_x) / 2:g}" y="{y - 6}" text-anchor="middle">{words}</text>')
    return "\n".join([*(part for part in parts if "></text>" not in part), "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
