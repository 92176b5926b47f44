"""`specrs advise`: finds the drafter, K and weights that serve a model fastest on this machine, for given traffic.

Drafters that need no model are replayed on answers of the target (`replay`), the others run. The best candidates then
run for real (`measure`). `choice` ranks and chooses, `report` prints, `traffic` reads the requests.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.cli.option_flags import MODEL, add_flags
from specrs.engine_options import EngineOptions
from specrs.errors import InvalidConfigError, check_int, check_number
from specrs.model_values import AT_LOAD
from specrs.options import one_of
from specrs.sampling import MAX_SPECULATIVE_TOKENS
from specrs.speculative_config import DEFAULT_MAX_SPECULATIVE_TOKENS, DEFAULT_MAX_SPECULATIVE_TOKENS_OF_GPUS

if TYPE_CHECKING:
    from specrs.cli.advise.choice import Drafted, Forecast
    from specrs.cli.advise.measure import Machine
    from specrs.cli.advise.replay import KnownText
    from specrs.cli.advise.traffic import LoggedRequest
    from specrs.core import CostModel

DESCRIPTION = (
    "Find the drafter and the K that serve MODEL fastest on this machine. Measures the costs of passes, replays "
    "drafters on the traffic, and runs the best few. Prints a table and what to use; --out writes it as a file for "
    "specrs serve --config. Requests are greedy and run one at a time. Without MODEL: the bundled pair."
)
_FROM_TEXT: tuple[dict[str, Any], ...] = (
    {"method": "ngram"},
    {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    {"method": "suffix"},
    {"method": "ngram,suffix"},
)
"""Speculative configurations of the drafters that are replayed, without K."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specrs advise`."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=f"{MODEL}; default: the bundled pair")
    parser.add_argument(
        "--traffic",
        type=Path,
        metavar="FILE",
        help="log of requests, a line of JSON each: the body of a request to /v1/chat/completions or /v1/completions, "
        'or {"prompt": ..., "completion": ...}; default: a built-in sample',
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="YAML file for specrs serve --config; default: none is written"
    )
    parser.add_argument(
        "--draft-model",
        metavar="TEXT",
        help="folder or hub id of a draft model to compare; default: the bundled one for the bundled pair, else none",
    )
    parser.add_argument("--head", metavar="TEXT", help="folder or hub id of an EAGLE-3 head to compare")
    parser.add_argument(
        "--quantization",
        type=_types,
        default=[],
        metavar="LIST",
        help="types of weights to compare with the checkpoint's, with commas between, each "
        f"{one_of(AT_LOAD)}; they change the text; default: none",
    )
    parser.add_argument(
        "--max-k",
        type=int,
        metavar="N",
        help=f"largest number of drafts, 1 to {MAX_SPECULATIVE_TOKENS}; default: {DEFAULT_MAX_SPECULATIVE_TOKENS} on "
        f"a CPU, {DEFAULT_MAX_SPECULATIVE_TOKENS_OF_GPUS} on a GPU",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="tokens to generate per request; default: 128"
    )
    parser.add_argument(
        "--num-prompts",
        type=int,
        default=20,
        metavar="N",
        help="requests of the traffic to use, at equal distances; default: 20",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=180.0,
        metavar="X",
        help="time to spend, without loading models. A slow model gets fewer requests; default: 180",
    )
    add_flags(parser, EngineOptions, "advise")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the table and the advice, and write the file. Raises `SpecrsError` for wrong options or
    traffic."""
    from specrs.backends.table import backend_of
    from specrs.cli.advise import report
    from specrs.cli.advise.choice import choose, finalists, rescaled
    from specrs.cli.advise.measure import ROUNDS
    from specrs.cli.option_flags import given_options
    from specrs.cli.threads import set_torch_threads

    for name in ("max_tokens", "num_prompts"):
        check_int(InvalidConfigError, f"--{name.replace('_', '-')}", getattr(arguments, name), 1)
    if arguments.max_k is not None:
        check_int(InvalidConfigError, "--max-k", arguments.max_k, 1, MAX_SPECULATIVE_TOKENS)
    check_number(InvalidConfigError, "--seconds", arguments.seconds, 0.0)
    if arguments.out is not None:
        report.check_out(arguments.out)
    model, given = arguments.model_tag, given_options(arguments, EngineOptions, "advise")
    if arguments.max_k is None:
        arguments.max_k = backend_of(given.get("device", "auto")).max_speculative_tokens
    max_k = arguments.max_k
    set_torch_threads(arguments.threads, bundled=model is None)
    machine, requests = prepare(arguments, given)
    deadline = time.perf_counter() + arguments.seconds
    requests, forecasts = _forecasts(arguments, machine, requests)
    chosen = finalists(forecasts)
    _say(f"running the {len(chosen)} best on {len(requests)} requests ...")
    timed = machine.compare(chosen, requests, rounds=ROUNDS, deadline=deadline)
    speeds = {candidate: one.tokens_per_second for candidate, one in timed.items()}
    forecasts, choice = rescaled(forecasts, speeds), choose(speeds)
    advice = report.conclusion(choice, forecasts, speeds, max_k)
    print(report.table(forecasts, speeds))
    print(f"\n{advice}")
    if arguments.out is not None:
        report.write_config(arguments.out, report.config_of(model, given, choice, max_k), f"specrs advise: {advice}")
        print(f"config: {arguments.out}; start it with: specrs serve --config {arguments.out}")


def prepare(arguments: argparse.Namespace, given: dict[str, Any]) -> tuple[Machine, list[LoggedRequest]]:
    """Return the machine and the requests to run, which fit into the model's context. Loads no weights."""
    from specrs.cli.advise import traffic
    from specrs.cli.advise.measure import Machine
    from specrs.config import EngineConfig
    from specrs.engine.tokenizer import load_tokenizer
    from specrs.errors import UnsupportedModelError
    from specrs.models.loader import load_config
    from specrs.models.quantization.table import resolve_quantization

    model = arguments.model_tag
    settings = {"dtype": "float32", **given} if model is None else given
    config = EngineConfig.from_kwargs(model=model, **settings)
    for quantization in arguments.quantization:  # a model that is quantized already cannot be compared
        resolve_quantization("--quantization", quantization, config.target, config.revision)
    tokenizer = load_tokenizer(config)
    assert tokenizer is not None
    if arguments.traffic is None:
        requests = traffic.sample(tokenizer, bundled=model is None)
    else:
        requests = traffic.read_traffic(arguments.traffic, tokenizer)
    try:
        most = load_config(config.target).max_position_embeddings
    except UnsupportedModelError:  # transformers may have code for it; the engine then checks lengths
        most = sys.maxsize
    fitting = traffic.that_fit(requests, arguments.max_tokens, most)
    if len(fitting) < len(requests):
        _say(f"{len(requests) - len(fitting)} of {len(requests)} requests exceed the model's {most} tokens: left out")
    chosen = traffic.spread(fitting, arguments.num_prompts)
    longest = max(len(one.prompt) + traffic.tokens_of(one, arguments.max_tokens) for one in chosen)
    return (
        Machine(model, settings, max_model_len=max(longest, 8), max_tokens=arguments.max_tokens, max_k=arguments.max_k),
        chosen,
    )


def _forecasts(
    arguments: argparse.Namespace, machine: Machine, requests: list[LoggedRequest]
) -> tuple[list[LoggedRequest], list[Forecast]]:
    """Measure costs, generate answers, and forecast every drafter at each K, with all types of weights.

    Return also the requests that were answered: those for which there was time.
    """
    from specrs.cli.advise.choice import Candidate, Forecast, from_runs

    with_model = _with_model(arguments)
    _say("measuring the costs of passes ...")
    costs, llm = machine.costs(None)
    _say("generating answers without drafts ...")
    # All requests run about ten times, and twice on each drafter with a model. Half the time is for further rounds.
    share = arguments.seconds / (2 * (10 + 2 * len(with_model)))
    requests, texts, answered = machine.answers(llm, requests, share)
    del llm
    if not answered.tokens:
        raise InvalidConfigError("traffic: every answer ends after one token, so there is nothing to draft")
    plain_ms = 1e3 / answered.tokens_per_second
    # Costs are those of short texts; passes over these texts take longer by this factor.
    scale = plain_ms / costs.ms(1, 0)
    all_costs: dict[str | None, CostModel] = {None: costs}
    for quantization in arguments.quantization:
        _say(f"measuring the costs of {quantization} weights ...")
        all_costs[quantization] = machine.costs(quantization)[0]
    _say("replaying drafters ...")
    forecasts = _replayed(arguments.max_k, texts, all_costs, scale)
    runs = _run_with_model(machine, with_model, requests, plain_ms) if with_model else {}
    for quantization, own in all_costs.items():
        forecasts.append(Forecast(Candidate(quantization=quantization), 1.0, scale * own.ms(1, 0)))
        for name, drafted in runs.items():
            for k in _numbers_of_drafts(arguments.max_k):
                more = scale * (own.ms(1, k) - costs.ms(1, k))
                forecasts.append(from_runs(Candidate(name, k, quantization, with_model[name]), k, drafted, more))
    return requests, forecasts


def _replayed(
    max_k: int, texts: list[KnownText], all_costs: dict[str | None, CostModel], scale: float
) -> list[Forecast]:
    """Replay the drafters that need no model at each K, and forecast them with all types of weights."""
    from specrs.cli.advise.choice import Candidate, from_replay
    from specrs.cli.advise.replay import replay
    from specrs.drafters import HOST_METHODS
    from specrs.speculative_config import SpeculativeConfig

    costs = all_costs[None]
    rows = [max(0.0, costs.ms(1, k) / costs.ms(1, 0) - 1.0) for k in range(1, max_k + 1)]
    idle = replay(texts, [], 0)
    idle_ms = 1e3 * idle.seconds / max(1, idle.passes.total())
    forecasts = []
    for config in _FROM_TEXT:
        speculative = SpeculativeConfig.from_mapping(config)
        drafters = [row.declare(speculative) for name, row in HOST_METHODS.items() if name in speculative.methods]
        for k in _numbers_of_drafts(max_k):
            found = replay(texts, drafters, k, rows[:k])
            drafting = max(0.0, 1e3 * found.seconds / max(1, found.passes.total()) - idle_ms)
            for quantization, own in all_costs.items():
                candidate = Candidate(_name(config), k, quantization, config)
                forecasts.append(from_replay(candidate, found, own, scale, drafting))
    return forecasts


def _numbers_of_drafts(max_k: int) -> list[int]:
    """Return the K to forecast: all up to 8, then every other one, and `max_k`. Near a large K speeds differ little."""
    return [k for k in range(1, max_k + 1) if k <= 8 or k % 2 == 0 or k == max_k]


def _run_with_model(
    machine: Machine, with_model: dict[str, dict[str, Any]], requests: list[LoggedRequest], plain_ms: float
) -> dict[str, list[Drafted]]:
    """Run each drafter that has a model with one and with the most drafts. Times are scaled to `plain_ms`, the
    milliseconds of a token without drafts, which runs next to them."""
    from specrs.cli.advise.choice import Candidate

    ks = sorted({1, machine.max_k})
    candidates = [Candidate(name, k, None, config) for name, config in with_model.items() for k in ks]
    _say(f"running {', '.join(with_model)} on {len(requests)} requests ...")
    timed = machine.compare([Candidate(), *candidates], requests)
    factor = plain_ms * timed[Candidate()].tokens_per_second / 1e3
    runs: dict[str, list[Drafted]] = {name: [] for name in with_model}
    for candidate in candidates:
        assert isinstance(candidate.k, int)
        drafted = timed[candidate].drafted(candidate.k)
        runs[candidate.name].append(replace(drafted, ms=factor * drafted.ms))
    return runs


def drafters_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return all drafters to compare, by name: speculative configurations without K."""
    return {_name(config): config for config in _FROM_TEXT} | _with_model(arguments)


def _with_model(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the drafters to compare that have a model, by name: speculative configurations without K."""
    found: list[dict[str, Any]] = []
    named = {} if arguments.draft_model is None else {"model": arguments.draft_model}
    if named or arguments.model_tag is None:
        found += [{"method": "draft_model", **named}, {"method": "suffix,draft_model", **named}]
    if arguments.head is not None:
        found.append({"method": "eagle3", "model": arguments.head})
    return {_name(config): config for config in found}


def _name(config: dict[str, Any]) -> str:
    """Return the name of a drafter in the table: its method, and the lengths of its n-grams if they are set."""
    lookup = [config[name] for name in ("prompt_lookup_min", "prompt_lookup_max") if name in config]
    return " ".join([config["method"], *(["-".join(map(str, lookup))] if lookup else [])])


def _types(text: str) -> list[str]:
    """Parse `int8,q4_0` as types to which weights can be quantized at load."""
    found = text.split(",")
    if len(set(found)) < len(found) or not set(found) <= set(AT_LOAD):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different types among {', '.join(AT_LOAD)}")
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
