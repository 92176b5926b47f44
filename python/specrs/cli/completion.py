"""`specrs completion`: prints a script with which a shell completes commands, flags and their values. Starts no
engine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from specrs.cli.help_text import brief
from specrs.options import Choice, options_of

SHELLS = ("bash", "zsh", "fish")
_FILES = {"model", "model_tag", "draft_model", "tokenizer", "chat_template", "config", "ssl_certfile", "ssl_keyfile"}
"""Names of arguments that may be files or folders, in addition to those whose type is a path."""
DESCRIPTION = (
    "Print a script that completes this command line. For bash, write it to "
    "~/.local/share/bash-completion/completions/specrs. For zsh, write it to a file _specrs in a folder of "
    "$fpath. For fish, write it to ~/.config/fish/completions/specrs.fish."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `specrs completion`."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"the shell: one of {', '.join(SHELLS)}")


def run(arguments: argparse.Namespace) -> None:
    """Print the completion script of a shell."""
    sys.stdout.write(script(arguments.shell))


def script(shell: str) -> str:
    """Return the script for a shell of `SHELLS`, made from the parser of all commands."""
    import shtab

    from specrs.cli import parser

    top = parser()  # of its own, so it may be changed
    names = _names()
    for action in _actions(top):
        flags = [flag for flag in action.option_strings if flag in names]
        if flags and action.choices is None:
            action.choices = names[flags[0]]
        if action.type is Path or action.dest in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        if action.help != argparse.SUPPRESS:
            action.help = brief(action)
        if isinstance(action, argparse._SubParsersAction):
            for summary in action._choices_actions:
                action.choices[summary.dest].description = summary.help
    return str(shtab.complete(top, shell=shell)).rstrip("\n") + "\n"


def _names() -> dict[str, tuple[str, ...]]:
    """Return the values of each flag that has a fixed set of them."""
    from specrs.engine_options import EngineOptions
    from specrs.server.options import ServerOptions
    from specrs.speculative_config import SpeculativeConfig

    declared = [
        one for owner in (EngineOptions, ServerOptions, SpeculativeConfig) for one in options_of(owner).values()
    ]
    return {one.flag: one.values.names for one in declared if isinstance(one.values, Choice)}


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
