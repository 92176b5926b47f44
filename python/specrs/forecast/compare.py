"""Two cost models side by side, such as piecewise against full graphs. Compares; measures nothing."""

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
    """A pass of the draft, one of the target, and an iteration without drafts, in milliseconds."""

    draft_ms: float
    target_ms: float
    vanilla_ms: float

    def model(self, growth: Sequence[float] = ()) -> CostModel:
        """The line `ITL = K * T_d + T_t`. Raises `InvalidConfigError` for times that are not positive.

        `growth` is how much longer than T_t the target's pass takes at K = 1, 2, ...: `ITL = K * T_d + g_K * T_t`. A
        mixture of experts reads more of them for more rows, see `verification_growth`.
        """
        line = CostModel.lines([1], [self.draft_ms], [self.target_ms], [self.vanilla_ms])
        if not growth:
            return line
        times = [k * self.draft_ms + g * self.target_ms for k, g in enumerate(growth, start=1)]
        return CostModel([1], list(range(len(growth) + 1)), [[self.vanilla_ms, *times]])


def verification_growth(config: ModelConfig, max_k: int) -> list[float]:
    """How much more a target reads to verify K = 1, 2, ... `max_k` drafts than for a row: the expected weights of a
    pass of K + 1 rows over those of one, 1 for a dense model; see `Experts.expected`.

    The share of time that reading weights takes at batch 1, as on a GPU, is taken to be all of it.
    """
    one = config.num_parameters_read(1)
    return [config.num_parameters_read(k + 1) / one for k in range(1, max_k + 1)]


@dataclass(frozen=True, slots=True)
class Reduction:
    """One quantity under both models, and by how much of the first the second is less."""

    name: str
    first: float
    second: float

    @property
    def share(self) -> float:
        """1 - second / first; negative where the second is more."""
        return 1.0 - self.second / self.first


def pass_reductions(
    inside: PassTimes, alone: PassTimes, draft: str = "draft", target: str = "target"
) -> list[Reduction]:
    """What each model gains if its pass inside speculation takes as long as alone. Raises for zero times."""
    for name, value in (("draft_ms", inside.draft_ms), ("target_ms", inside.target_ms)):
        check_number(InvalidConfigError, name, value, 0.0, open_low=True)
    return [
        Reduction(draft, inside.draft_ms, alone.draft_ms),
        Reduction(target, inside.target_ms, alone.target_ms),
    ]


def tpot_reductions(first: Forecast, second: Forecast) -> list[Reduction]:
    """TPOT at each K from 1 on, where both have it."""
    pairs = zip(first.rows[1:], second.rows[1:], strict=False)
    return [Reduction(f"K = {one.k}", one.tpot_ms, other.tpot_ms) for one, other in pairs]
