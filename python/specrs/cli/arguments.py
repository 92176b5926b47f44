"""Parses command line arguments in vLLM's syntax with argparse. Checks syntax; values are checked where they are
used."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, Never

from specrs.cli.help_text import HELP, HelpAction
from specrs.errors import near_names, short


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, exit code 2. Options are never guessed from a prefix."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, **settings)
        self.add_argument("-h", "--help", action=HelpAction, nargs="?", metavar="all|WORD", help=HELP)

    def error(self, message: str) -> Never:
        """Print `message` and a hint to the help, and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def refuse(self, unknown: Sequence[str]) -> Never:
        """Print the `unknown` arguments with similar options, and exit with code 2.

        Only options that --help shows are suggested. Hidden ones are rejected or have no effect.
        """
        flags = [text.partition("=")[0] for text in unknown if text.startswith("-")]
        hints = list(dict.fromkeys(match for flag in flags for match in self._meant(flag)))
        hint = f"; did you mean {' and '.join(hints)}?" if hints else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")

    def _meant(self, flag: str) -> list[str]:
        """Return the flag that other commands or vLLM call `flag`, or else one with a similar name; empty without."""
        from specrs.vllm_arguments import REJECTED

        row = REJECTED.get(flag.removeprefix("--"))
        other = _K_ELSEWHERE.get(flag) or (row.instead if row is not None else None) or ""
        shown = self._shown_options()
        return [other] if re.split("[. ]", other)[0] in shown else near_names(flag, shown, 1)

    def _shown_options(self) -> list[str]:
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        return [option for action in shown for option in action.option_strings]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise `ArgumentError` if a value or command is not one of `action.choices`. The error suggests the nearest
        choice."""
        if action.choices is None or value in action.choices:
            return
        names = list(map(str, action.choices))
        close = near_names(str(value), names, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint} (choose from {', '.join(names)})")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and let an on-off option carry its value: `--enforce-eager true`,
        `--enforce-eager=False`.

        `--help` takes a value only after `=`.
        """
        return super().parse_known_args(self._read_switches(sys.argv[1:] if args is None else args), namespace)

    def _read_switches(self, argv: Sequence[str]) -> list[str]:
        read: list[str] = []
        rest = list(argv)
        while rest:
            argument = rest.pop(0)
            if argument == "--":
                return [*read, argument, *rest]
            option, equals, value = argument.partition("=")
            action = self._option_string_actions.get(option)
            if isinstance(action, HelpAction) and not equals:
                argument = "--help="  # so that it takes no argument that follows
            elif isinstance(action, argparse.BooleanOptionalAction):
                if not equals and rest and rest[0].lower() in _SWITCH:
                    equals, value = "=", rest.pop(0)
                if equals:
                    if value.lower() not in _SWITCH:
                        self.error(f"argument {option}: {value!r} is not true or false")
                    on = _SWITCH[value.lower()] != option.startswith("--no-")
                    argument = next(name for name in action.option_strings if name.startswith("--no-") != on)
            read.append(argument)
        return read


_K_ELSEWHERE = {"--k": "--spec-tokens"}
"""Flag for lists of K, with the flag of commands that have one K."""
_SWITCH = {"true": True, "false": False}


class Merged(dict[str, Any]):
    """Keys that several flags with one `dest` gave. `given_by` has the flag that gave each, as in `--spec-method`."""

    given_by: dict[str, str]

    def __init__(self, values: dict[str, Any], given_by: dict[str, str]) -> None:
        super().__init__(values)
        self.given_by = given_by


class MergeJSON(argparse.Action):
    """Action for a JSON object. If the flag is given again, its keys are merged, and later values win."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            given = json.loads(values)
        except json.JSONDecodeError as error:
            raise argparse.ArgumentError(self, f"{values!r} is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise argparse.ArgumentError(self, f"{values!r} is not a JSON object, such as '{{\"key\": 1}}'")
        self._merge(parser, namespace, given)

    def _merge(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, given: dict[str, Any]) -> None:
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), **given})


class MergeSettings(MergeJSON):
    """`MergeJSON` for settings, whose keys may have dashes for underscores, and of which `MergeKey` flags give single
    keys. Ends the program if such a flag gave a key another value."""

    def _merge(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, given: dict[str, Any]) -> None:
        plain = {key.replace("-", "_"): value for key, value in given.items()}
        flags = {key: f"{self.option_strings[0]}.{key}" for key in plain}
        _merge_keys(parser, namespace, self.dest, plain, flags)


class MergeKey(argparse.Action):
    """Action for one key, `const`, of a `MergeSettings` with the same `dest`. If the flag is given again, the later
    value wins. Ends the program if the other flag gave the key another value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        _merge_keys(parser, namespace, self.dest, {self.const: values}, {self.const: self.option_strings[0]})


def _merge_keys(
    parser: argparse.ArgumentParser,
    namespace: argparse.Namespace,
    dest: str,
    given: dict[str, Any],
    flags: dict[str, str],
) -> None:
    """Add the keys of `given` to the `Merged` of `namespace`. `flags` has the flag of each. Ends the program if another
    flag gave a key another value."""
    merged = getattr(namespace, dest) or Merged({}, {})
    for key, value in given.items():
        flag, other = flags[key], merged.given_by.get(key, flags[key])
        if other != flag and merged[key] != value:
            parser.error(f"{flag}={short(value)}: contradicts {other}={short(merged[key])}; leave one of them out")
    setattr(namespace, dest, Merged({**merged, **given}, {**merged.given_by, **flags}))


class EndOfFile(argparse.Action):
    """Action between the flags of a file and those of the command line, which replace keys that any flag of the file
    gave."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        for merged in vars(namespace).values():
            if isinstance(merged, Merged):
                merged.given_by.clear()


def spell(argv: Sequence[str]) -> list[str]:
    """Convert spellings that vLLM accepts to those that argparse accepts. Text after `--` is left as it is.

    `--max_tokens` becomes `--max-tokens`. `--speculative-config.model=x`, or with a space for `=`, becomes
    `--speculative-config={"model": "x"}`, and so does `-sc.model=x` with a short form. The value is read as JSON if
    possible, else it is a string.
    """
    spelled: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*spelled, argument, *rest]
        if argument.startswith("--") or _DOTTED.match(argument):
            option, equals, value = argument.partition("=")
            option, dot, key = option.partition(".")
            option = option.replace("_", "-")
            if dot:
                if not equals:
                    value = rest.pop(0) if rest else ""
                argument = f"{option}={json.dumps({key.replace('-', '_'): json_or_text(value)})}"
            else:
                argument = f"{option}{equals}{value}"
        spelled.append(argument)
    return spelled


_DOTTED = re.compile(r"-[A-Za-z]+\.")
"""Pattern of a short form with a key after it, such as `-sc.model`. `-.5` does not match."""


def json_or_text(text: str) -> Any:
    """Return `text` parsed as JSON, or `text` itself if it is no JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def human_int(text: str) -> int:
    """Parse an integer with an optional unit, as vLLM does: `2k` is 2000, `2K` is 2048; m, g, M and G work in the same
    way."""
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    try:
        return round(float(text[:-1]) * units[text[-1]]) if text[-1:] in units else int(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 4096 or 4K") from None


def drafts_list(text: str) -> list[int]:
    """Parse `1,3,5` as numbers of draft tokens. Each must be from 1 to 16 and occur once; the order is kept."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or len(set(numbers)) < len(numbers) or not all(1 <= number <= 16 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different numbers from 1 to 16, such as 1,3,5")
    return numbers


def sizes(text: str) -> list[int]:
    """Parse `1,4,16` as numbers of at least 1. Numbers that do not ascend are an error."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or numbers != sorted(set(numbers)) or numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ascending numbers of at least 1, such as 1,4,16")
    return numbers


def floats(text: str) -> list[float]:
    """Parse `1.8,2.4` as a list of numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, such as 1.8,2.4") from None


def pairs(text: str) -> dict[int, float]:
    """Parse `1=1.8,4=3.28` as numbers by K."""
    try:
        found = [(int(k), float(value)) for k, _, value in (part.partition("=") for part in text.split(","))]
    except ValueError:
        found = []
    if not found or len(dict(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers by K, such as 1=1.8,4=3.28")
    return dict(found)
