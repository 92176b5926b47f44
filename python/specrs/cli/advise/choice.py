"""Forecasts of drafters, and the choice among them. Computes with costs and counts that were measured; runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specrs.cli.advise.replay import Replayed
from specrs.core import CostModel
from specrs.speculative_config import AUTO

LEAST_GAIN = 0.01
"""Smallest gain in speed for which drafts are advised. Smaller gains may be noise."""
AUTO_LOSS = 0.01
"""Largest loss in speed for which K chosen by the engine is advised in place of a fixed K. `auto` follows the load."""

NEAR = 0.1
"""Largest loss in speed, against the best forecast, with which another drafter still runs. Forecasts have errors."""
MOST_DRAFTERS = 4
"""Maximum number of different drafters that run at their best K."""


@dataclass(frozen=True)
class Candidate:
    """A way to serve the model: how it drafts, with how many drafts, and the type of its weights."""

    name: str = ""
    """Name of the drafter; empty for no drafts."""
    k: int | str = 0
    """Number of draft tokens of a pass, or `auto`."""
    quantization: str | None = None
    """Type to which weights are quantized at load. None: the checkpoint's."""
    drafter: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Speculative configuration without K."""

    @property
    def plain(self) -> Candidate:
        """The candidate without drafts that has the same weights."""
        return Candidate(quantization=self.quantization)

    def speculative_config(self, max_k: int) -> dict[str, Any] | None:
        """Return the speculative configuration; None without drafts. `max_k` limits `auto`."""
        if self.k == 0:
            return None
        found = {**self.drafter, "num_speculative_tokens": self.k}
        return {**found, "max_num_speculative_tokens": max_k} if self.k == AUTO else found


@dataclass(frozen=True)
class Forecast:
    """Expected speed of a candidate."""

    candidate: Candidate
    tokens_per_pass: float
    ms_per_token: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after the first token of an answer."""
        return 1e3 / self.ms_per_token


@dataclass(frozen=True)
class Drafted:
    """Passes of a drafter with a model that ran with K drafts: their mean milliseconds, and how drafts fared."""

    k: int
    ms: float
    passes: int
    histogram: Sequence[int]
    """Number of passes by the number of accepted drafts."""

    def tokens_per_pass(self, k: int) -> float:
        """Return the mean number of tokens of a pass with at most `k` drafts, from the same drafts cut to `k`."""
        return 1.0 + sum(min(accepted, k) * count for accepted, count in enumerate(self.histogram)) / self.passes


def from_replay(candidate: Candidate, replayed: Replayed, costs: CostModel, scale: float, drafting: float) -> Forecast:
    """Forecast a drafter that was replayed: the measured costs of its passes, over their tokens.

    `scale` converts a cost to milliseconds at the length of the texts. `drafting` is the milliseconds that the host
    needs to draft for a pass.
    """
    passes = replayed.passes.total()
    ms = sum(count * (scale * costs.ms(1, k) + drafting) for k, count in replayed.passes.items())
    per_pass = replayed.tokens_per_pass
    return Forecast(candidate, per_pass, ms / passes / per_pass if passes else scale * costs.ms(1, 0))


def from_runs(candidate: Candidate, k: int, runs: Sequence[Drafted], more_ms: float = 0.0) -> Forecast:
    """Forecast a drafter with a model at `k` drafts, from runs with few and with many.

    Pass times at other K are interpolated linearly. Acceptance at a smaller K is computed from the run with the most
    drafts. `more_ms` is added to the time of a pass.
    """
    first, last = min(runs, key=lambda run: run.k), max(runs, key=lambda run: run.k)
    slope = 0.0 if first.k == last.k else max(0.0, (last.ms - first.ms) / (last.k - first.k))
    per_pass = (first if k == first.k else last).tokens_per_pass(k)
    return Forecast(candidate, per_pass, (first.ms + slope * (k - first.k) + more_ms) / per_pass)


def finalists(forecasts: Sequence[Forecast]) -> list[Candidate]:
    """Return the candidates to run: no drafts, the two best forecasts with drafts, the best K of up to `MOST_DRAFTERS`
    drafters whose forecasts are near the best, and the best drafter with K chosen by the engine. If the best weights
    are quantized, these without drafts, too."""
    ranked = sorted(forecasts, key=lambda one: one.ms_per_token)
    drafting = [one for one in ranked if one.candidate.k != 0]
    chosen = [Candidate(), *(one.candidate for one in drafting[:2])]
    if drafting:
        best: dict[str, Candidate] = {}
        for one in drafting:
            if drafting[0].ms_per_token >= (1.0 - NEAR) * one.ms_per_token:
                best.setdefault(one.candidate.name, one.candidate)
        chosen += list(best.values())[:MOST_DRAFTERS]
        chosen.append(replace(drafting[0].candidate, k=AUTO))
    chosen.append(ranked[0].candidate.plain)
    return list(dict.fromkeys(chosen))


def choose(speeds: Mapping[Candidate, float]) -> Candidate:
    """Return the candidate to serve, from measured tokens per second of the finalists.

    That is the fastest, with two exceptions. K chosen by the engine is taken if it loses at most `AUTO_LOSS`. No drafts
    are taken if drafts gain less than `LEAST_GAIN` with the same weights.
    """
    best = max(speeds, key=lambda one: speeds[one])
    if best.k != 0 and speeds[best] < (1.0 + LEAST_GAIN) * speeds.get(best.plain, 0.0):
        return best.plain
    auto = next((one for one in speeds if one.k == AUTO and one.plain == best.plain and best.k != 0), best)
    return auto if speeds[auto] >= (1.0 - AUTO_LOSS) * speeds[best] else best


def rescaled(forecasts: Sequence[Forecast], speeds: Mapping[Candidate, float]) -> list[Forecast]:
    """Return the forecasts with the speed of `Candidate()`, no drafts, as it was measured among `speeds`.

    Forecasts are ratios to that speed. It was measured earlier, and the machine may have been faster or slower then.
    """
    plain = next(one for one in forecasts if one.candidate == Candidate())
    factor = 1e3 / speeds[Candidate()] / plain.ms_per_token
    return [replace(one, ms_per_token=factor * one.ms_per_token) for one in forecasts]


def error_of(forecasts: Sequence[Forecast], speeds: Mapping[Candidate, float]) -> float:
    """Return the largest relative error of the forecasts of candidates that ran. `Candidate()` is left out, because
    forecasts are scaled by its speed; 0 if nothing else ran."""
    ran = [one for one in forecasts if one.candidate in speeds and one.candidate != Candidate()]
    return max((abs(one.tokens_per_second / speeds[one.candidate] - 1.0) for one in ran), default=0.0)
