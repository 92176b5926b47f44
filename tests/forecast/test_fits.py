"""Lines, Student's t, and acceptance curves, against numpy, tables and sums written out here."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.errors import InvalidConfigError
from specrs.forecast import GeometricAcceptance, LineFit, lengths_from_shares, lengths_up_to
from specrs.forecast.acceptance import lengths_beyond
from specrs.forecast.regression import t_quantile


@pytest.mark.parametrize(
    ("confidence", "freedom", "expected"),
    [
        # tables of Student's t, two-sided
        (0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 3, 3.182), (0.95, 4, 2.776), (0.95, 5, 2.571), (0.95, 10, 2.228),
        (0.99, 3, 5.841), (0.99, 6, 3.707), (0.90, 7, 1.895), (0.95, 120, 1.980), (0.5, 1, 1.0),
    ],
)  # fmt: skip
def test_t_quantiles(confidence: float, freedom: int, expected: float) -> None:
    assert t_quantile(confidence, freedom) == pytest.approx(expected, abs=6e-4)


points = st.lists(st.tuples(st.integers(0, 20), st.floats(-1e3, 1e3)), min_size=3, max_size=12)


@given(points.filter(lambda pairs: len({x for x, _ in pairs}) > 1))
def test_line_against_numpy(pairs: list[tuple[int, float]]) -> None:
    x, y = [float(x) for x, _ in pairs], [y for _, y in pairs]
    fit = LineFit.through(x, y)
    (slope, intercept), (residuals, *_) = np.polyfit(x, y, 1, full=True)[:2]
    assert fit.slope == pytest.approx(slope, abs=1e-6)
    assert fit.intercept == pytest.approx(intercept, abs=1e-6)
    assert fit.sse == pytest.approx(float(residuals) if np.size(residuals) else 0.0, abs=1e-4)
    # covariance of the estimates by the normal equations
    design = np.stack([np.array(x), np.ones(len(x))], axis=1)
    covariance = np.linalg.inv(design.T @ design) * fit.sse / (len(x) - 2)
    for at in (0.0, 3.5):
        row = np.array([at, 1.0])
        expected = t_quantile(0.95, len(x) - 2) * math.sqrt(max(row @ covariance @ row, 0.0))
        assert fit.band(at) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert fit.slope_band() == pytest.approx(
        t_quantile(0.95, len(x) - 2) * math.sqrt(max(covariance[0, 0], 0)), abs=1e-6
    )


def test_two_points_have_a_line_and_no_band() -> None:
    fit = LineFit.through([1, 3], [5.0, 9.0])
    assert (fit.slope, fit.intercept, fit.r_squared, fit.band(2), fit.slope_band()) == (2.0, 3.0, 1.0, None, None)


@pytest.mark.parametrize(("x", "y"), [([1], [1]), ([2, 2], [1, 3]), ([], []), ([1, 2], [1, math.nan]), ([1, 2], [1])])
def test_no_line(x: list[float], y: list[float]) -> None:
    with pytest.raises(InvalidConfigError):
        LineFit.through(x, y)


shares = st.floats(0.05, 0.99)


@given(shares, shares, st.lists(st.integers(1, 12), min_size=2, max_size=6, unique=True))
def test_a_geometric_curve_is_found_again(first: float, ratio: float, ks: list[int]) -> None:
    def length(k: int) -> float:
        return 1.0 + sum(first * ratio**i for i in range(k))

    fit = GeometricAcceptance.fit({k: length(k) for k in ks})
    for k in range(1, max(ks) + 1):
        assert fit.length(k) == pytest.approx(length(k), abs=5e-3)
    for k in ks:
        assert fit.length(k) == pytest.approx(length(k), abs=1e-6)


@given(shares, st.integers(1, 12))
def test_one_length_means_the_same_share_at_every_position(share: float, k: int) -> None:
    # Leviathan et al. 2023, equation 1
    fit = GeometricAcceptance.fit({k: (1 - share ** (k + 1)) / (1 - share)})
    assert fit.first == fit.ratio == pytest.approx(share, abs=1e-6)


def test_lengths_from_shares_and_where_they_are_measured() -> None:
    assert lengths_from_shares([0.5, 0.25, 0.25]) == [1.5, 1.75, 2.0]
    assert lengths_up_to(2, {1: 1.5, 2: 1.6}) == [1.5, 1.6]
    filled = lengths_up_to(4, {1: 1.5, 3: 1.875})
    assert filled[0] == 1.5
    assert filled[2] == 1.875
    assert filled[1] == pytest.approx(1.75, abs=1e-6)
    assert filled[3] == pytest.approx(1.9375, abs=1e-6)
    assert lengths_beyond(3, {1: 1.5, 3: 1.875})[0] == pytest.approx(1.9375, abs=1e-6)


@pytest.mark.parametrize("lengths", [{}, {0: 1.0}, {1: 2.5}, {2: 0.9}, {3: math.nan}])
def test_impossible_lengths(lengths: dict[int, float]) -> None:
    with pytest.raises(InvalidConfigError, match="acceptance_lengths"):
        GeometricAcceptance.fit(lengths)


@pytest.mark.parametrize("rates", [[1.1], [0.5, 0.6], [-0.1]])
def test_impossible_shares(rates: list[float]) -> None:
    with pytest.raises(InvalidConfigError, match="acceptance_rates"):
        lengths_from_shares(rates)
