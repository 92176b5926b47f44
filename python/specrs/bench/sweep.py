"""Sweep over drafters, K, temperatures and concurrencies: one server per drafter and K, one row per measurement.
Resumes where it stopped; draws nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrs.bench.counters import SpecDecodeCounters
from specrs.bench.metrics import ServeMetrics, compute
from specrs.bench.results import VANILLA, SweepRow, read, read_settings, write
from specrs.bench.serve import Run
from specrs.errors import EngineError, InvalidConfigError, check_int, invalid_config, short


@dataclass(frozen=True)
class Drafter:
    """A `--speculative-config` without `num_speculative_tokens`, with its name in results."""

    method: str
    name: str
    config: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Setting:
    """Configuration of one server: a drafter at one K. Vanilla has no drafter and K = 0."""

    drafter: Drafter | None
    k: int

    @property
    def speculative_config(self) -> dict[str, Any] | None:
        """Speculative configuration that the server is started with; None for vanilla."""
        return None if self.drafter is None else {**self.drafter.config, "num_speculative_tokens": self.k}

    @property
    def name(self) -> str:
        """Name of the setting in progress lines and logs."""
        return "vanilla" if self.drafter is None else f"{self.drafter.method}-{self.drafter.name}-K{self.k}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement on a server, at a temperature and a concurrency."""

    temperature: float
    concurrency: int


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """Measurements of a sweep, and their names in results. Vanilla is always measured, first, because speed-ups are
    relative to it.

    Every cell is measured `num_runs` times, in rounds over all servers, so that a machine that drifts affects all
    equally.

    `fixed` holds the settings that all cells share. A file is continued only by a sweep with the same ones.
    """

    drafters: Sequence[Drafter]
    ks: Sequence[int]
    temperatures: Sequence[float]
    concurrencies: Sequence[int]
    dataset: str
    analysis: str
    tp: int = 1
    num_runs: int = 1
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in (("--drafter", [d.name for d in self.drafters]), ("--k", self.ks)):
            if len(set(values)) < len(values):
                raise invalid_config(name, list(values), "must be different from each other")
        check_int(InvalidConfigError, "--num-runs", self.num_runs, 1)
        if not self.drafters or not any(self.ks):
            raise invalid_config("--k", list(self.ks), "must have a K above 0 for at least one drafter")
        if min(self.concurrencies) < 1:
            raise invalid_config("--max-concurrency", list(self.concurrencies), "must be at least 1")
        if min(self.temperatures) < 0:
            raise invalid_config("--temperature", list(self.temperatures), "must not be negative")

    @property
    def settings(self) -> list[Setting]:
        """Settings of the servers, vanilla first."""
        drafted = [Setting(drafter, k) for drafter in self.drafters for k in self.ks if k]
        return [Setting(None, 0), *drafted]

    @property
    def cells(self) -> list[Cell]:
        """Measurements on each server."""
        return [Cell(temperature, c) for temperature in self.temperatures for c in self.concurrencies]

    def count(self, rows: Sequence[SweepRow], setting: Setting, cell: Cell) -> int:
        """Return how often this cell has been measured with this setting."""
        method, name = (VANILLA, VANILLA) if setting.drafter is None else (setting.drafter.method, setting.drafter.name)
        wanted = (method, name, setting.k, cell.temperature, cell.concurrency, self.dataset, self.analysis, self.tp)
        return sum(
            (r.sd_method, r.draft_model, r.num_spec_toks, r.temp, r.concurrency, r.dataset, r.analysis, r.tp) == wanted
            for r in rows
        )


Measure = Callable[[Setting, Sequence[Cell]], Iterator[tuple[Cell, Run]]]
"""Function that starts a server for a setting, yields a run for each cell in turn, and stops the server when it is
closed."""


def start(path: Path, plan: SweepPlan, restart: bool) -> list[SweepRow]:
    """Return the rows that the file already has. Raises `InvalidConfigError` if the file belongs to another sweep."""
    if restart or not path.exists():
        return []
    settings = read_settings(path)
    for name in sorted({*settings, *plan.fixed}):
        if settings.get(name) != json.loads(json.dumps(plan.fixed.get(name))):
            before, now = short(settings.get(name)), short(plan.fixed.get(name))
            raise InvalidConfigError(
                f"--output={path}: its rows were measured with {name}={before}, not {now}; "
                "use the same value, another --output, or --restart"
            )
    return read(path)


def sweep(
    path: Path,
    plan: SweepPlan,
    measure: Measure,
    *,
    restart: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> list[SweepRow]:
    """Measure every cell that has no row yet. Each row is written to the file as soon as it is measured.

    If a request of a run failed, or the run ended early, its figures are kept next to the file, in `*.partial.jsonl`,
    and `EngineError` is raised, because later cells would break off, too. The next sweep measures the cell again.
    """
    rows = start(path, plan, restart)
    done, total = 0, plan.num_runs * len(plan.settings) * len(plan.cells)
    for number, setting in itertools.product(range(plan.num_runs), plan.settings):
        missing = [cell for cell in plan.cells if plan.count(rows, setting, cell) <= number]
        done += len(plan.cells) - len(missing)
        if not missing:
            continue
        runs = measure(setting, missing)
        try:
            for cell, run in runs:
                metrics = compute(run.records, run.duration)
                if run.gone is not None or metrics.failed:
                    raise _broken(path, setting, cell, run, metrics)
                rows.append(_row(plan, setting, cell, metrics, run.counters))
                write(path, rows, plan.fixed)
                done += 1
                tell(_line(rows[-1], done, total))
        finally:
            if hasattr(runs, "close"):
                runs.close()
    return rows


def _line(row: SweepRow, done: int, total: int) -> str:
    what = "vanilla" if row.vanilla else f"{row.draft_model} K = {row.num_spec_toks}"
    length = "" if row.acceptance_length is None else f", acceptance length {row.acceptance_length:.2f}"
    return (
        f"[{done}/{total}] {what}, T = {row.temp:g}, concurrency {row.concurrency}: "
        f"{row.output_token_throughput:.1f} tok/s, TPOT {row.mean_tpot:.2f} ms, ITL {row.mean_itl:.2f} ms{length}"
    )


def _broken(path: Path, setting: Setting, cell: Cell, run: Run, metrics: ServeMetrics) -> EngineError:
    """Append the figures of a run that broke off to `*.partial.jsonl`, and return an error that says why it did."""
    errors = [record.error for record in run.records if record.error is not None]
    partial = path.with_suffix(".partial.jsonl")
    kept = {
        "partial": True,
        "setting": setting.name,
        "temperature": cell.temperature,
        "concurrency": cell.concurrency,
        "reason": run.gone or errors[0],
        "completed": metrics.completed,
        "failed": metrics.failed,
        "duration": metrics.duration,
        "output_token_throughput": metrics.output_throughput,
        "mean_ttft": metrics.ttft.mean,
        "mean_tpot": metrics.tpot.mean,
        "mean_itl": metrics.itl.mean,
    }
    with partial.open("a", encoding="utf-8") as file:
        file.write(json.dumps(kept) + "\n")
    return EngineError(
        f"{setting.name} at T = {cell.temperature:g}, concurrency {cell.concurrency} broke off with "
        f"{metrics.completed} of {len(run.records)} requests answered: {run.gone or errors[0]}; kept in {partial}, "
        f"finished rows in {path}; the same command goes on from there"
    )


def _row(
    plan: SweepPlan, setting: Setting, cell: Cell, metrics: ServeMetrics, counters: SpecDecodeCounters | None
) -> SweepRow:
    drafter = setting.drafter
    counted = counters if drafter is not None and counters is not None and counters.drafts else None
    return SweepRow(
        dataset=plan.dataset,
        temp=cell.temperature,
        concurrency=cell.concurrency,
        benchmark_duration_s=metrics.duration,
        n_reqs=metrics.completed,
        req_throughput=metrics.request_throughput,
        mean_ttft=metrics.ttft.mean,
        median_ttft=metrics.ttft.median,
        p99_ttft=metrics.ttft.percentile(99),
        mean_tpot=metrics.tpot.mean,
        median_tpot=metrics.tpot.median,
        p99_tpot=metrics.tpot.percentile(99),
        mean_itl=metrics.itl.mean,
        median_itl=metrics.itl.median,
        p99_itl=metrics.itl.percentile(99),
        output_token_throughput=metrics.output_throughput,
        sd_method=VANILLA if drafter is None else drafter.method,
        num_spec_toks=setting.k,
        draft_model=VANILLA if drafter is None else drafter.name,
        tp=plan.tp,
        acceptance_rate=None if counted is None else 100 * counted.acceptance_rate,
        acceptance_length=None if counted is None else counted.acceptance_length,
        analysis=plan.analysis,
    )
