"""Turns the rows of a sweep into cost models, acceptance curves, and predictions for values of K that were left out of
the fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specrs.bench.results import SweepRow
from specrs.core import CostModel
from specrs.errors import InvalidConfigError, invalid_config
from specrs.forecast.acceptance import GeometricAcceptance
from specrs.forecast.regression import LineFit

Workload = tuple[str, str, float, int]
"""Workload: (analysis, data set, temperature, number of tensor parallel ranks). Rows of one workload are compared."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted and measured speed-up in TPOT at one K. The row of that K was not used for the prediction."""

    concurrency: int
    k: int
    forecast: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the prediction: forecast / measured - 1."""
        return self.forecast / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class Departure:
    """Factors of the speed-up in output tokens per second: `throughput = tpot * first_token * load`.

    `tpot` is the speed-up in TPOT. `first_token` is the effect of the time to first token (prefill, and queueing for a
    place in the batch): the speed-up of a whole request over that of its decoding. `load` is the rest, the effect of
    how many requests were in flight and for how long. Requests that arrive at a fixed rate leave a faster server idle,
    and the last ones run alone.
    """

    concurrency: int
    k: int
    throughput: float
    tpot: float
    first_token: float
    load: float
    ttft_ms: float
    vanilla_ttft_ms: float


@dataclass(frozen=True)
class Series:
    """Rows of one drafter on one workload. `rows[concurrency][K]` are rows with drafts; `vanilla[concurrency]` are rows
    without drafts."""

    method: str
    draft_model: str
    workload: Workload
    rows: Mapping[int, Mapping[int, SweepRow]]
    vanilla: Mapping[int, SweepRow]

    @property
    def name(self) -> str:
        """Name of the series in tables and charts."""
        return f"{self.workload[0]}, {self.method}, {self.draft_model.rstrip('/').rpartition('/')[2]}"

    @property
    def concurrencies(self) -> list[int]:
        """Concurrencies that have both rows with drafts and a vanilla row, ascending."""
        return sorted(set(self.rows) & set(self.vanilla))

    def ks(self, concurrency: int) -> list[int]:
        """Return the numbers of draft tokens measured at `concurrency`, ascending."""
        return sorted(self.rows[concurrency])

    def line(self, concurrency: int, ks: Sequence[int] | None = None) -> LineFit:
        """Fit a line to ITL as a function of K at one concurrency. The slope is T_d, the time of a draft; the intercept
        is T_t, the time of a target pass. `ks` are the rows to use; None: all.

        Raises `InvalidConfigError` for fewer than two rows, for a K without a row, and if ITL falls with K.
        """
        rows = self._rows(concurrency, ks)
        if len(rows) < 2:
            where = f"K of {self.name} at concurrency {concurrency}"
            raise invalid_config(where, sorted(rows), "must be at least two, for a line of ITL against K")
        fit = LineFit.through([float(k) for k in rows], [row.mean_itl for row in rows.values()])
        if fit.slope < 0:
            where = f"T_d of {self.name} at concurrency {concurrency}"
            raise invalid_config(
                where,
                round(fit.slope, 4),
                "must not be negative: ITL fell with K, so the rows are too noisy for a line",
            )
        return fit

    def acceptance(self, concurrency: int, ks: Sequence[int] | None = None) -> GeometricAcceptance:
        """Fit a geometric curve to the acceptance lengths at one concurrency. `ks` are the rows to use; None: all.

        Raises `InvalidConfigError` for fewer than two rows, for a K without a row, and for a row without an acceptance
        length.
        """
        lengths = {}
        for k, row in self._rows(concurrency, ks).items():
            if row.acceptance_length is None:
                raise invalid_config(
                    f"acceptance_length of {self.name} at concurrency {concurrency}, K = {k}", None, "must be there"
                )
            lengths[k] = row.acceptance_length
        return GeometricAcceptance.fit(lengths)

    def cost_model(self, ks: Sequence[int] | None = None, only: Sequence[int] | None = None) -> CostModel:
        """Return the cost model made of a line of ITL against K at each concurrency, with the TPOT of vanilla rows.
        `only` limits the concurrencies, `ks` the rows with drafts.

        Raises `InvalidConfigError` if a concurrency has fewer than two rows, if a K has no row, and if ITL falls with
        K.
        """
        batches = self.concurrencies if only is None else sorted(only)
        lines = [self.line(concurrency, ks) for concurrency in batches]
        return CostModel.lines(
            batches,
            [line.slope for line in lines],
            [line.intercept for line in lines],
            [self.vanilla[concurrency].mean_tpot for concurrency in batches],
        )

    def predict(self, concurrency: int, ks: Sequence[int]) -> list[Prediction]:
        """Predict the speed-ups at every measured K that is not in `ks`. Uses only the rows at `ks` and the vanilla
        row."""
        model = self.cost_model(ks, [concurrency])
        curve = self.acceptance(concurrency, ks)
        plain = self.vanilla[concurrency].mean_tpot
        return [
            Prediction(concurrency, k, model.speedup(concurrency, k, curve.length(k)), plain / row.mean_tpot)
            for k, row in sorted(self.rows[concurrency].items())
            if k not in ks
        ]

    def departure(self, concurrency: int, k: int) -> Departure:
        """Return the factors of the throughput's speed-up at one measured K."""
        row, plain = self._rows(concurrency, [k])[k], self.vanilla[concurrency]
        throughput = row.output_token_throughput / plain.output_token_throughput
        tpot, latency = plain.mean_tpot / row.mean_tpot, plain.latency_ms / row.latency_ms
        return Departure(
            concurrency, k, throughput, tpot, latency / tpot, throughput / latency, row.mean_ttft, plain.mean_ttft
        )

    def _rows(self, concurrency: int, ks: Sequence[int] | None) -> dict[int, SweepRow]:
        rows = self.rows.get(concurrency, {})
        if ks is None:
            return dict(sorted(rows.items()))
        missing = [k for k in ks if k not in rows]
        if missing:
            where = f"K of {self.name} at concurrency {concurrency}"
            raise invalid_config(where, list(ks), f"must be among those measured: {', '.join(map(str, sorted(rows)))}")
        return {k: rows[k] for k in ks}


def series(rows: Sequence[SweepRow]) -> list[Series]:
    """Group the rows of a sweep by drafter and workload, in the order in which they first appear. Of repeated rows, the
    one with the median TPOT is used.

    Raises `InvalidConfigError` if no row has drafts, and if a workload has no vanilla row to compare with.
    """
    vanilla: dict[Workload, dict[int, list[SweepRow]]] = {}
    found: dict[tuple[str, str, Workload], dict[int, dict[int, list[SweepRow]]]] = {}
    for row in rows:
        if row.vanilla:
            vanilla.setdefault(row.workload, {}).setdefault(row.concurrency, []).append(row)
        else:
            group = found.setdefault((row.sd_method, row.draft_model, row.workload), {})
            group.setdefault(row.concurrency, {}).setdefault(row.num_spec_toks, []).append(row)
    if not found:
        raise InvalidConfigError("the sweep has no rows with drafts; must have at least one with num_spec_toks above 0")
    result = []
    for (method, draft_model, workload), group in found.items():
        if workload not in vanilla:
            raise invalid_config(
                "sd_method", sorted({row.sd_method for row in rows}), "must have a row 'None' (vanilla)"
            )
        drafted = {c: {k: _median(runs) for k, runs in by_k.items()} for c, by_k in group.items()}
        plain = {c: _median(runs) for c, runs in vanilla[workload].items()}
        result.append(Series(method, draft_model, workload, drafted, plain))
    return result


def _median(runs: Sequence[SweepRow]) -> SweepRow:
    """Return the run with the median TPOT; of an even number, the faster of the middle two. It is a run that was
    measured, so its figures belong together."""
    return sorted(runs, key=lambda row: row.mean_tpot)[(len(runs) - 1) // 2]
