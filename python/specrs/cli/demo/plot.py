"""Chart of the demo's results. matplotlib comes with the extra `specrs[bench]` and is imported only here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrs.cli.demo.measure import Result


def draw(results: Sequence[Result], caption: str, path: Path, model: str) -> None:
    """Write the chart: left, tokens per second of each setting; right, acceptance by position at each K."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    speed, acceptance = figure.subplots(1, 2)
    # K is ordered, so its colours are: light to dark, and grey for none.
    shades = colormaps["viridis"]
    drafted = [result for result in results if isinstance(result.k, int) and result.k]
    color_of: dict[str, Any] = {r.name: shades(0.85 - 0.7 * i / len(drafted)) for i, r in enumerate(drafted)}
    colors = [color_of.get(result.name, "tab:red" if result.k else "0.7") for result in results]
    plain = results[0].tokens_per_second
    bars = speed.bar([r.name for r in results], [r.tokens_per_second for r in results], color=colors)
    speed.bar_label(bars, [f"{r.tokens_per_second:.0f}\n{r.tokens_per_second / plain:.2f}x" for r in results])
    speed.margins(y=0.2)
    speed.set(title="Speed, and over plain decoding", ylabel="generated tokens per second")
    for result in drafted:
        label = f"{result.name}, acceptance length {result.acceptance.acceptance_length:.2f}"
        # The curves nearly coincide: shorter ones lie on top, so that the longer ones show beyond their ends.
        shares = result.acceptance.per_position
        order = 20 - len(shares)
        acceptance.plot(
            range(1, len(shares) + 1), shares, marker="o", color=color_of[result.name], label=label, zorder=order
        )
    acceptance.xaxis.set_major_locator(MaxNLocator(integer=True))
    acceptance.yaxis.set_major_formatter(PercentFormatter(1.0))
    acceptance.set_ylim(0, 1)
    acceptance.set(title="Drafts accepted up to position", xlabel="position", ylabel="share of drafts")
    acceptance.legend()
    for axes in (speed, acceptance):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(f"{model}: plain decoding against K drafts, one request at a time")
    figure.supxlabel(caption, fontsize=8, color="0.4")
    figure.savefig(path, dpi=150)
