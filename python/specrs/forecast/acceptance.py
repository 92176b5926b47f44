"""Acceptance lengths (AL) as a function of K, the number of drafts. They come from measurements, from acceptance rates
per position, or from a fitted geometric curve. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from specrs.errors import InvalidConfigError, check_number, invalid_config

HORIZON = 64


@dataclass(frozen=True, slots=True)
class GeometricAcceptance:
    """Geometric model of acceptance: the share of drafts accepted up to position i (from 0) is `first * ratio**i`.

    So AL(K) = 1 + first * (1 + ratio + ... + ratio^(K-1)).

    With `first == ratio`, each token is accepted with the same probability (Leviathan et al. 2023, equation 1). In data
    the first position differs, because the token before it was corrected by the target and is not a draft.
    """

    first: float
    ratio: float

    def length(self, k: int) -> float:
        """Return the acceptance length at `k` drafts: the expected number of tokens per iteration, from 1 to k + 1. The
        target's own token counts."""
        return float(1.0 + self.first * _powers(np.array([self.ratio]), k)[0])

    @classmethod
    def fit(cls, lengths: Mapping[int, float]) -> GeometricAcceptance:
        """Fit the curve to acceptance lengths by K: least squares, exact through two; through one, `first == ratio`.

        Raises `InvalidConfigError` for no lengths, for a K below 1, and for a length that is not from 1 to K + 1.
        """
        check_lengths(lengths)
        if not lengths:
            raise invalid_config("acceptance_lengths", dict(lengths), "must have at least one K")
        gains = np.array(list(lengths.values())) - 1.0

        def first(ratio: NDArray[np.float64]) -> NDArray[np.float64]:
            if len(lengths) == 1:
                return ratio
            sums = np.stack([_powers(ratio, k) for k in lengths])
            best: NDArray[np.float64] = np.clip(gains @ sums / (sums**2).sum(axis=0), 0.0, 1.0)
            return best

        def loss(ratio: NDArray[np.float64]) -> NDArray[np.float64]:
            sums = np.stack([_powers(ratio, k) for k in lengths])
            squares: NDArray[np.float64] = ((first(ratio) * sums - gains[:, None]) ** 2).sum(axis=0)
            return squares

        # A search over a grid, then ever finer around its best point: the loss has one variable and is cheap.
        low, high = 0.0, 1.0
        for _ in range(12):
            grid = np.linspace(low, high, 101)
            best = int(np.argmin(loss(grid)))
            low, high = grid[max(best - 1, 0)], grid[min(best + 1, 100)]
        ratio = grid[best : best + 1]
        return cls(float(first(ratio)[0]), float(ratio[0]))


def lengths_from_shares(shares: Sequence[float]) -> list[float]:
    """Return the acceptance lengths at K = 1, 2, ... from the shares of drafts that were accepted up to each position
    (unconditional).

    Raises `InvalidConfigError` for a share outside [0, 1], and for a share above that of the previous position.
    """
    for i, share in enumerate(shares):
        check_number(InvalidConfigError, f"acceptance_rates[{i}]", share, 0.0, shares[i - 1] if i else 1.0)
    return [1.0 + total for total in accumulate(shares)]


def lengths_up_to(max_k: int, measured: Mapping[int, float]) -> list[float]:
    """Return the acceptance lengths at K = 1 to `max_k`: the measured length if there is one, otherwise the fitted
    curve's.

    Raises `InvalidConfigError` for a K below 1, for a length that is not from 1 to K + 1, and if a curve is needed but
    nothing was measured.
    """
    check_lengths(measured)
    curve = GeometricAcceptance.fit(measured) if any(k not in measured for k in range(1, max_k + 1)) else None
    return [measured[k] if curve is None or k in measured else curve.length(k) for k in range(1, max_k + 1)]


def lengths_beyond(max_k: int, measured: Mapping[int, float]) -> list[float]:
    """Return the acceptance lengths at K = max_k + 1 to 64 by the fitted curve. They show at which K drafting stops
    paying.

    Raises `InvalidConfigError` for no lengths, for a K below 1, and for a length that is not from 1 to K + 1.
    """
    curve = GeometricAcceptance.fit(measured)
    return [curve.length(k) for k in range(max_k + 1, HORIZON + 1)]


def check_lengths(lengths: Mapping[int, float]) -> None:
    """Raise `InvalidConfigError` for a K below 1 or an acceptance length that is not from 1 to K + 1."""
    for k, length in lengths.items():
        if k < 1:
            raise invalid_config("acceptance_lengths", dict(lengths), "must be given for K of at least 1")
        check_number(InvalidConfigError, f"acceptance_lengths[K={k}]", length, 1.0, k + 1.0)


def _powers(ratio: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Return `1 + ratio + ... + ratio**(k - 1)` for each number in `ratio`."""
    total: NDArray[np.float64] = (ratio[None, :] ** np.arange(k)[:, None]).sum(axis=0)
    return total
