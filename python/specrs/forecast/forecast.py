"""Forecasts TPOT and speed-up at every K from a cost model and acceptance lengths. `CostModel` does the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrs.core import CostModel


@dataclass(frozen=True, slots=True)
class KForecast:
    """Forecast at one K. Times are in milliseconds: `itl_ms` is that of a whole iteration, `tpot_ms` that of one of its
    tokens."""

    k: int
    itl_ms: float
    acceptance_length: float
    tpot_ms: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast for all K. `rows` begins with K = 0. `best_k` has the lowest TPOT; above `last_paying_k`, drafting is
    slower than not drafting."""

    name: str
    batch: int
    rows: list[KForecast]
    best_k: int
    last_paying_k: int
    break_even_batch: int | None

    @property
    def best(self) -> KForecast:
        """Row of `best_k`."""
        return self.rows[self.best_k]


def forecast(
    model: CostModel,
    acceptance_lengths: Sequence[float],
    batch: int = 1,
    name: str = "forecast",
    beyond: Sequence[float] = (),
) -> Forecast:
    """Forecast by `model` at batch size `batch`, with acceptance lengths at K = 1, 2, ....

    `beyond` continues the acceptance lengths; it is only used to find where drafting stops paying. Raises
    `InvalidConfigError` for a length that is not from 1 to K + 1.
    """
    lengths = list(acceptance_lengths)
    rows = [
        KForecast(
            k=k,
            itl_ms=model.ms(batch, k),
            acceptance_length=length,
            tpot_ms=model.tpot(batch, k, length),
            speedup=model.speedup(batch, k, length),
        )
        for k, length in enumerate([1.0, *lengths])
    ]
    return Forecast(
        name=name,
        batch=batch,
        rows=rows,
        best_k=model.best_k(batch, lengths),
        last_paying_k=model.last_paying_k(batch, [*lengths, *beyond]),
        break_even_batch=model.break_even_batch(lengths),
    )
