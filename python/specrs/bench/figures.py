"""Charts for choosing speculation settings, drawn from a sweep's rows. matplotlib is imported only here.

Each workload (analysis, data set, temperature) has a column of panels. Speed-ups are in output tokens per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specrs.bench.results import SweepRow
from specrs.errors import InvalidConfigError, invalid_config
from specrs.forecast.sweeps import Series, series

DRAFT_MODEL = "draft_model"
FORMATS = ("png", "svg", "pdf")
_METRICS = (("p99_ttft", "P99 TTFT (ms)"), ("p99_tpot", "P99 TPOT (ms)"), ("p99_itl", "P99 ITL (ms)"))
_MARKERS = "osD^vP*X"
SPEEDUP = "speed-up over vanilla\n(output tokens per second)"
"""Label of an axis that shows `speedup`."""


class Sweep:
    """Rows of a sweep by workload, with a colour and marker for each drafter, and the K at which drafters are
    compared."""

    def __init__(self, rows: Sequence[SweepRow], k: int | None = None) -> None:
        """Group `rows`. `k` is the K of comparisons; None chooses one for each workload. Raises `InvalidConfigError` if
        no row has drafts, if a workload has no vanilla row, and if `k` was not measured."""
        self.workloads: dict[tuple[str, str, float, int], list[Series]] = {}
        found = series(rows)
        # drafters of the method that the first figures are about come first
        for item in sorted(found, key=lambda item: item.method != DRAFT_MODEL):
            self.workloads.setdefault(item.workload, []).append(item)
        names = list(dict.fromkeys(item.draft_model for items in self.workloads.values() for item in items))
        self.colors = {name: f"C{i % 10}" for i, name in enumerate(names)}
        self.markers = {name: _MARKERS[i % len(_MARKERS)] for i, name in enumerate(names)}
        self.k = {workload: _common_k(items) if k is None else k for workload, items in self.workloads.items()}
        if k is not None and not any(k in rows for item in found for rows in item.rows.values()):
            raise invalid_config("--k", k, "must be a K that was measured")

    def methods(self, workload: tuple[str, str, float, int]) -> set[str]:
        """Return the methods that were measured on a workload."""
        return {item.method for item in self.workloads[workload]}


def speedup(item: Series, concurrency: int, k: int) -> float:
    """Return output tokens per second at `k`, divided by vanilla's."""
    rows = item.rows[concurrency]
    return rows[k].output_token_throughput / item.vanilla[concurrency].output_token_throughput


def best(item: Series, concurrency: int) -> int:
    """Return the K with the highest speed-up at a concurrency."""
    return max(item.ks(concurrency), key=lambda k: speedup(item, concurrency, k))


def _common_k(items: Sequence[Series]) -> int:
    """Return the K at which to compare drafters: the one with the highest geometric mean of the drafters' best
    speed-ups. Only K that all drafters have are candidates, or any K if there is none."""
    measured = [{k for c in item.concurrencies for k in item.ks(c)} for item in items]
    candidates = set.intersection(*measured) or set.union(*measured)

    def score(k: int) -> float:
        peaks = [
            max(speedup(item, c, k) for c in item.concurrencies if k in item.rows[c])
            for item, ks in zip(items, measured, strict=True)
            if k in ks
        ]
        return math.fsum(map(math.log, peaks)) / len(peaks)

    return max(sorted(candidates), key=score)


def draw(sweep: Sweep, numbers: Iterable[int], folder: Path, suffix: str) -> tuple[list[Path], list[str]]:
    """Write the charts `numbers` into `folder`. Return their paths, and a reason for each chart that was left out
    because no row has its data. Raises `InvalidConfigError` for an unknown number or format, and if a file cannot be
    written."""
    if suffix not in FORMATS:
        raise invalid_config("--format", suffix, f"must be one of {', '.join(FORMATS)}")
    paths, left_out = [], []
    for number in numbers:
        if number not in FIGURES:
            raise invalid_config("--figures", number, f"must be of 1 to {max(FIGURES)}")
        name, make = FIGURES[number]
        try:
            figure = make(sweep)
        except _NothingToDraw as reason:
            left_out.append(f"figure {number}: {reason}")
            continue
        path = folder / f"figure-{number}-{name}.{suffix}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=130)
        except OSError as error:
            raise InvalidConfigError(f"--output-dir={folder}: cannot be written: {error.strerror}") from None
        paths.append(path)
    return paths, left_out


class _NothingToDraw(Exception):
    """Exception that says that no row has the data for a chart."""


def _best_k(sweep: Sweep, chosen: Callable[[Series], bool], title: str) -> Any:
    """Draw speed-up against concurrency, with the best K at each point, for the series that `chosen` accepts."""
    columns = {w: [item for item in items if chosen(item)] for w, items in sweep.workloads.items()}
    columns = {workload: items for workload, items in columns.items() if items}
    if not columns:
        raise _NothingToDraw("there are no rows of its methods")
    figure, panels = _panels(columns, 1, title)
    for panel, items in zip(panels[0], columns.values(), strict=True):
        for item in items:
            points = [(c, best(item, c)) for c in item.concurrencies]
            values = [speedup(item, c, k) for c, k in points]
            panel.plot(item.concurrencies, values, label=_name(item), **_style(sweep, item))
            for (c, k), value in zip(points, values, strict=True):
                panel.annotate(f"K={k}", (c, value), xytext=(0, 6), textcoords="offset points", fontsize=7, ha="center")
        _concurrency(panel, items)
        _parity(panel)
        panel.set_ylabel(SPEEDUP)
        panel.legend(fontsize=8)
    return figure


def _draft_models(sweep: Sweep) -> Any:
    return _best_k(sweep, lambda item: item.method == DRAFT_MODEL, "1. Speed-up of draft models, best K at each point")


def _other_methods(sweep: Sweep) -> Any:
    return _best_k(sweep, lambda item: item.method != DRAFT_MODEL, "3. Speed-up of other methods, best K at each point")


def _by_k(sweep: Sweep) -> Any:
    """Draw speed-up against K: a row of panels per drafter, a line per concurrency."""
    from matplotlib import colormaps

    depth = max(map(len, sweep.workloads.values()))
    figure, panels = _panels(sweep.workloads, depth, "2. Speed-up against K, by concurrency")
    for column, items in enumerate(sweep.workloads.values()):
        for line, item in enumerate(items):
            panel = panels[line][column]
            shades = colormaps["viridis"]
            for i, concurrency in enumerate(item.concurrencies):
                ks = item.ks(concurrency)
                color = shades(0.9 * i / max(len(item.concurrencies) - 1, 1))
                values = [speedup(item, concurrency, k) for k in ks]
                panel.plot(ks, values, marker=".", color=color, label=str(concurrency))
            _integers(panel)
            _parity(panel)
            panel.set_title(f"{panel.get_title()}\n{_name(item)}" if line == 0 else _name(item), fontsize=9)
            panel.set(xlabel="number of speculative tokens K", ylabel=SPEEDUP)
            # next to the panel: the lines fill all of it
            panel.legend(title="concurrency", fontsize=7, title_fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
        for line in range(len(items), depth):
            panels[line][column].set_axis_off()
    return figure


def _compared(sweep: Sweep) -> Any:
    """Draw the speed-up of every drafter at the same K."""
    figure, panels = _panels(sweep.workloads, 1, "4. Methods at the same K")
    for panel, (workload, items) in zip(panels[0], sweep.workloads.items(), strict=True):
        k = sweep.k[workload]
        for item in items:
            at = [c for c in item.concurrencies if k in item.rows[c]]
            panel.plot(at, [speedup(item, c, k) for c in at], label=f"{_name(item)}, K={k}", **_style(sweep, item))
        _concurrency(panel, items)
        _parity(panel)
        panel.set_ylabel(SPEEDUP)
        panel.legend(fontsize=8)
    return figure


def _acceptance(sweep: Sweep) -> Any:
    """Draw acceptance length against K: the mean over concurrencies, the minimum and the maximum."""
    figure, panels = _panels(sweep.workloads, 1, "5. Acceptance length against K")
    drawn = False
    for panel, items in zip(panels[0], sweep.workloads.values(), strict=True):
        for item in items:
            lengths: dict[int, list[float]] = {}
            for rows in item.rows.values():
                for k, row in rows.items():
                    if row.acceptance_length is not None:
                        lengths.setdefault(k, []).append(row.acceptance_length)
            if not lengths:
                continue
            drawn = True
            ks = sorted(lengths)
            means = [math.fsum(lengths[k]) / len(lengths[k]) for k in ks]
            panel.plot(ks, means, label=_name(item), **_style(sweep, item))
            low, high = [min(lengths[k]) for k in ks], [max(lengths[k]) for k in ks]
            panel.fill_between(ks, low, high, color=sweep.colors[item.draft_model], alpha=0.25, linewidth=0)
        _integers(panel)
        panel.set(xlabel="number of speculative tokens K", ylabel="acceptance length (band: all concurrencies)")
        panel.set_ylim(bottom=1)
        panel.legend(fontsize=8)
    if not drawn:
        raise _NothingToDraw("no row has an acceptance length")
    return figure


def _throughput(sweep: Sweep) -> Any:
    """Draw output tokens per second of every drafter at one K, and of vanilla."""
    figure, panels = _panels(sweep.workloads, 1, "6. Output token throughput")
    for panel, (workload, items) in zip(panels[0], sweep.workloads.items(), strict=True):
        _with_vanilla(sweep, panel, workload, items, lambda row: row.output_token_throughput)
        panel.set_ylabel("output tokens per second")
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=8)
    return figure


def _latencies(sweep: Sweep) -> Any:
    """Draw the 99th percentiles of TTFT, TPOT and ITL of every drafter at one K, and of vanilla."""
    figure, panels = _panels(sweep.workloads, len(_METRICS), "7. 99th percentiles, logarithmic")
    for line, (name, label) in enumerate(_METRICS):
        for panel, (workload, items) in zip(panels[line], sweep.workloads.items(), strict=True):
            _with_vanilla(sweep, panel, workload, items, partial(_column, name))
            _logarithmic(panel)
            panel.set_ylabel(label)
            if line == 0:
                panel.legend(fontsize=8)
    return figure


def _with_vanilla(
    sweep: Sweep,
    panel: Any,
    workload: tuple[str, str, float, int],
    items: Sequence[Series],
    value: Callable[[SweepRow], float],
) -> None:
    k, vanilla = sweep.k[workload], items[0].vanilla
    for item in items:
        at = [c for c in item.concurrencies if k in item.rows[c]]
        panel.plot(at, [value(item.rows[c][k]) for c in at], label=f"{_name(item)}, K={k}", **_style(sweep, item))
    panel.plot(
        sorted(vanilla), [value(vanilla[c]) for c in sorted(vanilla)], "--", color="0.3", marker=".", label="vanilla"
    )
    _concurrency(panel, items)


def _column(name: str, row: SweepRow) -> float:
    return float(getattr(row, name))


def _panels(columns: Mapping[tuple[str, str, float, int], Any], rows: int, title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4 * len(columns), 0.6 + 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, len(columns), squeeze=False)
    for panel, (analysis, dataset, temperature, _) in zip(panels[0], columns, strict=True):
        panel.set_title(f"{analysis}, {dataset}, T = {temperature:g}", fontsize=10)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
    figure.suptitle(title, fontsize=11)
    return figure, panels


def _style(sweep: Sweep, item: Series) -> dict[str, Any]:
    return {"color": sweep.colors[item.draft_model], "marker": sweep.markers[item.draft_model], "markersize": 5}


def _name(item: Series) -> str:
    """Return the name of the drafter, with its method if the name does not include it."""
    name = item.draft_model.rstrip("/").rpartition("/")[2]
    return name if item.method.lower() in name.lower() or item.method == DRAFT_MODEL else f"{name} ({item.method})"


def _concurrency(panel: Any, items: Sequence[Series]) -> None:
    """Set a logarithmic axis with a tick at each measured concurrency."""
    from matplotlib.ticker import NullLocator

    ticks = sorted({c for item in items for c in item.concurrencies})
    panel.set_xscale("log", base=2)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.set_xlabel("concurrency")


def _integers(panel: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def _logarithmic(panel: Any) -> None:
    """Set a logarithmic axis of milliseconds with plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter("{x:g}")


def _parity(panel: Any) -> None:
    panel.axhline(1.0, color="0.3", linewidth=1, linestyle=":")
    # room above the highest point for what is written there
    panel.set_ylim(0, 1.12 * max(panel.dataLim.y1, 1.0))


FIGURES: Mapping[int, tuple[str, Callable[[Sweep], Any]]] = {
    1: ("speedup-concurrency", _draft_models),
    2: ("speedup-k", _by_k),
    3: ("other-methods", _other_methods),
    4: ("methods", _compared),
    5: ("acceptance-length", _acceptance),
    6: ("throughput", _throughput),
    7: ("latencies", _latencies),
}
"""For each chart's number, the name of its file and the function that draws it."""
