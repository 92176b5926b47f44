"""`specrs chat`: a conversation in the terminal. `conversation` stores it, `commands` change it, `terminal` shows
it."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.cli.model_flags import ABOUT_DRAFTS, add_model, engine_settings
from specrs.errors import InvalidRequestError
from specrs.sampling import SamplingParams

if TYPE_CHECKING:
    from specrs.cli.chat.conversation import Conversation
    from specrs.cli.chat.terminal import Terminal
    from specrs.llm import LLM

DESCRIPTION = (
    "Chat with a model in the terminal, through its chat template. /help lists the commands of a chat. Ctrl-C "
    "ends an answer, Ctrl-D the chat. Lines from a pipe are answered one by one. Without MODEL the bundled pair "
    "answers: it has no template, and continues Python code. "
) + ABOUT_DRAFTS
_GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": None}
"""Sampling parameters that apply if neither a flag nor the checkpoint's generation_config.json sets them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specrs chat`."""
    from specrs.cli.option_flags import add_flag, add_flags, add_speculation_flags
    from specrs.engine_options import EngineOptions
    from specrs.options import options_of

    parser.add_argument("--system", metavar="TEXT", help="the system prompt; default: the template's, if it has one")
    parser.add_argument(
        "--chat-template", metavar="TEXT", help="Jinja template of a conversation, or its file; default: the model's"
    )
    sampling = parser.add_argument_group("sampling")
    engine = parser.add_argument_group("engine")
    add_model(parser, engine)
    for declared in options_of(SamplingParams).values():
        if "chat" in declared.commands:
            add_flag(sampling, declared, stated=_stated(declared.name, declared.default_text))
    add_flags(engine, EngineOptions, "chat")
    add_speculation_flags(engine, "chat")


def _stated(name: str, default: str) -> str:
    """Return the default of a sampling parameter in words."""
    if name == "max_tokens":
        return "as many as the context holds"
    if name == "temperature":
        default = "0"
    return default if name == "seed" else f"the checkpoint's, else {default}"


def run(arguments: argparse.Namespace) -> None:
    """Chat until the input ends. Raises `SpecrsError` if the engine rejects its settings, or a line that comes from a
    pipe."""
    from specrs.cli.chat.conversation import Conversation
    from specrs.cli.chat.terminal import Terminal
    from specrs.cli.chat_template_file import read_chat_template
    from specrs.cli.option_flags import given_options
    from specrs.cli.threads import set_torch_threads
    from specrs.engine_options import EngineOptions

    settings = engine_settings(arguments, given_options(arguments, EngineOptions, "chat"))
    sampling = given_options(arguments, SamplingParams, "chat")
    SamplingParams(**sampling)  # before the model is loaded, which may take minutes
    template = read_chat_template(arguments.chat_template)

    from specrs.llm import LLM
    from specrs.server.defaults import checkpoint_defaults

    set_torch_threads(arguments.threads, bundled=settings["model"] is None)
    name = "the bundled pair" if settings["model"] is None else Path(settings["model"]).name
    terminal = Terminal()
    if terminal.interactive:
        terminal.note(f"Loading {name} ...")
    llm = LLM(max_num_seqs=1, **settings)
    params = {**_GREEDY, **checkpoint_defaults(llm.engine.config), **sampling}
    conversation = Conversation(llm, params, template, arguments.system)
    if terminal.interactive:
        terminal.note(f"{name}; {_drafts(llm)}. /help lists the commands, Ctrl-D ends the chat.")
    _talk(conversation, terminal)


def _drafts(llm: LLM) -> str:
    """Return the drafter and its number of draft tokens, in words."""
    speculative = llm.engine.config.speculative_config
    if speculative is None:
        return "no drafts"
    return f"drafts: {speculative.method}, {speculative.num_speculative_tokens} per step"


def _talk(conversation: Conversation, terminal: Terminal) -> None:
    from specrs.cli.chat.commands import NAMES, obey

    terminal.complete(NAMES)
    while (text := terminal.read()) is not None:
        if not text.strip():
            continue
        if text.startswith("/"):
            said = obey(conversation, text)
            if said is None:
                return
            terminal.note(said)
            continue
        try:
            _answer(conversation, text, terminal)
        except InvalidRequestError as error:
            if not terminal.interactive:
                raise
            terminal.note(f"{error} (/reset forgets the conversation)")


def _answer(conversation: Conversation, text: str, terminal: Terminal) -> None:
    """Print the answer to `text` as it is generated, and a line of statistics. Ctrl-C ends the answer."""
    from specrs.cli.answer_figures import line

    begun = time.perf_counter()
    with contextlib.closing(conversation.answer(text)) as parts:
        try:
            for part in parts:
                terminal.write(part)
        except KeyboardInterrupt:
            if not terminal.interactive:
                raise
    terminal.write("\n")
    if conversation.last is not None:
        output = conversation.last
        terminal.note(line(output.metrics, output.outputs[0].finish_reason, time.perf_counter() - begun))
