"""Prints docs/cli.md: every command and its flags, from the parser of the command line. See `make generate`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from specrs.cli import COMMANDS, INTERRUPTED, OUTPUT_ERROR, USAGE_ERROR, parser
from specrs.cli.chat.commands import HELP
from specrs.cli.help_text import groups, invocation, plain, usage

HEAD = """# Command line

This page is generated from the parser of the command line: run `make generate` after a change.

`specrs COMMAND --help` has a line for each flag. `--help=all` shows every flag in full, and `--help=WORD` those with
WORD in their name. Flags may have underscores in place of dashes. `--speculative-config.method=suffix` sets one key of
a JSON flag. `specrs completion bash` prints a script with which bash completes commands, flags and values. There is
one for `zsh` and one for `fish`, too.

"""
EXIT_CODES = {
    0: "the command succeeded",
    USAGE_ERROR: "a flag, a file or the input is wrong; one line on stderr says what to do",
    OUTPUT_ERROR: "what it wrote did not fit on the disk, or the server's engine failed",
    INTERRUPTED: "Ctrl-C",
}


def page() -> str:
    """Return the text of the page."""
    return "\n".join(lines()).rstrip("\n") + "\n"


def lines() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD + "| command | what it does |\n| --- | --- |"
    yield from (f"| [`{name}`](#specrs-{name}) | {_cell(summary)} |" for name, summary in COMMANDS.items())
    yield "\n| exit code | meaning |\n| --- | --- |"
    yield from (f"| {code} | {meaning} |" for code, meaning in sorted(EXIT_CODES.items()))
    for command in commands(parser()):
        yield from section(command)


def commands(top: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of each command, a group of commands before its own."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from commands(command)


def section(command: argparse.ArgumentParser) -> Iterator[str]:
    """Return the heading of one command, its description, and a table of its arguments for each group."""
    depth = "#" * len(command.prog.split())
    yield f"\n{depth} `{command.prog}`\n\n{command.description}\n\n```\n{usage(command).removeprefix('usage: ')}\n```"
    if command.prog == "specrs chat":
        yield "\n| in a chat | what it does |\n| --- | --- |"
        yield from (f"| `{_cell(left)}` | {_cell(right)} |" for left, right in HELP.items())
    for title, actions in groups(command):
        rows = [action for action in actions if not isinstance(action, argparse._SubParsersAction)]
        rows = [action for action in rows if action.dest != "help"]
        if rows:
            yield f"\n| {title} | meaning |\n| --- | --- |"
            yield from (f"| `{_cell(invocation(action))}` | {_cell(plain(action))} |" for action in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    print(page(), end="")
