"""Derived figures, from a histogram counted by hand."""

import pytest
from specrs.outputs import AcceptanceFigures, EngineStats, RequestMetrics


def test_figures_of_a_histogram() -> None:
    # ten drafts: four with no token accepted, three with one, two with two, one with all three; two drafted only one
    figures = AcceptanceFigures(draft_tokens=26, acceptance_histogram=[4, 3, 2, 1])
    assert (figures.drafts, figures.accepted_tokens) == (10, 10)
    assert figures.acceptance_length == 2.0
    assert figures.acceptance_rate == pytest.approx(10 / 26)
    assert figures.accepted_per_position == [6, 3, 1]
    assert figures.per_position == [0.6, 0.3, 0.1]


def test_nothing_drafted() -> None:
    for figures in (EngineStats(), RequestMetrics(), AcceptanceFigures(acceptance_histogram=[0, 0, 0])):
        assert (figures.drafts, figures.acceptance_length, figures.acceptance_rate) == (0, 1.0, 0.0)
    assert AcceptanceFigures(acceptance_histogram=[0, 0, 0]).per_position == [0.0, 0.0]


def test_times_that_did_not_happen() -> None:
    assert RequestMetrics(arrival_time=1.0).time_to_first_token is None
    metrics = RequestMetrics(arrival_time=1.0, first_token_time=1.5, finish_time=3.5, num_generated_tokens=5)
    assert (metrics.time_to_first_token, metrics.latency, metrics.time_per_output_token) == (0.5, 2.5, 0.5)
    one = RequestMetrics(arrival_time=1.0, first_token_time=1.5, finish_time=1.5, num_generated_tokens=1)
    assert one.time_per_output_token is None
