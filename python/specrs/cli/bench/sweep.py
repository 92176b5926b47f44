"""`specrs bench sweep`: a server for each drafter and K, measured at each concurrency and temperature."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.cli.arguments import floats
from specrs.cli.bench import options
from specrs.cli.option_flags import K_FLAGS, MODEL, add_flag
from specrs.engine_options import EngineOptions
from specrs.errors import invalid_config
from specrs.extras import require
from specrs.options import options_of
from specrs.sampling import SamplingParams

if TYPE_CHECKING:
    from specrs.bench.serve import Run
    from specrs.bench.sweep import Cell, Drafter, Setting

SUMMARY = "servers over drafters, K, concurrency and temperature, into a parquet file"
DESCRIPTION = (
    "Start a server for vanilla decoding, and one for each drafter at each K. Measure each at every concurrency "
    "and temperature, as specrs bench serve does. Write a row per measurement to a parquet file. A second run "
    "measures only what is missing."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specrs bench sweep`."""
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the parquet file, made or continued"
    )
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--serve-cmd",
        help="command that starts a server, as in 'vllm serve Qwen/Qwen3-32B'; --port and, with drafts, "
        "--speculative-config are added; default: specrs serve with --model",
    )
    servers.add_argument("--model", help=f"{MODEL}, which is served; default: the bundled pair")
    servers.add_argument(
        "--drafter",
        action="append",
        default=[],
        metavar="JSON",
        help='a speculative config without K, as in \'{"method": "eagle3", "model": "..."}\'; may be given again; '
        "default: the bundled draft",
    )
    servers.add_argument("--port", type=int, help="port of the servers; default: a free one for each server")
    servers.add_argument(
        "--server-timeout-sec",
        type=float,
        default=600.0,
        help="seconds that a server may take to become ready; default: 600",
    )
    servers.add_argument(
        "--tp", type=int, default=1, help="tensor parallelism of the servers, for the table; default: 1"
    )
    add_flag(servers, options_of(EngineOptions)["threads"], stated="that of specrs serve; not for --serve-cmd")
    swept = parser.add_argument_group("what is swept")
    swept.add_argument(
        *K_FLAGS,
        type=options.counts,
        default=[0, 1, 3, 5],
        metavar="LIST",
        help="numbers of draft tokens; default: 0,1,3,5",
    )
    swept.add_argument(
        "--max-concurrency",
        type=options.counts,
        default=[1, 4, 8],
        metavar="LIST",
        help="numbers of requests at once; default: 1,4,8",
    )
    swept.add_argument("--temperature", type=floats, default=[0.0], metavar="LIST", help="temperatures; default: 0")
    swept.add_argument(
        "--num-runs", type=int, default=1, help="times that everything is measured, in rounds; default: 1"
    )
    options.add_dataset(parser, "bundled for the bundled pair, else random", "max(50, 10 x concurrency)")
    parser.add_argument("--tokenizer", help="folder or hub id of the tokenizer; default: --model")
    parser.add_argument("--skip-chat-template", action="store_true", help="send instructions as text to continue")
    parser.add_argument("--backend", default="openai", help=options.BACKEND)
    parser.add_argument("--request-rate", type=float, help="requests per second; default: the concurrency")
    parser.add_argument(
        "--burstiness", type=float, default=1.0, help="burstiness of the arrivals; default: 1, a Poisson process"
    )
    parser.add_argument("--num-warmups", type=int, help="requests before each measurement; default: the concurrency")
    add_flag(parser, options_of(SamplingParams)["top_p"], stated="the server's")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end token")
    parser.add_argument("--analysis", help="how the table calls this sweep; default: the model")
    parser.add_argument("--restart", action="store_true", help="forget the rows that are there")
    parser.add_argument("--dry-run", action="store_true", help="print what would be measured")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bars")


def run(arguments: argparse.Namespace) -> None:
    """Run the sweep. Raises `SpecrsError` for wrong options, and if a server fails; the rows so far are in the file."""
    from specrs.bench.client import BACKENDS
    from specrs.bench.results import arrivals_warning
    from specrs.bench.sweep import SweepPlan, start, sweep

    require("aiohttp", "bench", "specrs bench sweep")
    require("pyarrow", "bench", "specrs bench sweep")
    if arguments.output.suffix != ".parquet":
        raise invalid_config("--output", str(arguments.output), "must end in .parquet")
    if arguments.backend not in BACKENDS:
        raise invalid_config("--backend", arguments.backend, f"must be one of {', '.join(BACKENDS)}")
    if arguments.serve_cmd is not None and arguments.model is None:
        raise invalid_config("--model", None, "must be given with --serve-cmd: the name that requests use")
    if arguments.serve_cmd is not None and arguments.threads is not None:
        raise invalid_config("--threads", arguments.threads, "must be part of --serve-cmd where that is given")
    bundled = arguments.model is None
    config = options.dataset(arguments, "bundled" if bundled else "random", 1)
    fixed = {
        name: getattr(arguments, name)
        for name in (
            "model", "serve_cmd", "dataset_name", "dataset_path", "hf_split", "hf_subset", "num_prompts", "input_len",
            "output_len", "random_input_len", "random_output_len", "random_range_ratio", "seed", "tokenizer",
            "skip_chat_template", "backend", "request_rate", "burstiness", "top_p", "ignore_eos", "threads",
        )
    }  # fmt: skip
    plan = SweepPlan(
        drafters=_drafters(arguments.drafter, bundled),
        ks=arguments.k,
        temperatures=arguments.temperature,
        concurrencies=arguments.max_concurrency,
        dataset=config.label,
        analysis=arguments.analysis or ("bundled pair" if bundled else arguments.model.rstrip("/").rpartition("/")[2]),
        tp=arguments.tp,
        num_runs=arguments.num_runs,
        fixed=fixed,
    )
    if arguments.dry_run:
        rows = start(arguments.output, plan, arguments.restart)
        for setting in plan.settings:
            left = {cell: plan.num_runs - plan.count(rows, setting, cell) for cell in plan.cells}
            cells = ", ".join(
                f"T = {cell.temperature:g} x {cell.concurrency}" + (f" ({runs} runs)" if runs > 1 else "")
                for cell, runs in left.items()
                if runs > 0
            )
            print(f"{shlex.join(_command(arguments, setting, 8000))}\n    to measure: {cells or 'nothing'}")
        return
    measure = _Measure(arguments)
    rows = sweep(arguments.output, plan, measure, restart=arguments.restart, tell=print)
    print(f"rows: {arguments.output}")
    if (warning := arrivals_warning(rows)) is not None:
        print(warning, file=sys.stderr)


class _Measure:
    """Starts a server for a setting, and measures cells on it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from specrs.cli.bench.serve import find_tokenizer
        from specrs.pair import TARGET

        self.arguments = arguments
        self.model = arguments.model or str(TARGET)
        self.tokenizer = find_tokenizer(arguments.tokenizer, self.model)

    def __call__(self, setting: Setting, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Run]]:
        from specrs.bench.server_process import free_port, serving

        arguments = self.arguments
        port = arguments.port or free_port()
        log = arguments.output.with_suffix(".logs") / f"{setting.name.replace('/', '-')}.log"
        environment = {}
        if arguments.model is None and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = "1"  # as `specrs.cli.threads` has it
        command = _command(arguments, setting, port)
        print(f"starting {setting.name}", file=sys.stderr)
        with serving(command, port, log, environment, arguments.server_timeout_sec) as server:
            for number, cell in enumerate(cells):
                result = self._cell(server.base_url, cell, number)
                if result.gone not in (None, "interrupted") and server.ended():
                    result.gone = str(server.died("while it was measured"))
                yield cell, result

    def _cell(self, base_url: str, cell: Cell, number: int) -> Run:
        from specrs.bench import datasets
        from specrs.bench.client import BACKENDS, Target
        from specrs.bench.serve import LoadConfig, measure
        from specrs.cli.bench.serve import default_prompts, for_backend

        arguments = self.arguments
        # Other prompts at each concurrency: a server's prefix cache must not remember those of the one before.
        config = options.dataset(
            arguments, "bundled" if arguments.model is None else "random", default_prompts(cell.concurrency)
        )
        config = replace(config, seed=config.seed + 1000 * cell.concurrency + round(100 * cell.temperature))
        sampling: dict[str, Any] = {"temperature": cell.temperature}
        if arguments.top_p is not None:
            sampling["top_p"] = arguments.top_p
        target = Target(
            base_url=base_url,
            endpoint=BACKENDS[arguments.backend],
            model=self.model,
            chat=arguments.backend == "openai-chat",
            sampling=sampling,
            ignore_eos=arguments.ignore_eos,
        )
        samples = for_backend(
            datasets.load(config, self.tokenizer), target, self.tokenizer, not arguments.skip_chat_template
        )
        rate = arguments.request_rate
        load = LoadConfig(
            max_concurrency=cell.concurrency,
            request_rate=float(cell.concurrency) if rate is None else rate,
            burstiness=arguments.burstiness,
            num_warmups=cell.concurrency if arguments.num_warmups is None else arguments.num_warmups,
            ready_check_timeout_sec=30.0 if number == 0 else 0.0,
            seed=config.seed,
        )
        return measure(target, samples, load, self.tokenizer, progress=not arguments.disable_tqdm)


def _command(arguments: argparse.Namespace, setting: Setting, port: int) -> list[str]:
    from specrs.pair import TARGET

    if arguments.serve_cmd is not None:
        command = shlex.split(arguments.serve_cmd)
        if not command:
            raise invalid_config("--serve-cmd", arguments.serve_cmd, "must be a command")
    else:
        start = "import sys; from specrs.cli import main; sys.exit(main())"
        bundled = ["--dtype", "float32", "--max-model-len", "1024"] if arguments.model is None else []
        command = [sys.executable, "-c", start, "serve", arguments.model or str(TARGET), *bundled]
        # What one run has computed must not help the next.
        command += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
        if arguments.threads is not None:
            command += ["--threads", str(arguments.threads)]
    command += ["--port", str(port)]
    if setting.speculative_config is not None:
        command += ["--speculative-config", json.dumps(setting.speculative_config)]
    elif arguments.serve_cmd is None or Path(command[0]).name == "specrs":
        command.append("--no-speculation")  # other servers draft nothing unless they are told to
    return command


def _drafters(texts: Sequence[str], bundled: bool) -> list[Drafter]:
    from specrs.bench.sweep import Drafter

    if not texts:
        if not bundled:
            raise invalid_config("--drafter", None, "must be given with --model")
        return [Drafter("draft_model", "bundled draft", {"method": "draft_model"})]
    drafters = []
    for text in texts:
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise invalid_config("--drafter", text, f"must be JSON: {error}") from None
        if not isinstance(config, dict) or "num_speculative_tokens" in config:
            raise invalid_config("--drafter", text, "must be a JSON object without num_speculative_tokens (see --k)")
        method = "".join(str(config.get("method", "draft_model")).split())
        # Two settings of one method are two rows: what differs is part of the name.
        rest = {key: value for key, value in config.items() if key not in ("method", "model")}
        others = [key if value is True else f"{key}={value}" for key, value in rest.items()]
        drafters.append(Drafter(method, " ".join([str(config.get("model", method)), *others]), config))
    return drafters
