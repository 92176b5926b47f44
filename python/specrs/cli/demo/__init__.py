"""`specrs demo`: compares plain decoding with K drafts, for the bundled pair on the bundled prompts, or for another
model with drafts from its text. `measure` does the measuring.

Requests run one at a time and are greedy. Prefix caching is off, so that no setting reads what another computed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.cli.arguments import MergeJSON, drafts_list
from specrs.cli.option_flags import MODEL, add_flags
from specrs.engine_options import EngineOptions
from specrs.errors import invalid_config

if TYPE_CHECKING:
    from specrs.cli.demo.measure import Prompt, Setting
    from specrs.tokenizer import Tokenizer

DESCRIPTION = (
    "Run the bundled target over the bundled prompts without drafts, with several K, and with K chosen by the "
    "engine. Compare text, acceptance and tokens per second. The bundled draft drafts, or what "
    "--speculative-config names. With --model, that model answers, once with each drafter that needs no draft "
    "model."
)
CONTEXT = 1024
FROM_TEXT = ("ngram", "suffix")
"""Drafting methods for a model for which no drafter is named."""
PAIR_DRAFTS, TEXT_DRAFTS, HEAD_DRAFTS = [1, 3, 5, 7], [5], [3]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specrs demo`."""
    parser.add_argument(
        "--model",
        help=f"another target: {MODEL}. N-grams and suffix decoding draft for it, or what "
        "--speculative-config names; default: the bundled pair, in float32",
    )
    parser.add_argument("--head", help="folder or hub id of an EAGLE-3 head of --model, which drafts, too")
    parser.add_argument(
        "--k",
        type=drafts_list,
        metavar="LIST",
        help="numbers of drafts; default: 1,3,5,7, with --model alone 5 from the text and 3 of a head",
    )
    parser.add_argument(
        "--speculative-config",
        action=MergeJSON,
        metavar="JSON",
        help='another drafter, as in \'{"method": "suffix,draft_model"}\'; K comes from --k',
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to generate per prompt; default: 128")
    add_flags(parser, EngineOptions, "demo", threads=1)
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw the results into this file")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the report, and draw it if asked. Raises `SpecrsError` for wrong options, and if a request is
    rejected."""
    from specrs.cli.demo import plot, report
    from specrs.cli.demo.measure import measure
    from specrs.cli.output import check_picture
    from specrs.sampling import SamplingParams

    drafter, model = arguments.speculative_config or {}, arguments.model
    if "num_speculative_tokens" in drafter:
        field = "--speculative-config num_speculative_tokens"
        raise invalid_config(field, drafter["num_speculative_tokens"], "must come from --k")
    if arguments.head is not None and (model is None or drafter):
        raise invalid_config("--head", arguments.head, "allowed with --model, and without --speculative-config")
    if arguments.plot is not None:
        check_picture(arguments.plot)
    # The pair's end token is ignored, so that prompts generate as many tokens each; what chats have answers that end.
    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=model is None)
    dtype = arguments.dtype or ("float32" if model is None else "auto")
    print(f"loading {'the bundled pair' if model is None else model} ...", file=sys.stderr)

    from tqdm import tqdm

    from specrs.cli.threads import set_torch_threads

    set_torch_threads(arguments.threads, bundled=model is None)
    settings = _settings(arguments, drafter, dtype)
    prompts = _prompts(model, settings[0].llm.tokenizer)
    name = None if model is None else Path(model).name
    print(report.heading(len(prompts), arguments.max_tokens, arguments.threads, dtype, _named(arguments), name))
    total = len(prompts) * len(settings) * arguments.max_tokens
    interval = 0.1 if sys.stderr.isatty() else 5.0  # a log gets a line now and then
    with tqdm(total=total, unit=" tokens", leave=False, dynamic_ncols=True, mininterval=interval) as bar:

        def advance(name: str, tokens: int) -> None:
            bar.set_description(name, refresh=False)
            bar.update(tokens)

        results = measure(settings, [prompt for _, prompt in prompts], params, advance)
    print(report.text(prompts[0][0], results))
    print(report.table(results))
    print(report.explanation(results), end="")
    print(report.equality(results))
    if arguments.plot is not None:
        machine = report.machine(arguments.threads, dtype)
        caption = f"{len(prompts)} prompts, {arguments.max_tokens} tokens each; {machine}"
        plot.draw(results, caption, arguments.plot, name or "Bundled pair")
        print(f"\npicture: {arguments.plot}")


def _settings(arguments: argparse.Namespace, drafter: dict[str, Any], dtype: str) -> list[Setting]:
    """Return the settings to compare: plain decoding, each K with each available drafter, and K chosen by the
    engine."""
    from specrs.cli.demo.measure import Setting
    from specrs.llm import LLM
    from specrs.speculative_config import AUTO, for_repeats

    head = {} if arguments.head is None else {"model": arguments.head}

    def engine(config: dict[str, Any], k: int | str) -> LLM:
        return LLM(
            model=arguments.model,
            speculative_config={**for_repeats(config), "num_speculative_tokens": k},
            dtype=dtype,
            max_model_len=CONTEXT,
            max_num_seqs=1,
            enable_prefix_caching=False,
            threads=arguments.threads,
        )

    if arguments.model is None or drafter:
        ks = arguments.k or PAIR_DRAFTS
        llm = engine(drafter, max(ks))
        return [Setting(0, llm), *(Setting(k, llm) for k in ks), Setting(AUTO, engine(drafter, AUTO))]
    own: list[tuple[str, dict[str, Any], list[int]]]
    own = [(method, {}, TEXT_DRAFTS) for method in FROM_TEXT] + ([("eagle3", head, HEAD_DRAFTS)] if head else [])
    drafted = []
    for method, config, usual in own:
        ks = arguments.k or usual
        llm = engine({"method": method, **config}, max(ks))
        drafted += [Setting(k, llm, method) for k in ks]
    chosen = engine({"method": ",".join(method for method, _, _ in own), **head}, AUTO)
    return [Setting(0, drafted[0].llm), *drafted, Setting(AUTO, chosen)]


def _named(arguments: argparse.Namespace) -> str | None:
    """Return the drafter's name in the heading; None for the bundled draft model."""
    drafter = arguments.speculative_config or {}
    named = drafter.get("method", drafter.get("model"))
    if named is not None:
        return f"drafts by {named}"
    if arguments.model is None:
        return None
    return "drafts from the text" + ("" if arguments.head is None else f" and by the head {Path(arguments.head).name}")


def _prompts(model: str | None, tokenizer: Tokenizer | None) -> list[tuple[str, Prompt]]:
    """Return the label and content of each prompt. They are chats if the model has a chat template."""
    assert tokenizer is not None
    if model is None or not tokenizer.chat_template:
        from specrs.pair.prompts import PROMPTS

        return [(prompt, prompt) for prompt in PROMPTS]
    from specrs.cli.demo.chats import CHATS

    made: list[tuple[str, Prompt]] = []
    for chat in CHATS:
        text = tokenizer.render_chat([{"role": "user", "content": chat}])
        made.append((chat, tokenizer.encode(text, add_special_tokens=False)))
    return made
