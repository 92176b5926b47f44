"""Flags of `vllm serve` without a counterpart here, from the tables of `specrs.vllm_arguments`. The help does not show
them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from specrs.cli.arguments import json_or_text
from specrs.errors import UnsupportedConfigError
from specrs.vllm_arguments import ENGINE, REJECTED, SERVER, VLLMArgument


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        short = "" if str(option).startswith("--") else f" (--{self.dest})"
        instead = REJECTED[self.dest].instead
        parser.error(f"{option}{short}: not implemented{'' if instead is None else f'; use {instead}'}")


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of the tables in `specrs.vllm_arguments` that `parser` does not have: those with values that are
    accepted, and those that are always rejected."""
    taken = {action.dest for action in parser._actions}
    for name, argument in {**ENGINE, **SERVER}.items():
        if name in taken:
            continue
        flags = _flags(name.replace("_", "-"), argument)
        if any(isinstance(value, bool) for value in argument.accepted):
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
        else:
            parser.add_argument(*flags, type=json_or_text, help=argparse.SUPPRESS)
    known = set(parser._option_string_actions)
    for name, argument in REJECTED.items():
        for flag in (*_flags(name, argument), f"--no-{name}"):
            if flag not in known:
                parser.add_argument(
                    flag, action=_Refuse, nargs="*", default=argparse.SUPPRESS, dest=name, help=argparse.SUPPRESS
                )


def check_server_flags(given: Mapping[str, Any]) -> None:
    """Raise `UnsupportedConfigError` for a flag of vLLM's server at a value that would change something."""
    for name, argument in SERVER.items():
        value = given[name]
        if value is not None and not argument.accepts(value):
            raise UnsupportedConfigError(argument.reason("--" + name.replace("_", "-"), value))


def _flags(name: str, argument: VLLMArgument) -> list[str]:
    return [f"--{name}", *([] if argument.short is None else [argument.short])]
