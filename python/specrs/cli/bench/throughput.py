"""`specrs bench throughput`: runs all prompts at once on an engine in this process."""

from __future__ import annotations

import argparse
from pathlib import Path

from specrs.cli.bench import options
from specrs.cli.output import write_json

SUMMARY = "an engine in this process: requests and tokens per second"
DESCRIPTION = "Complete all prompts at once on an engine in this process. Report requests and tokens per second."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specrs bench throughput`, with vLLM's names if vLLM has them."""
    options.add_engine(parser)
    options.add_dataset(parser, "bundled for the bundled pair, else random", "1000, 50 for the bundled pair")
    options.add_sampling(parser, temperature=0.0, top_p=1.0)
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on after an end token; default: on",
    )
    parser.add_argument("--skip-chat-template", action="store_true", help="send instructions as text to continue")
    parser.add_argument(
        "--output-json", type=Path, metavar="FILE", help="JSON file that the numbers are also written to"
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    parser.add_argument("--profile", action="store_true", help="write a torch profiler trace into --profile-dir")
    parser.add_argument(
        "--profile-dir", type=Path, default=Path("profiles"), help="folder of the profiles; default: profiles"
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure and print. Raises `SpecrsError` for wrong options, and if a request is rejected."""
    from specrs.bench import datasets
    from specrs.bench.offline import profiled, throughput

    bundled = arguments.model is None
    config = options.dataset(arguments, "bundled" if bundled else "random", 50 if bundled else 1000)
    folder = options.trace_folder(arguments.profile_dir) if arguments.profile else None
    llm = options.engine(arguments)
    assert llm.tokenizer is not None
    samples = datasets.load(config, llm.tokenizer)
    params = options.sampling_params(arguments, samples, temperature=arguments.temperature)
    prompts = options.prompts(samples, llm.tokenizer, not arguments.skip_chat_template)
    with profiled(folder) as trace:
        found = throughput(llm, prompts, params, not arguments.disable_tqdm)
    print(
        f"Throughput: {found.requests_per_second:.2f} requests/s, {found.total_tokens_per_second:.2f} total tokens/s, "
        f"{found.output_tokens_per_second:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {found.prompt_tokens}")
    print(f"Total num output tokens:  {found.output_tokens}")
    statistics = found.acceptance
    if statistics.drafts:
        shares = ", ".join(f"{100 * share:.2f}" for share in statistics.per_position)
        print(f"Acceptance length: {statistics.acceptance_length:.2f}", end=", ")
        print(f"rate: {100 * statistics.acceptance_rate:.2f} %", end=", ")
        print(f"per position: {shares} %")
    if trace is not None:
        print(f"trace: {trace}; its timing is no measurement")
    if arguments.output_json is not None:
        numbers = {
            "elapsed_time": found.seconds,
            "num_requests": found.num_requests,
            "total_num_tokens": found.prompt_tokens + found.output_tokens,
            "requests_per_second": found.requests_per_second,
            "tokens_per_second": found.total_tokens_per_second,
            "output_tokens_per_second": found.output_tokens_per_second,
            "acceptance_length": statistics.acceptance_length if statistics.drafts else None,
        }
        write_json("--output-json", arguments.output_json, numbers)
