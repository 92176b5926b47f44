"""From the rows of a sweep to cost models, acceptance curves, and predictions of K that were not looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specrs.bench.results import SweepRow
from specrs.core import CostModel
from specrs.errors import InvalidConfigError, invalid_config
from specrs.forecast.acceptance import GeometricAcceptance
from specrs.forecast.regression import LineFit

Workload = tuple[str, str, float, int]
"""Analysis, data set, temperature, tensor parallelism."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A speed-up in TPOT, forecast and measured, at a K whose row the forecast has not seen."""

    concurrency: int
    k: int
    forecast: float
    measured: float

    @property
    def error(self) -> float:
        """forecast / measured - 1."""
        return self.forecast / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class Departure:
    """Why a speed-up in output tokens per second is not the speed-up in TPOT: `throughput = tpot * first_token * load`.

    `first_token` is what time to first token takes from it (prefill, and queueing for a place in the batch): the
    speed-up of a whole request over that of its decoding. `load` is the rest, how many requests were in flight and how
    long they were: requests that arrive at a fixed rate leave a faster server idle, and the last ones run alone.
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
    """One drafter on one workload: `rows[concurrency][K]`, and `vanilla[concurrency]` beside them."""

    method: str
    draft_model: str
    workload: Workload
    rows: Mapping[int, Mapping[int, SweepRow]]
    vanilla: Mapping[int, SweepRow]

    @property
    def name(self) -> str:
        """How tables and pictures call it."""
        return f"{self.workload[0]}, {self.method}, {self.draft_model.rstrip('/').rpartition('/')[2]}"

    @property
    def concurrencies(self) -> list[int]:
        """Those with drafts and with a vanilla row."""
        return sorted(set(self.rows) & set(self.vanilla))

    def ks(self, concurrency: int) -> list[int]:
        """Numbers of draft tokens measured there."""
        return sorted(self.rows[concurrency])

    def line(self, concurrency: int, ks: Sequence[int] | None = None) -> LineFit:
        """ITL against K: slope T_d, intercept T_t. `ks` are the rows it may look at, all by default.

        Raises `InvalidConfigError` with fewer than two, for a K that is not there, and where ITL falls with K.
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
        """The geometric curve through the acceptance lengths. Raises as `line`, and for rows without one."""
        lengths = {}
        for k, row in self._rows(concurrency, ks).items():
            if row.acceptance_length is None:
                raise invalid_config(
                    f"acceptance_length of {self.name} at concurrency {concurrency}, K = {k}", None, "must be there"
                )
            lengths[k] = row.acceptance_length
        return GeometricAcceptance.fit(lengths)

    def cost_model(self, ks: Sequence[int] | None = None, only: Sequence[int] | None = None) -> CostModel:
        """Lines of ITL at each concurrency (or `only` those), beside the TPOT of vanilla rows. Raises as `line`."""
        batches = self.concurrencies if only is None else sorted(only)
        lines = [self.line(concurrency, ks) for concurrency in batches]
        return CostModel.lines(
            batches,
            [line.slope for line in lines],
            [line.intercept for line in lines],
            [self.vanilla[concurrency].mean_tpot for concurrency in batches],
        )

    def predict(self, concurrency: int, ks: Sequence[int]) -> list[Prediction]:
        """Speed-ups at the K that are not among `ks`, from the rows at `ks` and the vanilla row alone."""
        model = self.cost_model(ks, [concurrency])
        curve = self.acceptance(concurrency, ks)
        plain = self.vanilla[concurrency].mean_tpot
        return [
            Prediction(concurrency, k, model.speedup(concurrency, k, curve.length(k)), plain / row.mean_tpot)
            for k, row in sorted(self.rows[concurrency].items())
            if k not in ks
        ]

    def departure(self, concurrency: int, k: int) -> Departure:
        """How the speed-up in throughput comes about at one measured K."""
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
    """The drafters of a sweep, in the order in which they first appear. Of repeated rows that of the median TPOT holds.

    Raises `InvalidConfigError` where a workload has no vanilla row: there is nothing to compare with.
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
        raise InvalidConfigError(
            "the sweep has no rows with drafts; expected is at least one with num_spec_toks above 0"
        )
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
    """A run that was measured, so that its figures belong together: of an even number the faster of the middle two."""
    return sorted(runs, key=lambda row: row.mean_tpot)[(len(runs) - 1) // 2]
