"""Flags of declared options (`specrs.options`). Parses values; the dataclass of the options checks them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from specrs.cli.arguments import Merged, MergeJSON, MergeKey, MergeSettings, human_int, json_or_text
from specrs.engine_options import EngineOptions
from specrs.errors import invalid_config
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
from specrs.speculative_config import SpeculativeConfig

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


def add_speculation_flags(to: argparse._ActionsContainer, command: Command, *, own_k: bool = False) -> None:
    """Add `--spec-method`, `--spec-model` and `--spec-tokens`, each of which sets one key of `--speculative-config`.

    With `own_k`, `command` has `K_FLAGS` for a list of numbers of drafts instead of `--spec-tokens` for one.
    """
    for name, declared in options_of(SpeculativeConfig).items():
        if command in declared.commands and not (own_k and name == _K):
            shown = f"{declared.help_text()}; the same as --speculative-config.{name}"
            add_flag(to, declared, dest="speculative_config", action=MergeKey, const=name, metavar="VALUE", help=shown)


_K = "num_speculative_tokens"
"""Key of `--speculative-config` that commands with `--k` do not take."""
K_FLAGS = ("--k", options_of(SpeculativeConfig)[_K].flag)
"""Names of the flag of commands that compare several numbers of drafts."""


def drafter_without_k(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the speculative configuration of a command with `--k`; empty if no flag gives one.

    Raises `InvalidConfigError` if it has a number of drafts.
    """
    drafter: dict[str, Any] = arguments.speculative_config or {}
    if _K in drafter:
        raise invalid_config(f"--speculative-config.{_K}", drafter[_K], "must come from --k; leave it out")
    return drafter


def drafting_flag(drafter: Mapping[str, Any], key: str | None = None) -> tuple[str, Any]:
    """Return the flag that gave `key` of the speculative configuration `drafter`, and its value. None: any key."""
    given_by = drafter.given_by if isinstance(drafter, Merged) else {}
    key = next(iter(given_by), None) if key is None else key
    if key in given_by:
        return given_by[key], drafter[key]
    return "--speculative-config", drafter


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
        case Settings():
            return {"action": MergeSettings, "metavar": "JSON"}
        case Object():
            return {"action": MergeJSON, "metavar": "JSON"}
        case Checked(several=True):
            return {"action": "append", "metavar": "TEXT"}
        case Values(noun="JSON"):
            return {"type": json_list_or_text, "metavar": "JSON"}
        case _:
            return {}
