"""`specrs generate`: one prompt in, its text streamed to stdout, figures on stderr. Many prompts are `specrs.LLM`'s."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from specrs.errors import invalid_request
from specrs.outputs import RequestMetrics
from specrs.sampling import SamplingParams

SUMMARY = "continue one prompt"
BUNDLED_DRAFTS = 5
DESCRIPTION = (
    "Continue one prompt. The text goes to stdout as it is made, figures about the speculation to stderr after it. "
    f"Without --model the bundled pair answers, with {BUNDLED_DRAFTS} draft tokens: it continues Python code. Another "
    "model drafts nothing without --speculative-config."
)
_SAMPLING: dict[str, Any] = {"temperature": 0.0, "seed": 0, "max_tokens": 128}
"""Defaults of this command. The text is greedy, and the same each time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options, vLLM's where vLLM has them."""
    from specrs.cli.option_flags import add_flags
    from specrs.engine_options import EngineOptions

    parser.add_argument("prompt", nargs="?", help="text to continue, not a model (see --model); default: stdin")
    add_flags(parser.add_argument_group("sampling"), SamplingParams, "generate", **_SAMPLING)
    add_flags(parser.add_argument_group("engine"), EngineOptions, "generate")


def run(arguments: argparse.Namespace) -> None:
    """Generate and print. Raises `SpecrsError` for what the engine refuses."""
    from specrs.cli.option_flags import given_options
    from specrs.engine_options import EngineOptions

    settings = given_options(arguments, EngineOptions, "generate")
    if arguments.model is None:
        drafter = settings.get("speculative_config", {})
        settings["speculative_config"] = {"num_speculative_tokens": BUNDLED_DRAFTS, **drafter}
        settings.setdefault("dtype", "float32")
    # Checked before the model is loaded: what is wrong with the request should not cost that.
    params = SamplingParams(**given_options(arguments, SamplingParams, "generate"))
    prompt = _prompt(arguments.prompt)

    from specrs.cli.threads import set_torch_threads
    from specrs.llm import LLM

    set_torch_threads(arguments.threads, bundled=arguments.model is None)
    llm = LLM(max_num_seqs=1, **settings)
    output = None
    start = time.perf_counter()
    for output in llm.stream(prompt, params):
        sys.stdout.write(output.outputs[0].delta)
        sys.stdout.flush()
    seconds = time.perf_counter() - start
    sys.stdout.write("\n")
    sys.stdout.flush()
    if output is not None:
        print("\n" + figures(output.metrics, output.outputs[0].finish_reason, seconds), file=sys.stderr)


def _prompt(given: str | None) -> str:
    """The argument, or all of stdin."""
    if given is not None:
        return given
    if sys.stdin.isatty():
        print("prompt (end with Ctrl-D):", file=sys.stderr)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise invalid_request("prompt", "stdin", f"must be {error.encoding} text: {error.reason}") from None


def figures(metrics: RequestMetrics, finish_reason: str | None, seconds: float) -> str:
    """What is worth knowing about one request, a line each. Speculation is left out where nothing was drafted."""
    count = metrics.num_generated_tokens
    rows: list[tuple[str, Any]] = [
        ("Generated tokens:", f"{count} ({finish_reason})"),
        ("Output token throughput (tok/s):", f"{count / seconds:.1f}"),
    ]
    if metrics.time_to_first_token is not None:
        rows.append(("Time to first token (ms):", f"{1e3 * metrics.time_to_first_token:.1f}"))
    if metrics.time_per_output_token is not None:
        rows.append(("Time per output token (ms):", f"{1e3 * metrics.time_per_output_token:.2f}"))
    if metrics.drafts:
        shares = " ".join(f"{100 * share:.1f}" for share in metrics.per_position)
        rows += [
            ("Acceptance length:", f"{metrics.acceptance_length:.2f}"),
            ("Acceptance rate (%):", f"{100 * metrics.acceptance_rate:.1f}"),
            ("Per-position acceptance (%):", shares),
            ("Drafts:", metrics.drafts),
            ("Draft tokens:", metrics.draft_tokens),
            ("Accepted tokens:", metrics.accepted_tokens),
            # Beside the acceptance length, which leaves out passes that nothing was drafted for. Drafts behind a stop
            # count as accepted.
            ("Tokens per pass of the target:", f"{count / max(count - metrics.accepted_tokens, metrics.drafts):.2f}"),
        ]
    return "\n".join(f"{name:<40} {value}" for name, value in rows)
