"""`specrs forecast --sweep`: fits lines to a sweep's rows, and compares their predictions with rows held back. Measures
nothing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from specrs.errors import InvalidConfigError, invalid_config

if TYPE_CHECKING:
    from specrs.forecast import Forecast, GeometricAcceptance, LineFit, Prediction, Series


def run(arguments: argparse.Namespace) -> None:
    """Print, draw and write the forecast. Raises `InvalidConfigError` for a file that cannot be read, and for a
    selection without enough rows."""
    from specrs.bench.results import read
    from specrs.cli.output import write_json
    from specrs.forecast import report, series

    found = series(read(arguments.sweep))
    if arguments.draft_model is not None:
        names = [item.draft_model for item in found]
        found = [item for item in found if item.draft_model == arguments.draft_model]
        if not found:
            raise invalid_config(
                "--draft-model", arguments.draft_model, f"must be one of {', '.join(sorted(set(names)))}"
            )
    forecasts: list[Forecast] = []
    records: list[dict[str, Any]] = []
    for number, item in enumerate(found):
        if number:
            print()
        if arguments.concurrency is None:
            records.append(_overview(arguments, item))
        else:
            forecasts.append(_detail(arguments, item, draw=number == 0))
    if arguments.plot is not None and arguments.concurrency is None:
        raise invalid_config("--plot", str(arguments.plot), "needs --concurrency: the picture shows one")
    if arguments.json is not None:
        content = {"forecasts": [report.record(item) for item in forecasts], "series": records}
        write_json("--json", arguments.json, content)


def _overview(arguments: argparse.Namespace, item: Series) -> dict[str, Any]:
    """Print every concurrency in a few lines: costs, predictions, and where the speed-up in throughput differs from
    that in TPOT. Return them as JSON values."""
    from specrs.forecast import report

    print(f"--- {item.name}")
    predicted: dict[int, list[Prediction]] = {}
    fits: dict[int, LineFit] = {}
    curves: dict[int, GeometricAcceptance] = {}
    departures = []
    for concurrency in item.concurrencies:
        try:
            fit = item.line(concurrency, arguments.fit_k)
            curve = item.acceptance(concurrency, arguments.fit_k)
        except InvalidConfigError as error:
            print(f"concurrency {concurrency} left out: {error}")
            continue
        fits[concurrency], curves[concurrency] = fit, curve
        if arguments.fit_k is not None and (rest := item.predict(concurrency, arguments.fit_k)):
            predicted[concurrency] = rest
        fastest = min(item.ks(concurrency), key=lambda k, at=concurrency: item.rows[at][k].mean_tpot)  # type: ignore[misc]
        departures.append(item.departure(concurrency, fastest))
    if not fits:
        raise invalid_config("--sweep", str(arguments.sweep), f"has no concurrency of {item.name} with two usable K")
    print(report.lines(fits, curves))
    if predicted:
        print("\n" + report.predictions(item, arguments.fit_k, predicted))
    print("\n" + report.departures(departures))
    slower = [departure.concurrency for departure in departures if departure.throughput < 1]
    if slower:
        places = ", ".join(map(str, slower))
        print(f"in throughput, the K of the lowest TPOT is slower than vanilla at concurrency {places}")
    model = item.cost_model(arguments.fit_k, list(fits))
    curve = curves[model.batches[0]]
    lengths = [curve.length(k) for k in range(1, _max_k(arguments, item) + 1)]
    print(report.break_even(model.break_even_batch(lengths), model.batches))
    return {
        "name": item.name,
        "costs": [
            {"concurrency": at, "draft_ms": fit.slope, "target_ms": fit.intercept, "r_squared": fit.r_squared}
            for at, fit in fits.items()
        ],
        "predictions": [
            {"concurrency": p.concurrency, "k": p.k, "forecast": p.forecast, "measured": p.measured}
            for rest in predicted.values()
            for p in rest
        ],
    }


def _detail(arguments: argparse.Namespace, item: Series, draw: bool) -> Forecast:
    """Print one concurrency: the forecast of every K, next to the measured values. Return the forecast."""
    from specrs.forecast import forecast, report
    from specrs.forecast.acceptance import HORIZON
    from specrs.forecast.plot import Regression
    from specrs.forecast.plot import draw as draw_forecast

    at = arguments.concurrency
    if at not in item.concurrencies:
        raise invalid_config("--concurrency", at, f"must be one of {', '.join(map(str, item.concurrencies))}")
    fit = item.line(at, arguments.fit_k)
    curve = item.acceptance(at, arguments.fit_k)
    lengths = [curve.length(k) for k in range(1, _max_k(arguments, item) + 1)]
    beyond = [curve.length(k) for k in range(len(lengths) + 1, HORIZON + 1)]
    result = forecast(item.cost_model(arguments.fit_k, [at]), lengths, at, item.name, beyond)
    seen = arguments.fit_k or item.ks(at)
    measured = {k: row.mean_tpot for k, row in sorted(item.rows[at].items())}
    print(report.line(fit))
    print(report.table(result, measured))
    if draw and arguments.plot is not None:
        itl = {k: row.mean_itl for k, row in item.rows[at].items()}
        regression = Regression(
            f"concurrency {at}",
            fit,
            {k: value for k, value in itl.items() if k in seen},
            {k: value for k, value in itl.items() if k not in seen},
        )
        title = f"{item.name}, concurrency {at}: forecast from K = {', '.join(map(str, seen))}"
        draw_forecast([result], arguments.plot, title=title, measured_tpot=measured, regression=regression)
        print(f"\npicture: {arguments.plot}")
    return result


def _max_k(arguments: argparse.Namespace, item: Series) -> int:
    measured = max(k for rows in item.rows.values() for k in rows)
    return arguments.max_k or max(8, measured)
