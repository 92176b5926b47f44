"""Flags of declared options (`specrs.options`). Parses values; the dataclass of the options checks them."""

from __future__ import annotations

import argparse
from typing import Any

from specrs.cli.arguments import MergeJSON, human_int, json_or_text
from specrs.engine_options import EngineOptions
from specrs.options import (
    Checked,
    Choice,
    Command,
    Integer,
    ListOf,
    Number,
    Object,
    Option,
    Settings,
    Switch,
    Text,
    Values,
    options_of,
    show,
)

MODEL = options_of(EngineOptions)["model"].help
"""Help text of flags that name a model."""


def add_flags(to: argparse._ActionsContainer, owner: type, command: Command, **defaults: Any) -> None:
    """Add the flags that `command` has for the options of the dataclass `owner` to the parser or group `to`.

    A flag's default is None, which leaves the option's own default. `defaults` are options with other defaults in this
    command.
    """
    declared = options_of(owner)
    assert defaults.keys() <= declared.keys()
    for name, one in declared.items():
        if command in one.commands:
            add_flag(to, one, defaults.get(name))


def add_flag(
    to: argparse._ActionsContainer, declared: Option, default: Any = None, stated: str | None = None, **settings: Any
) -> None:
    """Add the flag of one option.

    `default`: a default other than the option's; `stated`: the default in words, if a command leaves it to another
    program. `settings` are arguments of argparse that replace those of the option.
    """
    if default is not None:
        stated = show(default, declared.values)
    shown = declared.help_text(stated).replace("%", "%%")
    names = [declared.flag, *([declared.short] if declared.short else [])]
    action = to.add_argument(
        *names, **{"dest": declared.name, "default": default, "help": shown, **_parsing(declared), **settings}
    )
    action.brief = declared.help  # type: ignore[attr-defined]  # of the short help (`specrs.cli.help_text`)


def given_options(arguments: argparse.Namespace, owner: type, command: Command) -> dict[str, Any]:
    """Return the options of `owner` that were given as flags of `command`, or that have a default in this command."""
    names = [name for name, declared in options_of(owner).items() if command in declared.commands]
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def json_list_or_text(text: str) -> Any:
    """Return the JSON list in `text`, or `text` itself if it is no list: `null` is an origin of web pages."""
    found = json_or_text(text)
    return found if isinstance(found, list) else text


def _parsing(declared: Option) -> dict[str, Any]:
    """Return the arguments of argparse that let it read an option's values."""
    match declared.values:
        case Switch():
            return {"action": argparse.BooleanOptionalAction}
        case Integer(word=None, units=units):
            return {"type": human_int if units else int, "metavar": "N"}
        case Integer():
            return {"type": json_or_text, "metavar": "N"}
        case Number():
            return {"type": float, "metavar": "X"}
        case ListOf(each=Integer()):
            return {"nargs": "+", "type": int, "metavar": "N"}
        case ListOf():
            return {"nargs": "+", "metavar": "TEXT"}
        case Choice():
            return {"metavar": "NAME"}
        case Text():
            return {"metavar": "TEXT"}
        case Settings() | Object():
            return {"action": MergeJSON, "metavar": "JSON"}
        case Checked(several=True):
            return {"action": "append", "metavar": "TEXT"}
        case Values(noun="JSON"):
            return {"type": json_list_or_text, "metavar": "JSON"}
        case _:
            return {}
