"""Computes figures from the results of processes: of one run, over runs, and whether greedy ids agree. Formats
nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.job import Ids
from peers.settings import Line, Setting

SPEED, FIRST, ITERATION, LENGTH = "decode_tokens_per_s", "first_token_ms", "ms_per_iteration", "acceptance_length"
MEMORY = "peak_mb"


def figures(groups: Sequence[dict[str, Any]], batch: int) -> dict[str, float]:
    """Compute the figures of one run from its groups (`peers.job.Group`).

       `decode_tokens_per_s`: tokens after the first of each request over the time after the first; of a batch, after
    the requests' mean first. `first_token_ms`: the median over groups. `ms_per_iteration`: the same time over passes of
    the target for each request, times `batch`. `acceptance_length`, with drafts: tokens of such a pass.
    """
    tokens = sum(len(ids) for group in groups for ids in group["ids"]) - sum(group["first_tokens"] for group in groups)
    seconds = sum(group["total_s"] - group["first_s"] for group in groups)
    counts = [group["passes"] for group in groups]
    passes = tokens if None in counts else sum(counts)
    found = {
        SPEED: tokens / seconds,
        FIRST: 1e3 * statistics.median(group["first_s"] for group in groups),
        ITERATION: 1e3 * seconds * batch / passes,
    }
    if None not in counts:
        found[LENGTH] = tokens / passes
    return {key: round(value, 5) for key, value in found.items()}


@dataclass
class Measured:
    """Runs of one case: an engine in one setting. `reason`: why it has none, or fewer than rounds. `ids`: ids of every
    request in the last run."""

    line: Line
    runs: list[dict[str, float]] = field(default_factory=list)
    reason: str | None = None
    ids: Ids = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def take(self, result: dict[str, Any], batch: int) -> None:
        """Add the result of a run, or the error with which it failed."""
        if "error" in result:
            self.reason = result["error"]
            return
        peak = result.get("peak_bytes")
        self.runs.append(figures(result["groups"], batch) | ({} if peak is None else {MEMORY: round(peak / 1e6, 1)}))
        self.ids = [ids for group in result["groups"] for ids in group["ids"]]
        self.versions = result["versions"]

    def values(self, key: str) -> list[float]:
        """Return the figure `key` of every run that has it, ascending."""
        return sorted(run[key] for run in self.runs if key in run)

    def median(self, key: str) -> float | None:
        """Return the median of the figure `key`; None if no run has it."""
        values = self.values(key)
        return statistics.median(values) if values else None


def find(lines: Sequence[Measured], line: Line) -> Measured | None:
    """Return the measurement of the case `line`; None if it has no runs."""
    return next((each for each in lines if each.line == line and each.runs), None)


def best_peer(lines: Sequence[Measured], dtype: str, k: int | str | None = None, key: str = SPEED) -> float | None:
    """Return the best median of the peers with this dtype, at this K or at any: the largest speed, or the least
    time."""
    medians = [
        median
        for each in lines
        if each.line.engine != "specrs" and each.line.dtype == dtype and k in (None, each.line.k)
        if (median := each.median(key)) is not None
    ]
    return None if not medians else max(medians) if key == SPEED else min(medians)


def ratio(one: float | None, other: float | None) -> float | None:
    """Return `one / other`; None if either is missing."""
    return None if one is None or other is None else one / other


def first_difference(one: Ids, other: Ids) -> tuple[int, int] | None:
    """Return the request and position of the first token that differs between two runs; None if all tokens are
    equal."""
    for request, (left, right) in enumerate(zip(one, other, strict=True)):
        if left != right:
            differing = (i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1])
            return request, next(differing, min(len(left), len(right)))
    return None


def compare_ids(lines: Sequence[Measured], setting: Setting) -> list[dict[str, Any]]:
    """Compare the greedy ids of every line with those of the first line without drafts of the same weights and dtype,
    transformers' if it ran. Also return requests that ended early."""
    found = []
    order = sorted((each for each in lines if each.runs), key=lambda each: each.line.engine != "transformers")
    for each in lines:
        if not each.runs:
            continue
        row: dict[str, Any] = {"line": each.line.name, "k": each.line.k, "dtype": each.line.dtype}
        row["short"] = sum(len(ids) != setting.new_tokens for ids in each.ids)
        plain = (other for other in order if other.line.k == 0 and not other.line.sampled)
        alike = (o for o in plain if (o.line.dtype, o.line.fp32_weights) == (each.line.dtype, each.line.fp32_weights))
        reference = None if each.line.sampled else next(alike, None)
        if reference is not None and reference is not each:
            row["reference"] = reference.line.name
            row["equal"] = sum(left == right for left, right in zip(each.ids, reference.ids, strict=True))
            row["requests"] = len(each.ids)
            row["first_difference"] = first_difference(each.ids, reference.ids)
        found.append(row)
    return found
