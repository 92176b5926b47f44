"""`specrs demo`: the bundled pair over the bundled prompts, plain decoding against K drafts. Measures; does not draw.

One request at a time, greedy. The settings take turns prompt by prompt, so that a machine that slows down slows all of
them; prefix caching is off, so that none reads what another computed.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from specrs.cli.arguments import drafts_list
from specrs.outputs import AcceptanceFigures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specrs.llm import LLM
    from specrs.outputs import RequestOutput
    from specrs.sampling import SamplingParams

SUMMARY = "the bundled pair: plain decoding against K drafts"
DESCRIPTION = (
    "Run the bundled target over the bundled prompts, alone and with the bundled draft at several K, and compare text, "
    "acceptance and tokens per second."
)
CONTEXT = 1024


@dataclass
class Result:
    """What one setting did over all prompts: `k` drafts per iteration, 0 for plain decoding. Times are seconds."""

    k: int
    seconds: float = 0.0
    acceptance: AcceptanceFigures = field(default_factory=AcceptanceFigures)
    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)

    def add(self, output: RequestOutput, seconds: float) -> None:
        """Count one finished request."""
        self.texts.append(output.outputs[0].text)
        self.token_ids.append(output.outputs[0].token_ids)
        self.seconds += seconds
        old, new = self.acceptance, output.metrics
        # A request's histogram may be as long as the engine's K; nothing beyond its own K is counted there.
        pairs = zip_longest(old.acceptance_histogram, new.acceptance_histogram[: self.k + 1], fillvalue=0)
        self.acceptance = AcceptanceFigures(
            draft_tokens=old.draft_tokens + new.draft_tokens, acceptance_histogram=[a + b for a, b in pairs]
        )

    @property
    def name(self) -> str:
        """How tables and pictures call this setting."""
        return f"K = {self.k}" if self.k else "vanilla"

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over wall-clock time, prefill included."""
        return sum(map(len, self.token_ids)) / self.seconds

    def same_texts(self, other: Result) -> int:
        """Prompts whose tokens are the same in both."""
        return sum(mine == theirs for mine, theirs in zip(self.token_ids, other.token_ids, strict=True))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument(
        "--k", type=drafts_list, default=[1, 3, 5, 7], metavar="LIST", help="numbers of drafts; default: 1,3,5,7"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to generate per prompt; default: 128")
    parser.add_argument("--dtype", default="float32", help="float32 (default), float64 or bfloat16")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw the results into this file")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the report, and draw it if asked. Raises `SpecrsError` for what cannot be run."""
    from specrs.cli import plot, report
    from specrs.pair.prompts import PROMPTS
    from specrs.sampling import SamplingParams

    if arguments.plot is not None:
        plot.check(arguments.plot)
    # The end token is ignored, so that every setting generates as many tokens.
    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True)
    print("loading torch and the bundled pair ...", file=sys.stderr)

    from tqdm import tqdm

    from specrs.cli.threads import few_threads
    from specrs.llm import LLM

    few_threads()
    llm = LLM(
        speculative_config={"num_speculative_tokens": max(arguments.k)},
        dtype=arguments.dtype,
        max_model_len=CONTEXT,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    print(report.heading(len(PROMPTS), arguments.max_tokens, arguments.dtype))
    settings = [0, *arguments.k]
    total = len(PROMPTS) * len(settings) * arguments.max_tokens
    interval = 0.1 if sys.stderr.isatty() else 5.0  # a log gets a line now and then
    with tqdm(total=total, unit=" tokens", leave=False, dynamic_ncols=True, mininterval=interval) as bar:

        def advance(name: str, tokens: int) -> None:
            bar.set_description(name, refresh=False)
            bar.update(tokens)

        results = measure(llm, PROMPTS, settings, params, advance)
    print(report.text(PROMPTS[0], results))
    print(report.table(results))
    print(report.equality(results))
    if arguments.plot is not None:
        caption = f"{len(PROMPTS)} prompts, {arguments.max_tokens} tokens each; {report.machine(arguments.dtype)}"
        plot.draw(results, caption, arguments.plot)
        print(f"\npicture: {arguments.plot}")


def measure(
    llm: LLM,
    prompts: Sequence[str],
    settings: Sequence[int],
    params: SamplingParams,
    advance: Callable[[str, int], None],
) -> list[Result]:
    """Run every prompt at every K of `settings`, in turns, and return a result for each K in that order.

    `advance(name, tokens)` is called after each request. Raises the error of a request that was refused.
    """
    results = [Result(k) for k in settings]
    for k in settings:  # first calls allocate and pick kernels
        _one(llm, prompts[0], params.replace(num_speculative_tokens=k, max_tokens=min(8, params.max_tokens or 8)))
    for prompt in prompts:
        for result in results:
            output, seconds = _one(llm, prompt, params.replace(num_speculative_tokens=result.k))
            result.add(output, seconds)
            advance(result.name, len(output.outputs[0].token_ids))
    return results


def _one(llm: LLM, prompt: str, params: SamplingParams) -> tuple[RequestOutput, float]:
    start = time.perf_counter()
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output, time.perf_counter() - start
