"""Forecasts as text. Formats values; computes only means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from specrs.forecast.acceptance import GeometricAcceptance
from specrs.forecast.compare import Reduction
from specrs.forecast.forecast import Forecast
from specrs.forecast.regression import LineFit
from specrs.forecast.sweeps import Departure, Prediction, Series


def table(forecast: Forecast, measured_tpot: Mapping[int, float] | None = None) -> str:
    """Return a table with a row per K, the best one marked, and conclusions below it."""
    measured = measured_tpot or {}
    head = f"{'K':>4}{'ITL (ms)':>11}{'AL':>8}{'TPOT (ms)':>12}{'speed-up':>10}"
    lines = [forecast.name, head + ("  measured TPOT (ms)" if measured else "")]
    for row in forecast.rows:
        line = f"{row.k:>4}{row.itl_ms:>11.2f}{row.acceptance_length:>8.2f}{row.tpot_ms:>12.3f}{row.speedup:>9.3f}x"
        if row.k in measured:
            line += f"{measured[row.k]:>12.3f} ({row.tpot_ms / measured[row.k] - 1:+.1%})"
        lines.append(line + ("   best" if row.k == forecast.best_k else ""))
    last = forecast.rows[-1].k
    if forecast.last_paying_k == 0:
        lines.append("drafting does not pay at any of these K")
    else:
        note = f" (beyond K = {last} by the fitted acceptance)" if forecast.last_paying_k > last else ""
        lines.append(f"drafting pays up to K = {forecast.last_paying_k}{note}; the fastest is K = {forecast.best_k}")
    return "\n".join(lines)


def break_even(batch: int | None, batches: Sequence[int]) -> str:
    """Return a line about the break-even batch size among `batches`; `batch` None says that there is none."""
    if batch is None:
        return f"break-even batch: none from {batches[0]} to {batches[-1]}: some K is faster in TPOT at all of them"
    return f"break-even batch: {batch}; from there on no K is faster in TPOT than no drafts"


def line(fit: LineFit) -> str:
    """Return a line with the regression of ITL against K."""
    slope, intercept = fit.slope_band(), fit.band(0.0)
    bands = (f" +- {slope:.2f}", f" +- {intercept:.2f}") if slope is not None and intercept is not None else ("", "")
    # two points lie on any line through them
    good = f"R^2 = {fit.r_squared:.4f}, {fit.n} points, 95 % confidence" if fit.n > 2 else "two points: no R^2, no band"
    return (
        f"ITL against K: T_d = {fit.slope:.2f}{bands[0]} ms (slope), T_t = {fit.intercept:.2f}{bands[1]} ms "
        f"(intercept); {good}"
    )


def lines(fits: Mapping[int, LineFit], curves: Mapping[int, GeometricAcceptance]) -> str:
    """Return a table with the regression and the acceptance curve of each concurrency."""
    rows = [
        f"{'concurrency':>12}{'T_d (ms)':>16}{'T_t (ms)':>18}{'R^2':>9}   accepted at position i = 0, 1, ...",
    ]
    for concurrency, fit in fits.items():
        slope, intercept = fit.slope_band(), fit.band(0.0)
        draft = f"{fit.slope:.2f}" + ("" if slope is None else f" +- {slope:.2f}")
        target = f"{fit.intercept:.2f}" + ("" if intercept is None else f" +- {intercept:.2f}")
        curve, good = curves[concurrency], f"{fit.r_squared:.4f}" if fit.n > 2 else "-"
        rows.append(f"{concurrency:>12}{draft:>16}{target:>18}{good:>9}   {curve.first:.2f} * {curve.ratio:.2f}^i")
    return "\n".join(rows)


def passes(reductions: Sequence[Reduction]) -> str:
    """Return a table of pass times: each model inside speculation and alone, with the reduction. Table 1 of the
    references has the same form."""
    lines = [f"{'Model':<28}{'SD runtime':>13}{'Standalone runtime':>21}{'Runtime reduction':>20}"]
    for item in reductions:
        name = item.name if len(item.name) < 28 else "..." + item.name[-24:]
        first, second = f"{item.first:.2f} ms", f"{item.second:.2f} ms"
        lines.append(f"{name:<28}{first:>13}{second:>21}{item.share:>z20.1%}")
    return "\n".join(lines)


def side_by_side(first: Forecast, second: Forecast) -> str:
    """Return a table with TPOT and speed-up of both forecasts at each K; the best K of each is marked."""
    head = f"{'K':>4}{'TPOT (ms)':>14}{'TPOT (ms)':>14}{'less by':>10}{'speed-up':>12}{'speed-up':>12}"
    names = f"{'':4}{first.name:>14}{second.name:>14}{'':10}{first.name:>12}{second.name:>12}"
    lines = [names, head]
    for one, other in zip(first.rows, second.rows, strict=False):
        marks = ["*" if row.k == forecast.best_k else " " for row, forecast in ((one, first), (other, second))]
        lines.append(
            f"{one.k:>4}{one.tpot_ms:>13.3f}{marks[0]}{other.tpot_ms:>13.3f}{marks[1]}"
            f"{1 - other.tpot_ms / one.tpot_ms:>10.1%}{one.speedup:>11.3f}x{other.speedup:>11.3f}x"
        )
    a, b = first.best, second.best
    lines.append(
        f"best K: {a.k} ({a.tpot_ms:.3f} ms, {a.speedup:.3f}x) and {b.k} ({b.tpot_ms:.3f} ms, {b.speedup:.3f}x)"
    )
    return "\n".join(lines)


def predictions(series: Series, seen: Sequence[int], found: Mapping[int, Sequence[Prediction]]) -> str:
    """Return a table of predicted and measured speed-ups in TPOT, with a row per concurrency."""
    lines = [
        f"{series.name}: speed-up in TPOT from the rows at K = {', '.join(map(str, seen))} and vanilla",
        f"{'concurrency':>12}{'mean error':>12}   K: forecast / measured",
    ]
    for concurrency, items in found.items():
        pairs = "  ".join(f"{item.k}: {item.forecast:.2f} / {item.measured:.2f}" for item in items)
        lines.append(f"{concurrency:>12}{fmean(abs(item.error) for item in items):>12.1%}   {pairs}")
    return "\n".join(lines)


def departures(items: Sequence[Departure]) -> str:
    """Return a table that explains where the speed-up in throughput differs from that in TPOT, with a row per
    concurrency, at one K each."""
    lines = [
        "output tokens per second = TPOT x what time to first token takes (prefill, queueing) x load:",
        f"{'concurrency':>12}{'K':>4}{'throughput':>12}{'TPOT':>8}{'first token':>13}{'load':>7}"
        f"{'mean TTFT (ms), vanilla':>32}",
    ]
    for item in items:
        ttft = f"{item.ttft_ms:.0f}, {item.vanilla_ttft_ms:.0f}"
        lines.append(
            f"{item.concurrency:>12}{item.k:>4}{item.throughput:>11.2f}x{item.tpot:>7.2f}x{item.first_token:>12.2f}x"
            f"{item.load:>6.2f}x{ttft:>32}"
        )
    return "\n".join(lines)


def record(forecast: Forecast) -> dict[str, Any]:
    """Return a forecast as JSON values."""
    return {
        "name": forecast.name,
        "batch": forecast.batch,
        "best_k": forecast.best_k,
        "last_paying_k": forecast.last_paying_k,
        "break_even_batch": forecast.break_even_batch,
        "rows": [
            {
                "k": row.k,
                "itl_ms": row.itl_ms,
                "acceptance_length": row.acceptance_length,
                "tpot_ms": row.tpot_ms,
                "speedup": row.speedup,
            }
            for row in forecast.rows
        ],
    }
