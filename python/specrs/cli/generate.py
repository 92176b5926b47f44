"""`specrs generate`: continues one prompt. The text is streamed to stdout, statistics go to stderr. For many prompts,
use `specrs.LLM`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from specrs.cli.model_flags import ABOUT_DRAFTS, add_model, engine_settings
from specrs.errors import invalid_config, invalid_request
from specrs.sampling import SamplingParams

DESCRIPTION = (
    "Continue one prompt, without a chat template. The text goes to stdout as it is generated, statistics of the "
    "speculation go to stderr afterwards. Without MODEL the bundled pair answers, which continues Python code. "
) + ABOUT_DRAFTS
_SAMPLING: dict[str, Any] = {"temperature": 0.0, "seed": 0, "max_tokens": 128}
"""Defaults of this command: greedy sampling with a fixed seed, so that the text is the same each time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specrs generate`, with vLLM's names if vLLM has them."""
    from specrs.cli.option_flags import add_flags, add_speculation_flags
    from specrs.engine_options import EngineOptions

    parser.add_argument("--prompt", metavar="TEXT", help="text to continue; default: all of stdin")
    sampling = parser.add_argument_group("sampling")
    engine = parser.add_argument_group("engine")
    add_model(parser, engine)
    add_flags(sampling, SamplingParams, "generate", **_SAMPLING)
    add_flags(engine, EngineOptions, "generate")
    add_speculation_flags(engine, "generate")


def run(arguments: argparse.Namespace) -> None:
    """Generate and print. Raises `SpecrsError` if the engine rejects a setting or the prompt."""
    from specrs.cli.option_flags import given_options
    from specrs.engine_options import EngineOptions

    _check_model(arguments.model_tag)
    settings = engine_settings(arguments, given_options(arguments, EngineOptions, "generate"))
    # Checked before the model is loaded: what is wrong with the request should not cost that.
    params = SamplingParams(**given_options(arguments, SamplingParams, "generate"))
    prompt = _prompt(arguments.prompt)

    from specrs.cli.answer_figures import table
    from specrs.cli.threads import set_torch_threads
    from specrs.llm import LLM

    set_torch_threads(arguments.threads, bundled=settings["model"] is None)
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
        print("\n" + table(output.metrics, output.outputs[0].finish_reason, seconds), file=sys.stderr)


def _check_model(given: str | None) -> None:
    """Raise `InvalidConfigError` if MODEL has blanks and is no file, because it was meant as the prompt."""
    if given is not None and any(letter.isspace() for letter in given) and not os.path.exists(given):
        raise invalid_config("MODEL", given, "is no folder, GGUF file or hub id; give the text as --prompt")


def _prompt(given: str | None) -> str:
    """Return the prompt: the argument, or all of stdin."""
    if given is not None:
        return given
    if sys.stdin.isatty():
        print("prompt (end with Ctrl-D):", file=sys.stderr)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise invalid_request("prompt", "stdin", f"must be {error.encoding} text: {error.reason}") from None
