"""Settings that are declared once. `option` makes a dataclass field that knows its allowed values, default and help.

The check, the command line flag, the row in docs/configuration.md and the range in the server's OpenAPI document are
derived from the declaration. Rules between two options are code of the dataclass that has them.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

from specrs.errors import (
    SpecrsError,
    UnsupportedConfigError,
    check_bool,
    check_choice,
    check_int,
    check_number,
    check_text,
    invalid,
)

Command = Literal["serve", "chat", "generate", "bench", "bench serve", "advise", "demo", "forecast", "tune"]
"""Commands with derived flags. `bench` stands for the kinds that run an engine in their own process."""
SPECULATING: tuple[Command, ...] = ("serve", "chat", "generate", "bench", "demo", "forecast")
"""Commands that have `--speculative-config`, and flags for some of its keys."""


class Values:
    """Allowed values of an option. Base of all kinds of values."""

    noun = "JSON"
    """Name of the type in a table that has no column for it."""

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> Any:
        """Return `value` in its stored form. Raises `error`, whose message ends with `also`, if it is not allowed."""
        raise NotImplementedError

    def allowed(self) -> str:
        """Return the allowed values in words, as in `1 to 16` or `one of a, b`. Empty if the type says it all."""
        return ""


@dataclass(frozen=True)
class Integer(Values):
    """Integers from `low` to `high`; without an upper bound if `high` is None.

    `word`: a string that is also allowed. `units`: flags also accept `4k` and `4K`. `power_of_two`: only powers of two
    are allowed.
    """

    low: int
    high: int | None = None
    word: str | None = None
    units: bool = False
    power_of_two: bool = False
    noun = "integer"

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> Any:
        """Return `value` as an int, or the allowed word. Raises `error` for any other value."""
        if self.word is not None:
            if isinstance(value, str) and value == self.word:
                return value
            also = f", or {self.word!r}{also}"
        number = check_int(error, field, value, self.low, self.high, also=also)
        if self.power_of_two and number & (number - 1):
            bounds = f"of at least {self.low}" if self.high is None else f"from {self.low} to {self.high}"
            raise invalid(error, field, value, f"must be a power of two {bounds}{also}")
        return number

    def allowed(self) -> str:
        """Return the allowed range in words."""
        bounds = f"at least {self.low}" if self.high is None else f"{_power(self.low)} to {_power(self.high)}"
        words = "" if self.word is None else f", or {self.word}"
        return f"{'a power of two, ' if self.power_of_two else ''}{bounds}{words}"


@dataclass(frozen=True)
class Number(Values):
    """Finite numbers from `low` to `high`. With `open_low`, `low` itself is not allowed."""

    low: float
    high: float = math.inf
    open_low: bool = False
    noun = "number"

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> float:
        """Return `value` as a float. Raises `error` if it is not allowed."""
        return check_number(error, field, value, self.low, self.high, open_low=self.open_low, also=also)

    def allowed(self) -> str:
        """Return the allowed range in words."""
        low, high = f"{self.low:.7g}", f"{self.high:.7g}"
        if math.isinf(self.high):
            return f"above {low}" if self.open_low else f"at least {low}"
        return f"above {low}, at most {high}" if self.open_low else f"{low} to {high}"


@dataclass(frozen=True)
class Switch(Values):
    """True or False."""

    noun = "on or off"

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> bool:
        """Return `value` if it is a bool. Raises `error` for any other value."""
        return check_bool(error, field, value)


@dataclass(frozen=True)
class Text(Values):
    """A string, which must not be empty unless `empty` is set. `what` says in error messages what the string names, as
    in `a hub id`."""

    what: str = ""
    empty: bool = False
    noun = "text"

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> str:
        """Return `value` if it is an allowed string. A path becomes a string. Raises `error` for any other value."""
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if self.empty:
            if not isinstance(value, str):
                raise invalid(error, field, value, f"must be a string{also}")
            return value
        return check_text(error, field, value, also=f"{': ' if self.what else ''}{self.what}{also}")


@dataclass(frozen=True)
class Choice(Values):
    """A name from a fixed set. `aliases` maps other spellings to the stored name; an alias outside of `names` is not
    listed.

    With `unsupported`, other values exist elsewhere and raise `UnsupportedConfigError`.
    """

    names: tuple[str, ...]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unsupported: bool = False
    noun = "text"

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> str:
        """Return the stored name of `value`. Raises `error` if it is not allowed."""
        if isinstance(value, str) and value in self.aliases:
            return self.aliases[value]
        if self.unsupported and not (isinstance(value, str) and value in self.names):
            names = ", ".join(map(repr, self.names if not also else (None, *self.names)))
            raise invalid(UnsupportedConfigError, field, value, f"not implemented; allowed: {names}")
        return check_choice(error, field, value, self.names, also=also)

    def allowed(self) -> str:
        """Return the allowed names in words."""
        return one_of(self.names)


@dataclass(frozen=True)
class ListOf(Values):
    """A list of at least one value, stored as a tuple. `what` is the plural noun for its items, as in `batch sizes`."""

    each: Values
    what: str
    noun = "list"

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> tuple[Any, ...]:
        """Return `value` as a tuple of checked items. Raises `error` if an item is not allowed."""
        if not isinstance(value, list | tuple) or not value:
            raise invalid(error, field, value, f"must be a list of {self.what}{also}")
        return tuple(self.each.check(error, f"{field}[{i}]", item) for i, item in enumerate(value))

    def allowed(self) -> str:
        """Return the range of the items in words."""
        return f"each {self.each.allowed()}" if self.each.allowed() else ""


@dataclass(frozen=True)
class Settings(Values):
    """A dataclass of options (`made`), given as an object or as the dictionary that its `from_mapping` reads."""

    made: Any

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> Any:
        """Return `value` as an object of the dataclass. Raises `error` for any other value."""
        if isinstance(value, self.made):
            return value
        if isinstance(value, Mapping):
            return self.made.from_mapping(value)
        raise invalid(error, field, value, f"must be a dictionary, a {self.made.__name__}{also}")


@dataclass(frozen=True)
class Object(Values):
    """A JSON dictionary. `example` is shown in error messages."""

    example: str

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> Mapping[str, Any]:
        """Return `value` if it is a dictionary. Raises `error` for any other value."""
        if not isinstance(value, Mapping):
            raise invalid(error, field, value, f"must be a dictionary, such as {self.example}{also}")
        return value


@dataclass(frozen=True)
class Checked(Values):
    """Values with a check of their own. `read` returns the stored form of a value, None included, or raises."""

    read: Callable[[Any], Any]
    words: str
    several: bool = False
    """True if the flag may be given more than once."""

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> Any:
        """Return the result of `read(value)`."""
        return self.read(value)

    def allowed(self) -> str:
        """Return the allowed values in words."""
        return self.words


@dataclass(frozen=True, kw_only=True)
class Option:
    """A declared setting: its allowed values and default, and the texts for its help and its row in
    docs/configuration.md.

    `option` and `OptionTexts` describe the fields.
    """

    name: str = ""
    values: Values
    default: Any
    default_is: str = ""
    help: str
    note: str = ""
    details: str = ""
    none: bool = False
    flag_name: str | None = None
    short: str | None = None
    commands: tuple[Command, ...] = ()
    device: str | None = None

    @property
    def flag(self) -> str:
        """Command line flag of the option, as in `--max-model-len`."""
        return f"--{self.flag_name or self.name.replace('_', '-')}"

    def check(self, error: type[SpecrsError], field: str, value: Any) -> Any:
        """Return `value` in its stored form. Raises `error`, which names `field`, the value and what is allowed."""
        also = ", or None" if self.none else ""
        if value is None and self.none and not isinstance(self.values, Checked):
            return None
        return self.values.check(error, field, value, also)

    @property
    def default_text(self) -> str:
        """Return the default in words."""
        shown = "" if self.default in (None, "") else show(self.default, self.values)
        return ", ".join(part for part in (shown, self.default_is) if part)

    def help_text(self, stated: str | None = None) -> str:
        """Compose the help of the flag: what it sets, the allowed values, and the default.

        `stated`: the default in words, if the command has another one.
        """
        allowed, stated = self.values.allowed(), self.default_text if stated is None else stated
        joint = ": " if allowed.startswith("one of ") else ", "
        parts = [f"{self.help}{joint}{allowed}" if allowed else self.help, self.note]
        return "; ".join([part for part in parts if part] + ([f"default: {stated}"] if stated else []))


class OptionTexts(TypedDict, total=False):
    """Optional arguments of `option`, besides default and values."""

    note: str
    """Further advice for choosing a value."""
    default_is: str
    """Meaning of the default, such as what None stands for."""
    details: str
    """Sentences for docs/configuration.md."""
    flag_name: str
    """Name of the flag without its dashes, if it differs from the field's name."""
    short: str
    """vLLM's short form of the flag."""
    commands: tuple[Command, ...]
    """Commands that have the flag."""
    device: str
    """Kind of device that has the option. Not set: all devices have it."""


def option(default: Any, values: Values, help: str, *, none: bool = False, **texts: Unpack[OptionTexts]) -> Any:
    """Make a dataclass field that is an option.

    `help`: what it sets, as a noun phrase without default and allowed values, which are added. `none`: None is allowed,
    too, as it is if it is the default.
    """
    declared = Option(values=values, default=default, help=help, none=none or default is None, **texts)
    return dataclasses.field(default=default, metadata={"option": declared})


_FOUND: dict[type, Mapping[str, Option]] = {}
"""Cache of `options_of`, which is called for every request. mypy does not allow a dataclass as an argument of
`functools.cache`."""


def options_of(owner: type) -> Mapping[str, Option]:
    """Return the options of the dataclass `owner` by name, in the order of its fields."""
    if owner not in _FOUND:
        _FOUND[owner] = {
            field.name: dataclasses.replace(field.metadata["option"], name=field.name)
            for field in dataclasses.fields(owner)
            if "option" in field.metadata
        }
    return _FOUND[owner]


def check_options(settings: Any, error: type[SpecrsError], where: str = "", *, by_flag: bool = False) -> None:
    """Check each option of a frozen dataclass, and store it in its stored form. Meant for `__post_init__`.

    `where` goes before the names in messages, as in `speculative_config.`. With `by_flag`, messages name flags. Raises
    `error` for the first wrong value.
    """
    for name, declared in options_of(type(settings)).items():
        field = declared.flag if by_flag else where + name
        object.__setattr__(settings, name, declared.check(error, field, getattr(settings, name)))


def one_of(values: Any) -> str:
    """Return the allowed `values` in words, for a help text."""
    return f"one of {', '.join(map(str, values))}"


def show(value: Any, values: Values) -> str:
    """Return a value as it is written in a flag, as in `on`, `16M` or `1,2`."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(values, Integer) and values.units and isinstance(value, int):
        return next(
            (f"{value >> bits}{unit}" for bits, unit in _UNITS if value >= 1 << 14 and value % (1 << bits) == 0),
            str(value),
        )
    if isinstance(value, list | tuple):
        return ",".join(show(item, values) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


_UNITS = ((30, "G"), (20, "M"), (10, "K"))


def _power(bound: int) -> str:
    """Return a bound as text; a large power of two as a power."""
    for less in (0, 1):
        size = abs(bound) + less
        if size >= 1 << 20 and size & (size - 1) == 0:
            return f"{'-' if bound < 0 else ''}2^{size.bit_length() - 1}{' - 1' if less else ''}"
    return str(bound)
