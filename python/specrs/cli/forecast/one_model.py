"""`specrs forecast` for one cost model: from given pass times, from given ITL, or measured here."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from specrs.cli.arguments import floats, pairs
from specrs.cli.output import write_json
from specrs.errors import InvalidConfigError, check_int, invalid_config, short

if TYPE_CHECKING:
    from specrs.forecast import Forecast, PassTimes
    from specrs.forecast.plot import Regression


def run(arguments: argparse.Namespace) -> None:
    """Print, draw and write the forecast. Raises `InvalidConfigError` for an option that is missing or wrong."""
    from specrs.forecast import forecast, lengths_beyond, lengths_up_to, pass_reductions, report
    from specrs.forecast.compare import PassTimes

    regression: Regression | None = None
    second: PassTimes | None = None
    if arguments.measure:
        first, second, known, regression = _measured(arguments)
    else:
        known = acceptance(arguments)
        first, regression = _given(arguments, known)
    lengths = lengths_up_to(arguments.max_k or max(known), known)
    beyond = lengths_beyond(len(lengths), known)
    if arguments.compare is not None:
        if len(arguments.compare) not in (2, 3):
            raise invalid_config("--compare", arguments.compare, "must be T_d,T_t or T_d,T_t,VANILLA")
        draft, target, *vanilla = arguments.compare
        second = PassTimes(draft, target, vanilla[0] if vanilla else first.vanilla_ms)
    names = arguments.names.split(",")
    if len(names) != 2:
        raise invalid_config("--names", arguments.names, "must be two names with a comma between")
    name = names[0] if second else "forecast"
    growth = _growth(arguments, len(lengths), len(lengths) + len(beyond))
    forecasts = [forecast(first.model(growth), lengths, name=name, beyond=beyond)]
    print(report.table(forecasts[0]))
    if second is not None:
        forecasts.append(forecast(second.model(growth), lengths, name=names[1], beyond=beyond))
        print("\n" + report.passes(pass_reductions(first, second)))
        print("\n" + report.side_by_side(*forecasts))
    _finish(arguments, forecasts, regression, "Forecast of speculative decoding: TPOT = (T_d K + T_t) / AL")


def _growth(arguments: argparse.Namespace, shown: int, max_k: int) -> list[float]:
    """Return for each K the factor by which a verification takes longer than T_t, the time of a pass of `--model` over
    one row. Empty without `--target-ms` or `--model`."""
    if arguments.target_ms is None or arguments.model is None:
        return []
    from specrs.forecast import verification_growth
    from specrs.models.loader import load_config

    config = load_config(arguments.model)
    growth = verification_growth(config, max_k)
    if config.experts is not None:
        rows = [f"{growth[k - 1]:.2f} at K = {k}" for k in sorted({1, shown})]
        print(f"{arguments.model}: a verification reads more experts than a row: T_t times {', '.join(rows)}\n")
    return growth


def _given(arguments: argparse.Namespace, lengths: dict[int, float]) -> tuple[PassTimes, Regression | None]:
    """Return the cost model that the options describe, and the line that was fitted for it, if any."""
    from specrs.core import CostModel
    from specrs.forecast import LineFit, PassTimes, lengths_up_to, report
    from specrs.forecast.plot import Regression

    regression = None
    draft, target = arguments.draft_ms, arguments.target_ms
    if arguments.itl is not None:
        if len(arguments.itl) < 2:
            raise invalid_config("--itl", arguments.itl, "must have at least two K, for a line")
        fit = LineFit.through([float(k) for k in arguments.itl], list(arguments.itl.values()))
        print(report.line(fit) + "\n")
        draft, target = fit.slope, fit.intercept
        regression = Regression("given", fit, arguments.itl)
    elif arguments.observed_tpot is not None:
        if draft is not None or len(arguments.observed_tpot) != 1:
            raise invalid_config("--observed-tpot", arguments.observed_tpot, "must be one K=MS, without --draft-ms")
        ((k, tpot),) = arguments.observed_tpot.items()
        if k < 1:
            raise invalid_config("--observed-tpot", arguments.observed_tpot, "must be at a K of at least 1")
        draft = CostModel.implied_draft_ms(tpot, k, lengths_up_to(k, lengths)[k - 1], target)
        print(f"T_d = {draft:.3f} ms, implied by a TPOT of {tpot:g} ms at K = {k}\n")
    elif draft is None:
        raise invalid_config("--draft-ms", None, "must be given with --target-ms, or --observed-tpot")
    return PassTimes(draft, target, target if arguments.vanilla_ms is None else arguments.vanilla_ms), regression


def acceptance(arguments: argparse.Namespace) -> dict[int, float]:
    """Return the acceptance lengths by K, from `--acceptance-lengths` or `--acceptance-rates`. Raises
    `InvalidConfigError` unless exactly one of them is given."""
    from specrs.forecast import lengths_from_shares

    text, rates = arguments.acceptance_lengths, arguments.acceptance_rates
    if (text is None) == (rates is None):
        raise invalid_config("acceptance", None, "must come from one of --acceptance-lengths, --acceptance-rates")
    if rates is not None:
        return dict(enumerate(lengths_from_shares(rates), start=1))
    try:
        return pairs(text) if "=" in text else dict(enumerate(floats(text), start=1))
    except argparse.ArgumentTypeError as error:
        raise invalid_config("--acceptance-lengths", text, str(error)) from None


def _measured(arguments: argparse.Namespace) -> tuple[PassTimes, PassTimes | None, dict[int, float], Regression]:
    from tqdm import tqdm

    from specrs.cli.option_flags import drafter_without_k, drafting_flag, given_options
    from specrs.cli.threads import set_torch_threads
    from specrs.engine_options import EngineOptions
    from specrs.forecast import report
    from specrs.forecast.measure import measure
    from specrs.forecast.plot import Regression
    from specrs.pair.prompts import PROMPTS
    from specrs.sampling import SamplingParams

    check_int(InvalidConfigError, "--num-prompts", arguments.num_prompts, 1, len(PROMPTS))
    drafter = drafter_without_k(arguments)
    if arguments.draft_model is not None:
        if "model" in drafter:
            flag, value = drafting_flag(drafter, "model")
            reason = f"contradicts {flag}={short(value)}; leave one of them out"
            raise invalid_config("--draft-model", arguments.draft_model, reason)
        drafter = {"model": arguments.draft_model, **drafter}
    set_torch_threads(arguments.threads, bundled=arguments.model is None)
    engine = given_options(arguments, EngineOptions, "forecast")
    if arguments.model is None and engine.get("dtype", "auto") == "auto":
        engine["dtype"] = "float32"
    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True)
    settings = 2 + len(arguments.k)
    with tqdm(total=settings * (1 + arguments.rounds * arguments.num_prompts), leave=False, unit=" prompts") as bar:

        def advance(name: str) -> None:
            bar.set_description(name, refresh=False)
            bar.update()

        result = measure(
            arguments.model,
            drafter,
            arguments.k,
            PROMPTS[: arguments.num_prompts],
            params,
            rounds=arguments.rounds,
            advance=advance,
            max_model_len=1024,
            **engine,
        )
    print(report.line(result.fit) + "\n")
    return (
        result.inside,
        result.alone,
        dict(result.acceptance_lengths),
        Regression("measured here", result.fit, result.itl_ms),
    )


def _finish(
    arguments: argparse.Namespace, forecasts: list[Forecast], regression: Regression | None, title: str
) -> None:
    if arguments.plot is not None:
        from specrs.forecast.plot import draw

        draw(forecasts, arguments.plot, title=title, regression=regression)
        print(f"\npicture: {arguments.plot}")
    if arguments.json is not None:
        from specrs.forecast import report

        write_json("--json", arguments.json, {"forecasts": [report.record(item) for item in forecasts]})
