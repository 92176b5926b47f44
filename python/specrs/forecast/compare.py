"""Compares two cost models, such as piecewise and full graphs. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrs.core import CostModel
from specrs.errors import InvalidConfigError, check_number
from specrs.forecast.forecast import Forecast

if TYPE_CHECKING:
    from specrs.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Milliseconds of a draft pass, of a target pass, and of an iteration without drafts."""

    draft_ms: float
    target_ms: float
    vanilla_ms: float

    def model(self, growth: Sequence[float] = ()) -> CostModel:
        """Return the cost model `ITL = K * T_d + T_t`. Raises `InvalidConfigError` for times that are not positive;
        `draft_ms` may be 0.

        `growth` has the factors g_K by which the target's pass takes longer than T_t, for K = 1, 2, ...:
        `ITL = K * T_d + g_K * T_t`. A mixture of experts reads more experts for more rows, see `verification_growth`.
        Here ITL is the time of one iteration.
        """
        line = CostModel.lines([1], [self.draft_ms], [self.target_ms], [self.vanilla_ms])
        if not growth:
            return line
        times = [k * self.draft_ms + g * self.target_ms for k, g in enumerate(growth, start=1)]
        return CostModel([1], list(range(len(growth) + 1)), [[self.vanilla_ms, *times]])


def verification_growth(config: ModelConfig, max_k: int) -> list[float]:
    """Return for K = 1 to `max_k` how many times as many weights a target reads to verify K drafts as for one row. It
    is 1 for a dense model. The numbers are expected values, see `Experts.expected`.

    Assumes that reading weights takes all of the time, as it nearly does at batch 1 on a GPU.
    """
    one = config.num_parameters_read(1)
    return [config.num_parameters_read(k + 1) / one for k in range(1, max_k + 1)]


@dataclass(frozen=True, slots=True)
class Reduction:
    """A time in milliseconds before and after a change, such as a pass inside speculation and alone, and the share by
    which it falls."""

    name: str
    first: float
    second: float

    @property
    def share(self) -> float:
        """Share by which the second value is less than the first: 1 - second / first. Negative if it is more."""
        return 1.0 - self.second / self.first


def pass_reductions(
    inside: PassTimes, alone: PassTimes, draft: str = "draft", target: str = "target"
) -> list[Reduction]:
    """Return the reduction for each model if its pass inside speculation took only as long as alone. Raises
    `InvalidConfigError` for times that are not positive."""
    for name, value in (("draft_ms", inside.draft_ms), ("target_ms", inside.target_ms)):
        check_number(InvalidConfigError, name, value, 0.0, open_low=True)
    return [
        Reduction(draft, inside.draft_ms, alone.draft_ms),
        Reduction(target, inside.target_ms, alone.target_ms),
    ]


def tpot_reductions(first: Forecast, second: Forecast) -> list[Reduction]:
    """Return the TPOT of two forecasts at each K that both have, from K = 1 on."""
    pairs = zip(first.rows[1:], second.rows[1:], strict=False)
    return [Reduction(f"K = {one.k}", one.tpot_ms, other.tpot_ms) for one, other in pairs]
