"""`specrs demo`: compares plain decoding with K drafts. The model is the bundled pair or the bundled hybrid on the
bundled prompts, or another model with drafts from its text. `measure` does the measuring.

Requests run one at a time and are greedy. Prefix caching is off, so that no setting reads what another computed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.cli.arguments import MergeSettings, drafts_list
from specrs.cli.option_flags import K_FLAGS, MODEL, add_flags, add_speculation_flags, drafter_without_k, drafting_flag
from specrs.engine_options import EngineOptions
from specrs.errors import invalid_config, short

if TYPE_CHECKING:
    from specrs.cli.demo.measure import Prompt, Setting
    from specrs.tokenizer import Tokenizer

DESCRIPTION = (
    "Run the bundled target over the bundled prompts without drafts, with several K, and with K chosen by the "
    "engine. Compare text, acceptance and tokens per second. The bundled draft drafts, or what "
    "--speculative-config names. With --model hybrid, the bundled hybrid answers, and its MTP head drafts. With "
    "another --model, that model answers, once with each drafter that needs no draft model."
)
CONTEXT = 1024
FROM_TEXT = ("ngram", "suffix")
"""Drafting methods for a model for which no drafter is named."""
TEXT_DRAFTS, HEAD_DRAFTS = [5], [3]
HYBRID = "hybrid"
"""Value of --model for the bundled hybrid."""


@dataclass(frozen=True)
class Bundled:
    """A target that comes with the package, and what the demo compares for it."""

    name: str
    """Name in messages and in the heading."""
    size: str
    drafter: str
    """Name and size of the drafter that comes with it."""
    drafts: list[int]
    """Values of K that the demo compares."""


BUNDLED = {
    None: Bundled("bundled pair", "target 5.2 M parameters", "draft 0.46 M", [1, 3, 5, 7]),
    HYBRID: Bundled("bundled hybrid", "3.5 M parameters", "MTP head 0.41 M", [1, 2, 3, 4]),
}
"""Bundled targets by the value of --model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specrs demo`."""
    parser.add_argument(
        "--model",
        help=f"another target: {HYBRID} for the bundled hybrid, in float32, or {MODEL}. N-grams and suffix decoding "
        "draft for it, or what --speculative-config names; default: the bundled pair, in float32",
    )
    parser.add_argument("--head", help="folder or hub id of an EAGLE-3 head of --model, which drafts, too")
    parser.add_argument(
        *K_FLAGS,
        type=drafts_list,
        metavar="LIST",
        help="numbers of drafts; default: 1,3,5,7, for the bundled hybrid 1,2,3,4, with another --model alone 5 from "
        "the text and 3 of a head",
    )
    parser.add_argument(
        "--speculative-config",
        "-sc",
        action=MergeSettings,
        metavar="JSON",
        help='another drafter, as in \'{"method": "suffix,draft_model"}\'; K comes from --k',
    )
    add_speculation_flags(parser, "demo", own_k=True)
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

    drafter, bundled = drafter_without_k(arguments), BUNDLED.get(arguments.model)
    if arguments.head is not None and bundled is not None:
        reason = "must be the head of another model than the bundled ones; give that model as --model"
        raise invalid_config("--head", arguments.head, reason)
    if arguments.head is not None and drafter:
        flag, value = drafting_flag(drafter)
        raise invalid_config("--head", arguments.head, f"contradicts {flag}={short(value)}; leave one of them out")
    if arguments.plot is not None:
        check_picture(arguments.plot)
    # The end token of bundled models is ignored, so that prompts generate as many tokens each; what chats have answers
    # that end.
    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=bundled is not None)
    dtype = arguments.dtype or ("auto" if bundled is None else "float32")
    print(f"loading {arguments.model if bundled is None else f'the {bundled.name}'} ...", file=sys.stderr)

    from tqdm import tqdm

    from specrs.cli.threads import set_torch_threads

    set_torch_threads(arguments.threads, bundled=bundled is not None)
    settings = _settings(arguments, bundled, drafter, dtype)
    prompts = _prompts(bundled, settings[0].llm.tokenizer)
    target = Path(arguments.model).name if bundled is None else f"{bundled.name}: {bundled.size}"
    tokens = f"{'up to ' if bundled is None else ''}{arguments.max_tokens} tokens"
    machine = report.machine(arguments.threads, dtype)
    print(f"{machine}\n{report.heading(target, _named(arguments, bundled), len(prompts), tokens)}")
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
        caption = f"{len(prompts)} prompts, {arguments.max_tokens} tokens each; {machine}"
        plot.draw(results, caption, arguments.plot, target if bundled is None else bundled.name.capitalize())
        print(f"\npicture: {arguments.plot}")


def _settings(
    arguments: argparse.Namespace, bundled: Bundled | None, drafter: dict[str, Any], dtype: str
) -> list[Setting]:
    """Return the settings to compare: plain decoding, each K with each available drafter, and K chosen by the
    engine."""
    from specrs.cli.demo.measure import Setting
    from specrs.llm import LLM
    from specrs.pair import HYBRID as FOLDER
    from specrs.speculative_config import AUTO, for_repeats

    model = str(FOLDER) if arguments.model == HYBRID else arguments.model
    head = {} if arguments.head is None else {"model": arguments.head}

    def engine(config: dict[str, Any], k: int | str) -> LLM:
        return LLM(
            model=model,
            speculative_config={**for_repeats(config), "num_speculative_tokens": k},
            dtype=dtype,
            max_model_len=CONTEXT,
            max_num_seqs=1,
            enable_prefix_caching=False,
            threads=arguments.threads,
        )

    if bundled is not None or drafter:
        ks = arguments.k or (BUNDLED[None] if bundled is None else bundled).drafts
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


def _named(arguments: argparse.Namespace, bundled: Bundled | None) -> str:
    """Return the drafter's name in the heading."""
    drafter = arguments.speculative_config or {}
    named = drafter.get("method", drafter.get("model"))
    if named is not None:
        return f"drafts by {named}"
    if bundled is not None:
        return bundled.drafter
    return "drafts from the text" + ("" if arguments.head is None else f" and by the head {Path(arguments.head).name}")


def _prompts(bundled: Bundled | None, tokenizer: Tokenizer | None) -> list[tuple[str, Prompt]]:
    """Return the label and content of each prompt. They are chats if the model has a chat template and is not a
    bundled one."""
    assert tokenizer is not None
    if bundled is not None or not tokenizer.chat_template:
        from specrs.pair.prompts import PROMPTS

        return [(prompt, prompt) for prompt in PROMPTS]
    from specrs.cli.demo.chats import CHATS

    made: list[tuple[str, Prompt]] = []
    for chat in CHATS:
        text = tokenizer.render_chat([{"role": "user", "content": chat}])
        made.append((chat, tokenizer.encode(text, add_special_tokens=False)))
    return made
