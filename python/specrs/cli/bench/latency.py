"""`specrs bench latency`: the time of one batch of random prompts on an engine in this process."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from specrs.cli.bench import options
from specrs.cli.output import write_json
from specrs.errors import InvalidConfigError, check_int

SUMMARY = "an engine in this process: seconds of one batch"
DESCRIPTION = (
    "Run one batch of random prompts several times on an engine in this process, and report how long it takes."
)
PERCENTS = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specrs bench latency`, with vLLM's names if vLLM has them."""
    options.add_engine(parser)
    parser.add_argument("--input-len", type=int, default=32, help="tokens of each prompt; default: 32")
    parser.add_argument("--output-len", type=int, default=128, help="tokens to generate; default: 128")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts of a batch; default: 8")
    parser.add_argument("--num-iters", type=int, default=30, help="runs that count; default: 30")
    parser.add_argument("--num-iters-warmup", type=int, default=10, help="runs before those that count; default: 10")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts; default: 0")
    parser.add_argument(
        "--output-json", type=Path, metavar="FILE", help="JSON file that the numbers are also written to"
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    parser.add_argument("--profile", action="store_true", help="only one run, with a torch profiler trace of it")
    parser.add_argument(
        "--profile-dir", type=Path, default=Path("profiles"), help="folder of the profiles; default: profiles"
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure and print. Raises `SpecrsError` for wrong options, and if the batch cannot run."""
    import numpy as np
    from tqdm import tqdm

    from specrs.bench import datasets
    from specrs.bench.offline import latencies, profiled
    from specrs.sampling import SamplingParams
    from specrs.speculative_config import for_repeats

    check_int(InvalidConfigError, "--num-iters", arguments.num_iters, 1)
    check_int(InvalidConfigError, "--batch-size", arguments.batch_size, 1)
    check_int(InvalidConfigError, "--num-iters-warmup", arguments.num_iters_warmup, 0)
    config = datasets.DatasetConfig(
        name="random",
        num_prompts=arguments.batch_size,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        seed=arguments.seed,
    )
    folder = options.trace_folder(arguments.profile_dir) if arguments.profile else None
    drafter = arguments.speculative_config
    llm = options.engine(arguments, speculative_config=drafter and for_repeats(drafter))
    assert llm.tokenizer is not None
    prompts = options.prompts(datasets.load(config, llm.tokenizer), llm.tokenizer)
    params = SamplingParams(temperature=0.0, max_tokens=arguments.output_len, ignore_eos=True, detokenize=False)
    # one prompt alone is checked first, so that a length that does not fit is an error and not a short time
    llm.generate(prompts[0], params, use_tqdm=False)
    warmup = arguments.num_iters_warmup
    if folder is not None:
        latencies(llm, prompts, params, num_iters=1, num_iters_warmup=warmup)
        with profiled(folder) as trace:
            latencies(llm, prompts, params, num_iters=1, num_iters_warmup=0)
        print(f"trace: {trace}")
        return
    total = warmup + arguments.num_iters
    with tqdm(total=total, desc="batches", disable=arguments.disable_tqdm, leave=False, file=sys.stderr) as bar:
        seconds = latencies(
            llm, prompts, params, num_iters=arguments.num_iters, num_iters_warmup=warmup, advance=bar.update
        )
    found = {percent: float(np.percentile(seconds, percent)) for percent in PERCENTS}
    mean = float(np.mean(seconds))
    print(f"Avg latency: {mean} seconds")
    for percent, value in found.items():
        print(f"{percent}% percentile latency: {value} seconds")
    if arguments.output_json is not None:
        numbers = {"avg_latency": mean, "latencies": seconds, "percentiles": {str(p): v for p, v in found.items()}}
        write_json("--output-json", arguments.output_json, numbers)
