"""The `specrs` command: finds the subcommand and turns errors into one line. Each subcommand has a module."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Collection, Sequence
from importlib import import_module

from specrs.cli.arguments import Parser, spell
from specrs.cli.config_file import with_config_file
from specrs.cli.help_text import short
from specrs.errors import SpecrsError

USAGE_ERROR, OUTPUT_ERROR, INTERRUPTED = 2, 1, 130

_NOT_WRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""Error numbers of writes that fail for a reason outside of the program, such as a full disk."""


COMMANDS = {
    "chat": "chat with a model in the terminal",
    "generate": "continue one prompt",
    "serve": "serve a model over HTTP",
    "bench": "measure servers and engines, sweep over K and load",
    "advise": "find the drafter and K for a model, this machine and your traffic",
    "forecast": "forecast the speed-up of every K",
    "tune": "time kernel configurations for models on this GPU",
    "convert-head": "convert a pickled EAGLE-3 head to safetensors",
    "demo": "the bundled pair: plain decoding against K drafts",
    "doctor": "what this machine can serve, what is missing, and how to add it",
    "completion": "completion of this command line, for a shell",
}
"""Subcommands and their purpose, in the order of the help. Each is a module here, with `_` instead of `-`."""


def parser(commands: Collection[str] = COMMANDS.keys()) -> Parser:
    """Return the parser of all subcommands. Only `commands` get their arguments.

    The modules of the others are not imported, which saves most of the time. A subcommand's `run` takes the parsed
    arguments and returns nothing.
    """
    top = Parser(prog="specrs", description="Speculative decoding: a small model guesses ahead for a large one.")
    top.add_argument("--version", action="store_true", help="print the version and exit")
    group = top.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    for name, summary in COMMANDS.items():
        command = group.add_parser(name, help=summary)
        if name in commands:
            module = import_module(f"specrs.cli.{name.replace('-', '_')}")
            command.description = module.DESCRIPTION
            module.add_arguments(command)
            command.set_defaults(run=module.run, parser=command)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. 0: success. 2: the user can fix the problem. 1: the output could not be
    written, for example because the disk is full. 130: ended by Ctrl-C. For 1 and 2, one line on stderr gives the
    reason."""
    given = spell(sys.argv[1:] if argv is None else argv)
    top = parser([name for name in given[:1] if name in COMMANDS])
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
        sys.stderr.write(short(top, shutil.get_terminal_size().columns))
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
    """Discard buffered output that cannot be written. Otherwise Python would try again at exit and print a second
    error."""
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(sink, stream.fileno())
