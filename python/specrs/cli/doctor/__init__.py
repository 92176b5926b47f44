"""`specrs doctor`: the machine, what it can serve, and what is missing, as text or JSON. Starts no engine."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

DESCRIPTION = (
    "Show what this machine has, and which models and number formats specrs serves on it. For what is missing, "
    "show the command that adds it. Loads no model, makes no network request, and does not import torch."
)
_COLUMN = 23
_COMMAND_COLUMN = 34


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specrs doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> None:
    """Print facts of the machine, and what it can serve."""
    found = findings()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    width = min(shutil.get_terminal_size().columns, 120)
    sys.stdout.write("\n".join(lines(found, width)) + "\n")


def findings() -> dict[str, Any]:
    """Return the facts that the command shows: `versions`, `machine`, `serves` and `missing`."""
    from specrs.cli.doctor.machine import machine, versions
    from specrs.cli.doctor.served import absent, serves

    has = machine()
    return {"versions": versions(), "machine": has, "serves": serves(has), "missing": absent(has)}


def lines(found: Mapping[str, Any], width: int) -> Iterator[str]:
    """Return a report as text: a heading for each part, and a line for each fact, wrapped at `width` characters."""
    for part in ("versions", "machine", "serves"):
        yield part.capitalize()
        for name, value in found[part].items():
            yield from _row(f"{name.replace('_', ' '):<{_COLUMN}}", _words(value), width)
        yield ""
    yield "Missing" if found["missing"] else "Nothing is missing"
    for item in found["missing"]:
        yield from _row(f"{item['command']:<{_COMMAND_COLUMN}}", item["for"], width)


def _row(name: str, value: str, width: int) -> list[str]:
    left = f"  {name} "
    return textwrap.wrap(
        value,
        width,
        initial_indent=left,
        subsequent_indent=" " * len(left),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _words(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(_words, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_words(one)}" for name, one in value.items())
    return "not installed" if value is None else str(value)
