"""`specrs bench serve`: sends requests to an OpenAI-compatible server, and reports the metrics of `vllm bench
serve`."""

from __future__ import annotations

import argparse
import math
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.cli.bench import options
from specrs.cli.option_flags import add_flag
from specrs.errors import EngineError, InvalidConfigError, check_number, invalid_config
from specrs.extras import require
from specrs.options import options_of
from specrs.sampling import SamplingParams

if TYPE_CHECKING:
    from specrs.bench.client import Target
    from specrs.bench.datasets import Sample
    from specrs.bench.serve import LoadConfig
    from specrs.tokenizer import Tokenizer

BUNDLED_NAME = "bundled"
"""Model name that `specrs serve` gives the bundled pair."""
_GOODPUT = "limits in ms, as in ttft:200 tpot:50; NAME is one of ttft, tpot, e2el"
SUMMARY = "a running server: throughput, TTFT, TPOT, ITL, acceptance"
DESCRIPTION = (
    "Send prompts to an OpenAI-compatible server. Report throughput, latencies and, if its /metrics has them, "
    "statistics of speculative decoding. With --max-concurrency C, the default request rate is C per second, and "
    "the default number of prompts is max(50, 10 C)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specrs bench serve`, with vLLM's names if vLLM has them."""
    server = parser.add_argument_group("server")
    server.add_argument("--backend", default="openai", help=options.BACKEND)
    server.add_argument("--endpoint-type", dest="backend", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    server.add_argument("--base-url", help="address of the server; default: http://HOST:PORT")
    server.add_argument("--host", default="127.0.0.1", help="host of the server; default: 127.0.0.1")
    server.add_argument("--port", type=int, default=8000, help="port of the server; default: 8000")
    server.add_argument(
        "--endpoint", help="path of the requests; default: /v1/completions, /v1/chat/completions for openai-chat"
    )
    server.add_argument("--model", help="model of the requests; default: the first that the server lists")
    server.add_argument("--served-model-name", help="name of the model in requests; default: --model")
    server.add_argument("--tokenizer", help="folder or hub id of the tokenizer; default: --model, where it is one")
    options.add_dataset(parser, "random", "1000, or max(50, 10 x concurrency)")
    parser.add_argument("--skip-chat-template", action="store_true", help="send instructions as text to continue")
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=float, help="requests per second; default: --max-concurrency, else inf")
    load.add_argument(
        "--burstiness", type=float, default=1.0, help="burstiness of the arrivals; default: 1, a Poisson process"
    )
    load.add_argument("--max-concurrency", type=int, help="requests in flight at most; default: no limit")
    load.add_argument("--num-warmups", type=int, default=0, help="requests before the measurement; default: 0")
    load.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, help="seconds to wait for the server; default: 0, one try"
    )
    sampling = parser.add_argument_group("sampling")
    for one in options_of(SamplingParams).values():
        if "bench serve" in one.commands:
            add_flag(sampling, one, stated="the server's")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after an end token")
    out = parser.add_argument_group("results")
    out.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        help="latencies to report, with commas between: one of ttft, tpot, itl, e2el; default: ttft,tpot,itl",
    )
    out.add_argument(
        "--metric-percentiles",
        type=options.percentiles,
        default=[99.0],
        help="percentiles of the latencies; default: 99",
    )
    out.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help=_GOODPUT)
    out.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    out.add_argument("--save-detailed", action="store_true", help="write every request's times and text, too")
    out.add_argument(
        "--result-dir", type=Path, default=Path(), help="folder of the figures; default: ., the current one"
    )
    out.add_argument(
        "--result-filename", help="file of the results; default: made of backend, rate, concurrency, model and date"
    )
    out.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    out.add_argument("--profile", action="store_true", help="have the server write a torch profiler trace of the run")


def run(arguments: argparse.Namespace) -> None:
    """Measure and print. Raises `SpecrsError` for wrong options, and if the server does not answer or stops
    answering."""
    from specrs.bench import datasets, report, serve
    from specrs.bench.metrics import LATENCIES, compute, parse_goodput
    from specrs.bench.serve import LoadConfig

    require("aiohttp", "bench", "specrs bench serve")
    concurrency = arguments.max_concurrency
    rate = arguments.request_rate
    load = LoadConfig(
        max_concurrency=concurrency,
        request_rate=(math.inf if concurrency is None else float(concurrency)) if rate is None else rate,
        burstiness=arguments.burstiness,
        num_warmups=arguments.num_warmups,
        ready_check_timeout_sec=arguments.ready_check_timeout_sec,
        seed=arguments.seed,
        profile=arguments.profile,
    )
    shown = arguments.percentile_metrics.split(",")
    unknown = [name for name in shown if name not in LATENCIES]
    if unknown:
        raise invalid_config("--percentile-metrics", unknown[0], f"must be of {', '.join(LATENCIES)}")
    show = report.ReportOptions(
        percentile_metrics=shown,
        percentiles=arguments.metric_percentiles,
        goodput=parse_goodput(arguments.goodput),
        max_concurrency=concurrency,
    )
    if arguments.skip_chat_template and arguments.backend == "openai-chat":
        raise invalid_config(
            "--skip-chat-template", True, "has no meaning for openai-chat: the server has the template"
        )
    config = options.dataset(arguments, "random", 1000 if concurrency is None else default_prompts(concurrency))
    target = find_target(arguments)
    tokenizer = find_tokenizer(arguments.tokenizer, arguments.model or target.model)
    samples = datasets.load(config, tokenizer)
    samples = for_backend(samples, target, tokenizer, template=not arguments.skip_chat_template)
    announce(load)
    result = serve.measure(target, samples, load, tokenizer, progress=not arguments.disable_tqdm)
    metrics = compute(result.records, result.duration, show.goodput)
    print(report.block(metrics, result.counters, show))
    errors = [record.error for record in result.records if record.error is not None]
    if arguments.save_result or arguments.save_detailed:
        settings = {
            "backend": arguments.backend,
            "model_id": target.model,
            "tokenizer_id": arguments.tokenizer or arguments.model or target.model,
            "dataset": config.label,
            "num_prompts": config.num_prompts,
            "request_rate": load.request_rate if math.isfinite(load.request_rate) else "inf",
            "burstiness": load.burstiness,
            **target.sampling,
        }
        found = report.record(result, metrics, show, settings, arguments.save_detailed)
        print(
            f"saved: {report.save(found, arguments.result_dir, arguments.result_filename or _filename(settings, load))}"
        )
    if result.gone == "interrupted":
        raise KeyboardInterrupt
    if result.gone is not None or metrics.completed == 0:
        what = f"{metrics.completed} of {len(samples)} requests were answered"
        raise EngineError(f"--base-url={target.base_url}: {what}; then: {result.gone or errors[0]}")
    if errors:
        print(f"{len(errors)} of {len(samples)} requests failed; the first: {errors[0]}", file=sys.stderr)


def default_prompts(concurrency: int) -> int:
    """Return the default number of prompts for a concurrency."""
    return max(50, 10 * concurrency)


def announce(load: LoadConfig) -> None:
    """Print on stderr which load is about to be sent."""
    kind = "Poisson process" if load.burstiness == 1.0 else "gamma distribution"
    print(
        f"Traffic request rate: {load.request_rate:g}\nBurstiness factor: {load.burstiness:g} ({kind})\n"
        f"Maximum request concurrency: {load.max_concurrency}",
        file=sys.stderr,
    )


def find_target(arguments: argparse.Namespace) -> Target:
    """Return the server and endpoint to measure. Asks the server for a model if none is named. Raises `SpecrsError` for
    wrong options, and if the server has no model or does not answer."""
    from specrs.bench.client import BACKENDS, Target

    if arguments.backend not in BACKENDS:
        raise invalid_config("--backend", arguments.backend, f"must be one of {', '.join(BACKENDS)}")
    base_url = arguments.base_url or f"http://{arguments.host}:{arguments.port}"
    if not base_url.startswith(("http://", "https://")):
        raise invalid_config("--base-url", base_url, "must begin with http:// or https://")
    sampling: dict[str, Any] = {}
    for name, low, high in (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("top_k", -1, math.inf),
        ("min_p", 0, 1),
    ):
        value = getattr(arguments, name)
        if value is not None:
            check_number(InvalidConfigError, f"--{name.replace('_', '-')}", value, low, high)
            sampling[name] = value
    model = arguments.served_model_name or arguments.model
    return Target(
        base_url=base_url,
        endpoint=arguments.endpoint or BACKENDS[arguments.backend],
        model=model or first_model(base_url, arguments.ready_check_timeout_sec),
        chat=arguments.backend == "openai-chat",
        sampling=sampling,
        ignore_eos=arguments.ignore_eos,
    )


def first_model(base_url: str, timeout: float) -> str:
    """Wait for the server and return the first model of `/v1/models`. Raises `EngineError` if there is none."""
    import asyncio
    import time

    from specrs.bench.client import session

    async def ask() -> str:
        import aiohttp

        deadline = time.monotonic() + timeout
        async with session(1) as client:
            while True:
                try:
                    async with client.get(base_url.rstrip("/") + "/v1/models") as response:
                        response.raise_for_status()
                        return str((await response.json())["data"][0]["id"])
                except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError) as error:
                    if time.monotonic() + 1.0 > deadline:
                        allowed = "must be an OpenAI-compatible server, or give --model"
                        raise EngineError(f"--base-url={base_url}: /v1/models: {error}; {allowed}") from None
                await asyncio.sleep(1.0)

    return asyncio.run(ask())


def find_tokenizer(name: str | None, model: str) -> Tokenizer | None:
    """Return the tokenizer called `name`; without a name, the model's if it is on this machine, else None. Raises
    `CheckpointError` if a named one cannot be read."""
    from specrs.errors import CheckpointError
    from specrs.models.errors import about
    from specrs.pair import TARGET
    from specrs.tokenizer import Tokenizer

    if model == BUNDLED_NAME:
        model = str(TARGET)
    try:
        with about("model" if name is None else "tokenizer", "revision"):
            return Tokenizer(name or model)
    except CheckpointError:
        if name is not None:
            raise
        print(f"no tokenizer for {model} here: tokens are counted as the server reports them", file=sys.stderr)
        return None


def for_backend(samples: list[Sample], target: Target, tokenizer: Tokenizer | None, template: bool) -> list[Sample]:
    """Return the samples in the form that the endpoint accepts: text for chats; otherwise instructions go through the
    chat template."""
    from dataclasses import replace

    if not target.chat:
        if tokenizer is None or not template or not tokenizer.chat_template:
            return samples
        rendered = tokenizer.render_chat
        return [
            replace(sample, prompt=rendered([{"role": "user", "content": sample.prompt}]))
            if sample.instruction and isinstance(sample.prompt, str)
            else sample
            for sample in samples
        ]
    texts = []
    for sample in samples:
        if isinstance(sample.prompt, str):
            texts.append(sample)
        elif tokenizer is not None:
            texts.append(replace(sample, prompt=tokenizer.decode(sample.prompt)))
        else:
            raise invalid_config("--tokenizer", None, "must be given: a chat takes text, these are token ids")
    return texts


def _filename(settings: dict[str, Any], load: LoadConfig) -> str:
    model = str(settings["model_id"]).rstrip("/").rpartition("/")[2]
    concurrency = "" if load.max_concurrency is None else f"-concurrency{load.max_concurrency}"
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"{settings['backend']}-{load.request_rate:g}qps{concurrency}-{model}-{date}.json"
