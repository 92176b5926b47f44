"""`specrs forecast`: speed-ups of every K from pass times, from a sweep, or from what it measures here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.cli.arguments import MergeJSON, drafts_list
from specrs.errors import InvalidConfigError, check_int, invalid_config

if TYPE_CHECKING:
    from specrs.forecast import Forecast, PassTimes
    from specrs.forecast.plot import Regression

SUMMARY = "speed-ups of every K, forecast from pass times, a sweep, or a measurement"
DESCRIPTION = (
    "Forecast time per output token, TPOT = (T_d * K + T_t) / AL, and the speed-up of every K. T_d and T_t, the passes "
    "of draft and target, are given, fitted to the ITL of a sweep, or measured here; so are the acceptance lengths AL."
)

_GIVEN = {"vanilla_ms", "compare", "names", "acceptance_lengths", "acceptance_rates"}
_USES = {
    "--sweep": {"sweep", "fit_k", "draft_model", "concurrency"},
    "--measure": {
        "measure", "model", "draft_model", "speculative_config", "k", "max_tokens", "num_prompts", "rounds", "dtype",
        "device", "compare", "names",
    },
    "--itl": {"itl", *_GIVEN},
    "--target-ms": {"target_ms", "draft_ms", "observed_tpot", *_GIVEN},
}  # fmt: skip
"""Where times come from -> the options that mean something then, beside those that always do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options: where times come from, where acceptance comes from, what to do with both."""
    times = parser.add_argument_group("times")
    times.add_argument("--draft-ms", type=float, metavar="MS", help="T_d, a pass of the draft")
    times.add_argument("--target-ms", type=float, metavar="MS", help="T_t, a pass of the target")
    times.add_argument("--vanilla-ms", type=float, metavar="MS", help="TPOT without drafts; default: T_t")
    times.add_argument(
        "--observed-tpot",
        type=pairs,
        metavar="K=MS",
        help="as in 4=10.46: instead of --draft-ms, the T_d that this TPOT implies",
    )
    times.add_argument("--itl", type=pairs, metavar="K=MS,...", help="instead of both: a line through ITL at several K")
    times.add_argument(
        "--compare", type=floats, metavar="T_d,T_t[,VANILLA]", help="a second cost model, set beside the first"
    )
    times.add_argument("--names", default="inside,alone", help="of the two; default: inside,alone")
    accepted = parser.add_argument_group("acceptance")
    accepted.add_argument(
        "--acceptance-lengths",
        metavar="LIST",
        help="AL at K = 1, 2, ... as in 1.8,2.4,2.9, or at some K as in 1=1.8,4=3.28; a geometric curve gives the rest",
    )
    accepted.add_argument(
        "--acceptance-rates", type=floats, metavar="LIST", help="shares accepted per position instead"
    )
    sweep = parser.add_argument_group("from a sweep")
    sweep.add_argument("--sweep", type=Path, metavar="FILE", help="parquet file of specrs bench sweep")
    sweep.add_argument(
        "--fit-k",
        type=drafts_list,
        metavar="LIST",
        help="look at the rows of these K only, and compare with the others",
    )
    sweep.add_argument("--draft-model", help="only this drafter; default: each; with --measure: the draft")
    sweep.add_argument("--concurrency", type=int, help="only this one, with a table of every K; default: each")
    measured = parser.add_argument_group("measured here")
    measured.add_argument("--measure", action="store_true", help="each model alone and inside speculation, batch 1")
    measured.add_argument("--model", help="the target; default: the bundled pair")
    measured.add_argument("--speculative-config", action=MergeJSON, metavar="JSON", help="as for specrs generate")
    measured.add_argument("--k", type=drafts_list, default=[1, 3, 5], metavar="LIST", help="K to run; default: 1,3,5")
    measured.add_argument("--max-tokens", type=int, default=128, help="tokens per prompt; default: 128")
    measured.add_argument("--num-prompts", type=int, default=4, help="of the bundled prompts; default: 4")
    measured.add_argument("--rounds", type=int, default=3, help="times that the settings take turns; default: 3")
    measured.add_argument("--dtype", default="auto", help="default: auto, float32 for the bundled pair")
    measured.add_argument("--device", default="auto", help="default: auto")
    parser.add_argument("--max-k", type=int, help="largest K of the forecast; default: the largest measured or given")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw TPOT against K, and the regression")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers")


def run(arguments: argparse.Namespace) -> None:
    """Forecast and print. Raises `InvalidConfigError` naming what is missing or wrong."""
    if arguments.plot is not None:
        from specrs.cli.plot import check

        check(arguments.plot)
    if arguments.max_k is not None:
        check_int(InvalidConfigError, "--max-k", arguments.max_k, 1, 64)
    sources = {
        "--sweep": arguments.sweep is not None,
        "--measure": arguments.measure,
        "--itl": arguments.itl is not None,
        "--target-ms": arguments.target_ms is not None,
    }
    given = [name for name, present in sources.items() if present]
    if len(given) != 1:
        raise invalid_config("times", given, f"must come from one of {', '.join(sources)}")
    for option in sorted(vars(arguments).keys() & set().union(*_USES.values()) - _USES[given[0]]):
        value = getattr(arguments, option)
        if value != arguments.parser.get_default(option):
            raise invalid_config(f"--{option.replace('_', '-')}", value, f"has no meaning with {given[0]}")
    if arguments.sweep is not None:
        from specrs.cli import forecast_sweep

        forecast_sweep.run(arguments)
    else:
        _one_model(arguments)


def _one_model(arguments: argparse.Namespace) -> None:
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
    forecasts = [forecast(first.model(), lengths, name=name, beyond=beyond)]
    print(report.table(forecasts[0]))
    if second is not None:
        forecasts.append(forecast(second.model(), lengths, name=names[1], beyond=beyond))
        print("\n" + report.passes(pass_reductions(first, second)))
        print("\n" + report.side_by_side(*forecasts))
    _finish(arguments, forecasts, regression, "Forecast of speculative decoding: TPOT = (T_d K + T_t) / AL")


def _given(arguments: argparse.Namespace, lengths: dict[int, float]) -> tuple[PassTimes, Regression | None]:
    """The cost model that the options spell out, and the line it came from."""
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
    """Acceptance lengths by K as given, from the two options that give them."""
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


def _measured(arguments: argparse.Namespace) -> tuple[PassTimes, PassTimes, dict[int, float], Regression]:
    from tqdm import tqdm

    from specrs.cli.threads import few_threads
    from specrs.forecast import report
    from specrs.forecast.measure import measure
    from specrs.forecast.plot import Regression
    from specrs.pair.prompts import PROMPTS
    from specrs.sampling import SamplingParams

    check_int(InvalidConfigError, "--num-prompts", arguments.num_prompts, 1, len(PROMPTS))
    dtype = "float32" if arguments.model is None and arguments.dtype == "auto" else arguments.dtype
    if arguments.model is None:
        few_threads()
    draft = {} if arguments.draft_model is None else {"model": arguments.draft_model}
    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True)
    settings = 2 + len(arguments.k)
    with tqdm(total=settings * (1 + arguments.rounds * arguments.num_prompts), leave=False, unit=" prompts") as bar:

        def advance(name: str) -> None:
            bar.set_description(name, refresh=False)
            bar.update()

        result = measure(
            arguments.model,
            {**draft, **(arguments.speculative_config or {})},
            arguments.k,
            PROMPTS[: arguments.num_prompts],
            params,
            rounds=arguments.rounds,
            advance=advance,
            dtype=dtype,
            device=arguments.device,
            max_model_len=1024,
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
        write_json(arguments.json, forecasts)


def write_json(path: Path, forecasts: list[Forecast], **more: Any) -> None:
    """Write the numbers. Raises `InvalidConfigError` where that fails."""
    import json

    from specrs.forecast import report

    try:
        text = json.dumps({"forecasts": [report.record(item) for item in forecasts], **more}, indent=2)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise invalid_config("--json", str(path), f"cannot be written: {error.strerror}") from None


def floats(text: str) -> list[float]:
    """`1.8,2.4` as numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, such as 1.8,2.4") from None


def pairs(text: str) -> dict[int, float]:
    """`1=1.8,4=3.28` as numbers by K."""
    try:
        found = [(int(k), float(value)) for k, _, value in (part.partition("=") for part in text.split(","))]
    except ValueError:
        found = []
    if not found or len(dict(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers by K, such as 1=1.8,4=3.28")
    return dict(found)
