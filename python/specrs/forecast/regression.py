"""Fits a straight line to measurements, with a confidence band. Knows nothing of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specrs.errors import InvalidConfigError, check_number, invalid_config


@dataclass(frozen=True, slots=True)
class LineFit:
    """Least-squares fit of `y = slope * x + intercept` to n points. `sse` is the sum of squared residuals.

    `x_mean` is the mean of the x, `sxx` the sum of squared distances from it.
    """

    slope: float
    intercept: float
    r_squared: float
    sse: float
    x_mean: float
    sxx: float
    n: int

    @classmethod
    def through(cls, x: Sequence[float], y: Sequence[float]) -> LineFit:
        """Fit a line to points. Raises `InvalidConfigError` for fewer than two different x, and for values that are not
        finite."""
        if len(x) != len(y):
            raise invalid_config("y", list(y), f"must have a value for each of the {len(x)} x")
        for name, values in (("x", x), ("y", y)):
            for value in values:
                check_number(InvalidConfigError, name, value, -math.inf)
        if len(set(x)) < 2:
            raise invalid_config("x", sorted(set(x)), "must have at least two different values for a line")
        xs, ys = np.array(x, dtype=np.float64), np.array(y, dtype=np.float64)
        sxx = float(((xs - xs.mean()) ** 2).sum())
        slope = float(((xs - xs.mean()) * (ys - ys.mean())).sum()) / sxx
        intercept = float(ys.mean()) - slope * float(xs.mean())
        # two points lie on their line; what rounding leaves is no residual
        sse = float(((ys - slope * xs - intercept) ** 2).sum()) if len(x) > 2 else 0.0
        total = float(((ys - ys.mean()) ** 2).sum())
        return cls(slope, intercept, 1.0 - sse / total if total else 1.0, sse, float(xs.mean()), sxx, len(x))

    def at(self, x: float) -> float:
        """Return the value of the line at x."""
        return self.slope * x + self.intercept

    def band(self, x: float, confidence: float = 0.95) -> float | None:
        """Return half the width of the line's confidence band at x; None with fewer than three points."""
        return self._half_width(1.0 / self.n + (x - self.x_mean) ** 2 / self.sxx, confidence)

    def slope_band(self, confidence: float = 0.95) -> float | None:
        """Return half the width of the slope's confidence interval; None with fewer than three points."""
        return self._half_width(1.0 / self.sxx, confidence)

    def _half_width(self, leverage: float, confidence: float) -> float | None:
        if self.n < 3:
            return None
        return t_quantile(confidence, self.n - 2) * math.sqrt(self.sse / (self.n - 2) * leverage)


def t_quantile(confidence: float, freedom: int) -> float:
    """Return the t for which Student's t with `freedom` degrees of freedom lies in [-t, t] with probability
    `confidence`.

    Raises `InvalidConfigError` unless 0 < confidence < 1 and freedom is at least 1.
    """
    check_number(InvalidConfigError, "confidence", confidence, 0.0, math.nextafter(1.0, 0.0), open_low=True)
    check_number(InvalidConfigError, "freedom", freedom, 1)
    low, high = 0.0, math.pi / 2  # of the angle atan(t / sqrt(freedom)), in which the probability is smooth and bounded
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_probability(middle, freedom) < confidence else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(freedom)


def _t_probability(angle: float, freedom: int) -> float:
    """Return P(|T| <= tan(angle) * sqrt(freedom)), by Abramowitz and Stegun 26.7.3 and 26.7.4."""
    cosine, total = math.cos(angle), 0.0
    term = cosine if freedom % 2 else 1.0
    for i in range(freedom % 2 + 2, freedom + 1, 2):
        total += term
        term *= cosine**2 * (i - 1) / i
    if freedom % 2 == 0:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * total)
