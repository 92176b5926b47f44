"""Charts of forecasts. matplotlib comes with the extra `specrs[bench]` and is imported only here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from specrs.forecast.forecast import Forecast
from specrs.forecast.regression import LineFit

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Regression:
    """Regression of ITL against K: the rows to which the line was fitted, the rows that were kept for checking it, and
    the line."""

    name: str
    fit: LineFit
    seen: Mapping[int, float]
    unseen: Mapping[int, float] = field(default_factory=dict)


def draw(
    forecasts: Sequence[Forecast],
    path: Path,
    *,
    title: str,
    measured_tpot: Mapping[int, float] | None = None,
    regression: Regression | None = None,
) -> None:
    """Draw TPOT against K, with the minimum of each curve marked, and next to it the regression of ITL if there is one.

    `measured_tpot` are milliseconds by K, drawn as hollow circles.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = 1 if regression is None else 2
    figure = Figure(figsize=(5.6 * panels, 4.4), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    tpot = axes[0]
    for index, forecast in enumerate(forecasts):
        color = f"C{index}"
        drafted = forecast.rows[1:]
        label = f"{forecast.name}: best K = {forecast.best_k}, {forecast.best.speedup:.2f}x"
        tpot.plot([r.k for r in drafted], [r.tpot_ms for r in drafted], "-", color=color, marker=".", label=label)
        if forecast.best_k:
            tpot.plot([forecast.best_k], [forecast.best.tpot_ms], "x", color=color, markersize=13, markeredgewidth=2.5)
        vanilla = forecast.rows[0].tpot_ms
        known = any(abs(vanilla - other.rows[0].tpot_ms) < 1e-9 for other in forecasts[:index])
        if not known:
            tpot.axhline(vanilla, color=color, linestyle=":", label=f"vanilla, {vanilla:.2f} ms")
    if measured_tpot:
        tpot.plot(list(measured_tpot), list(measured_tpot.values()), "o", mfc="none", color="0.2", label="measured")
    tpot.set(title="Time per output token", xlabel="number of speculative tokens K", ylabel="TPOT (ms)")
    if regression is not None:
        _regression(axes[1], regression)
    for panel in axes:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


def _regression(panel: object, regression: Regression) -> None:
    from matplotlib.axes import Axes

    assert isinstance(panel, Axes)
    fit = regression.fit
    last = max([*regression.seen, *regression.unseen])
    x = np.linspace(0.0, last, 100)
    line = np.array([fit.at(value) for value in x])
    label = f"{fit.slope:.2f} ms * K + {fit.intercept:.2f} ms"
    if fit.n > 2:  # two points lie on any line through them
        label += f", R² = {fit.r_squared:.4f}"
    panel.plot(x, line, color="C0", label=label)
    bands = [fit.band(value, CONFIDENCE) for value in x]
    half = np.array([0.0 if band is None else band for band in bands])
    if half.any():
        panel.fill_between(x, line - half, line + half, color="C0", alpha=0.2, label=f"{CONFIDENCE:.0%} confidence")
    panel.plot(list(regression.seen), list(regression.seen.values()), "o", color="C0", label="measured")
    if regression.unseen:
        held = list(regression.unseen.values())
        panel.plot(list(regression.unseen), held, "o", mfc="none", color="0.2", label="measured, not fitted")
    panel.set(
        title=f"Inter-token latency, {regression.name}", xlabel="number of speculative tokens K", ylabel="ITL (ms)"
    )
