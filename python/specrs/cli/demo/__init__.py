"""`specrs demo`: the bundled pair over the bundled prompts, plain decoding against K drafts. `measure` measures.

One request at a time, greedy; prefix caching is off, so that no setting reads what another computed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from specrs.cli.arguments import drafts_list

SUMMARY = "the bundled pair: plain decoding against K drafts"
DESCRIPTION = (
    "Run the bundled target over the bundled prompts, alone, with the bundled draft at several K, and with K as the "
    "engine chooses it, and compare text, acceptance and tokens per second."
)
CONTEXT = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument(
        "--k", type=drafts_list, default=[1, 3, 5, 7], metavar="LIST", help="numbers of drafts; default: 1,3,5,7"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to generate per prompt; default: 128")
    parser.add_argument("--dtype", default="float32", help="float32 (default), float64 or bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="of every engine; default: 1")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw the results into this file")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the report, and draw it if asked. Raises `SpecrsError` for what cannot be run."""
    from specrs.cli.demo import plot, report
    from specrs.cli.demo.measure import measure
    from specrs.cli.output import check_picture
    from specrs.pair.prompts import PROMPTS
    from specrs.sampling import SamplingParams

    if arguments.plot is not None:
        check_picture(arguments.plot)
    # The end token is ignored, so that every setting generates as many tokens.
    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True)
    print("loading torch and the bundled pair ...", file=sys.stderr)

    from tqdm import tqdm

    from specrs.cli.threads import few_threads
    from specrs.llm import LLM
    from specrs.speculative_config import AUTO

    few_threads()

    def engine(k: int | str) -> LLM:
        return LLM(
            speculative_config={"num_speculative_tokens": k},
            dtype=arguments.dtype,
            max_model_len=CONTEXT,
            max_num_seqs=1,
            enable_prefix_caching=False,
            threads=arguments.threads,
        )

    fixed = engine(max(arguments.k))
    engines = {**dict.fromkeys((0, *arguments.k), fixed), AUTO: engine(AUTO)}
    print(report.heading(len(PROMPTS), arguments.max_tokens, arguments.threads, arguments.dtype))
    total = len(PROMPTS) * len(engines) * arguments.max_tokens
    interval = 0.1 if sys.stderr.isatty() else 5.0  # a log gets a line now and then
    with tqdm(total=total, unit=" tokens", leave=False, dynamic_ncols=True, mininterval=interval) as bar:

        def advance(name: str, tokens: int) -> None:
            bar.set_description(name, refresh=False)
            bar.update(tokens)

        results = measure(engines, PROMPTS, params, advance)
    print(report.text(PROMPTS[0], results))
    print(report.table(results))
    print(report.equality(results))
    if arguments.plot is not None:
        machine = report.machine(arguments.threads, arguments.dtype)
        caption = f"{len(PROMPTS)} prompts, {arguments.max_tokens} tokens each; {machine}"
        plot.draw(results, caption, arguments.plot)
        print(f"\npicture: {arguments.plot}")
