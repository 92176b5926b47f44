"""Flags of declared options (`specrs.options`). Parses values, and leaves checks to the dataclass of the options."""

from __future__ import annotations

import argparse
from typing import Any

from specrs.cli.arguments import MergeJSON, human_int, json_or_text
from specrs.engine_options import EngineOptions
from specrs.options import (
    Checked,
    Command,
    Integer,
    ListOf,
    Number,
    Object,
    Option,
    Settings,
    Switch,
    Values,
    options_of,
    show,
)

MODEL = options_of(EngineOptions)["model"].help
"""Help of flags that name a model."""


def add_flags(to: argparse._ActionsContainer, owner: type, command: Command, **defaults: Any) -> None:
    """Add the flags that `command` has of the options of the dataclass `owner` to the parser or group `to`.

    A flag's default is None, which leaves the option's own. `defaults` are options of other defaults for this command.
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
    to.add_argument(
        *names, **{"dest": declared.name, "default": default, "help": shown, **_parsing(declared), **settings}
    )


def given_options(arguments: argparse.Namespace, owner: type, command: Command) -> dict[str, Any]:
    """The options of `owner` whose flags `command` has and that were given, or have a default of the command."""
    names = [name for name, declared in options_of(owner).items() if command in declared.commands]
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def json_list_or_text(text: str) -> Any:
    """The list that `text` is in JSON, else `text` as it is: `null` is an origin of web pages."""
    found = json_or_text(text)
    return found if isinstance(found, list) else text


def _parsing(declared: Option) -> dict[str, Any]:
    """How argparse reads the values of an option."""
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
            return {"nargs": "+"}
        case Settings() | Object():
            return {"action": MergeJSON, "metavar": "JSON"}
        case Checked(several=True):
            return {"action": "append"}
        case Values(noun="JSON"):
            return {"type": json_list_or_text, "metavar": "JSON"}
        case _:
            return {}
