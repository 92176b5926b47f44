"""The `specrs` command: finds the subcommand and turns errors into one line. What a subcommand does is its module's."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from specrs.cli.arguments import Parser, spell
from specrs.cli.config_file import with_config_file
from specrs.errors import SpecrsError

USAGE_ERROR, OUTPUT_ERROR, INTERRUPTED = 2, 1, 130

_NOT_WRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""What a write fails with where nothing is wrong with the program."""


COMMANDS = ("generate", "serve", "bench", "forecast", "tune", "convert-head", "demo")
"""The subcommands, in the order of the help. Each is a module here, with `_` in place of `-`."""


def parser(*commands: str) -> Parser:
    """Return the parser of these subcommands, or of all of them without arguments.

    One subcommand's parser takes a fraction of the time, because the modules of the others are not imported. A
    subcommand's `run` takes the parsed arguments and returns nothing.
    """
    top = Parser(prog="specrs", description="Speculative decoding: a small model guesses ahead for a large one.")
    top.add_argument("--version", action="store_true", help="print the version and exit")
    group = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name in commands or COMMANDS:
        module = import_module(f"specrs.cli.{name.replace('-', '_')}")
        command = group.add_parser(name, help=module.SUMMARY, description=module.DESCRIPTION)
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0; after one line on stderr 2 for what a user can put right, 1 where
    what it wrote did not fit on the disk, or could not be written otherwise."""
    given = spell(sys.argv[1:] if argv is None else argv)
    top = parser(*(name for name in given[:1] if name in COMMANDS))
    if given[:1] == ["serve"]:
        try:
            given = with_config_file(given)
        except SpecrsError as error:
            print(f"specrs serve: error: {' '.join(str(error).split())}", file=sys.stderr)
            return USAGE_ERROR
    arguments, unknown = top.parse_known_args(given)
    if unknown:
        getattr(arguments, "parser", top).refuse(unknown)
    if arguments.version:
        from importlib.metadata import version

        print(f"specrs {version('specrs')}")
        return 0
    if arguments.command is None:
        top.print_help(sys.stderr)
        return USAGE_ERROR
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except SpecrsError as error:
        print(f"{arguments.parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # the reader left (`| head`)
        return 0
    except OSError as error:
        if error.errno not in _NOT_WRITTEN:
            raise
        where = "" if error.filename is None else f" of {error.filename}"
        with contextlib.suppress(OSError):  # standard error may be on the same disk
            print(f"{arguments.parser.prog}: error: output{where}: {error.strerror}", file=sys.stderr)
        _drop_output()
        return OUTPUT_ERROR
    return 0


def _drop_output() -> None:
    """What is left to write goes nowhere: Python flushes at exit, and would complain again."""
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(sink, stream.fileno())
