"""`--help` of a command. Plain, it shows a line per flag, in groups; `--help=all` shows every flag in full,
`--help=WORD` the flags whose names contain the word.

The texts are those of argparse's actions, which the options declare (`specrs.options`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specrs.errors import did_you_mean

HELP = "this help; all: every flag in full; WORD: the flags with WORD in their name, in full"
_COLUMN = 34
"""Maximum width of the column of flags. A longer flag moves its text to the right."""
_MOST_CHOICES = 16
"""Maximum letters of values that stand next to their flag. The help of a flag with more has the values in its text."""
_TITLES = {"positional arguments": "arguments"}


class HelpAction(argparse.Action):
    """Action that prints the help and exits. Its value is empty, `all`, or a part of the flags' names."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        width = shutil.get_terminal_size().columns
        if not values:
            text = short(parser, width)
        elif values == "all":
            text = full(parser)
        else:
            word = values.lstrip("-").replace("_", "-")
            text = full(parser, word)
            if not text:
                flags = [flag for action in _shown(parser._actions) for flag in action.option_strings]
                parser.error(f"--help={values}: no flag has this in its name{did_you_mean(values, flags)}")
        parser._print_message(text, sys.stdout)
        parser.exit()


def short(parser: argparse.ArgumentParser, width: int) -> str:
    """Return the short help: usage, description and a line of at most `width` characters for each flag."""
    lines = [usage(parser), "", *_wrapped(parser.description or "", width)]
    for title, actions in groups(parser):
        rows = [row for action in actions for row in _rows(action)]
        column = min(_COLUMN, max(len(left) for left, _ in rows))
        lines += ["", f"{title}:", *(_cut(f"  {left:<{column}}  {text}", width) for left, text in rows)]
    flags = [action for _, actions in groups(parser) for action in actions if action.option_strings]
    if len(flags) > 2:
        lines += [
            "",
            *_wrapped("--help=all: every flag in full; --help=WORD: the flags with WORD in their name.", width),
        ]
    return "\n".join(lines) + "\n"


def full(parser: argparse.ArgumentParser, word: str = "") -> str:
    """Return the whole text of each flag that has `word` in its name; empty if none has it."""
    formatter = parser._get_formatter()
    if not word:
        formatter.add_text(usage(parser))
        formatter.add_text(parser.description)
    for title, actions in groups(parser):
        named = [action for action in actions if not word or any(word in flag for flag in action.option_strings)]
        if named:
            formatter.start_section(title)
            formatter.add_arguments(named)
            formatter.end_section()
    return formatter.format_help()


def invocation(action: argparse.Action) -> str:
    """Return how an argument is written, as in `-q, --quantization NAME`."""
    flags = action.option_strings
    if not flags:
        return str(action.metavar or action.dest)
    if isinstance(action, argparse.BooleanOptionalAction):
        return ", ".join(f"--[no-]{flag.removeprefix('--')}" for flag in flags if not flag.startswith("--no-"))
    if action.nargs == 0:
        return ", ".join(flags)
    value = action.metavar or (_choices(action.choices) if action.choices is not None else "VALUE")
    value = f"[={value}]" if isinstance(action, HelpAction) else f" {value}{' ...' if action.nargs == '+' else ''}"
    return ", ".join(sorted(flags, key=len)) + value


def _choices(names: Iterable[Any]) -> str:
    """Return the values of an argument, as in `few|many`; `NAME` if there are too many for the column of flags."""
    text = "|".join(map(str, names))
    return text if len(text) <= _MOST_CHOICES else "NAME"


def brief(action: argparse.Action) -> str:
    """Return the noun phrase that describes an argument, without default, values and notes."""
    return str(getattr(action, "brief", plain(action).partition("; ")[0]))


def plain(action: argparse.Action) -> str:
    """Return the help of an argument without argparse's escapes."""
    return (action.help or "").replace("%%", "%")


def usage(parser: argparse.ArgumentParser) -> str:
    """Return the line that shows how a command is written."""
    words = []
    for action in _shown(parser._actions):
        if not action.option_strings:
            name = str(action.metavar or action.dest)
            words.append({"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(action.nargs), name))
    commands = any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)
    return " ".join(["usage:", parser.prog, *words, "..." if commands else "[FLAGS]"])


def groups(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Yield the title of each group, with its arguments that are not hidden."""
    for group in parser._action_groups:
        actions = list(_shown(group._group_actions))
        if actions:
            yield _TITLES.get(group.title or "", group.title or ""), actions


def _shown(actions: Sequence[argparse.Action]) -> Iterator[argparse.Action]:
    return (action for action in actions if action.help != argparse.SUPPRESS)


def _rows(action: argparse.Action) -> list[tuple[str, str]]:
    """Return pairs of an invocation and its description, for a flag or for each command."""
    if isinstance(action, argparse._SubParsersAction):
        return [(choice.dest, choice.help or "") for choice in action._choices_actions]
    return [(invocation(action), brief(action))]


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, min(width, 100))


def _cut(line: str, width: int) -> str:
    """Return `line`, shortened to `width` at the end of a word, followed by `...`, if it is too long."""
    if len(line) <= width:
        return line
    return line[: width - 3].rpartition(" ")[0] + "..."
