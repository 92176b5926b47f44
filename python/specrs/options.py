"""Settings that are declared once: `option` makes a dataclass field that knows its values, default and help.

The check, the command line's flag, the row in docs/configuration.md and the range in the server's OpenAPI document are
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

Command = Literal["serve", "generate", "bench", "bench serve", "demo", "forecast", "tune"]
"""Commands with derived flags. `bench` stands for the kinds that run an engine in their own process."""


class Values:
    """The values that an option may have."""

    noun = "JSON"
    """The type, for a table whose other columns do not say it."""

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> Any:
        """Return `value` in its stored form, or raise `error`, whose message ends with `also`."""
        raise NotImplementedError

    def allowed(self) -> str:
        """Name the allowed values, as in `1 to 16` or `one of a, b`. Empty if the type says it all."""
        return ""


@dataclass(frozen=True)
class Integer(Values):
    """Integers from `low` to `high`, without an upper bound if that is None.

    `word`: a string that is allowed, too. `units`: a flag also reads `4k` and `4K`. `power_of_two`: no others.
    """

    low: int
    high: int | None = None
    word: str | None = None
    units: bool = False
    power_of_two: bool = False
    noun = "integer"

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> Any:
        """Return an int, or the word."""
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
        """Name the range."""
        bounds = f"at least {self.low}" if self.high is None else f"{_power(self.low)} to {_power(self.high)}"
        words = "" if self.word is None else f", or {self.word}"
        return f"{'a power of two, ' if self.power_of_two else ''}{bounds}{words}"


@dataclass(frozen=True)
class Number(Values):
    """Finite numbers from `low` to `high`; with `open_low`, `low` is not one of them."""

    low: float
    high: float = math.inf
    open_low: bool = False
    noun = "number"

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> float:
        """Return a float."""
        return check_number(error, field, value, self.low, self.high, open_low=self.open_low, also=also)

    def allowed(self) -> str:
        """Name the range."""
        low, high = f"{self.low:.7g}", f"{self.high:.7g}"
        if math.isinf(self.high):
            return f"above {low}" if self.open_low else f"at least {low}"
        return f"above {low}, at most {high}" if self.open_low else f"{low} to {high}"


@dataclass(frozen=True)
class Switch(Values):
    """True or False."""

    noun = "on or off"

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> bool:
        """Return a bool."""
        return check_bool(error, field, value)


@dataclass(frozen=True)
class Text(Values):
    """A string, which is not empty unless `empty`. Error messages say what it names: `what`, as in `a hub id`."""

    what: str = ""
    empty: bool = False
    noun = "text"

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> str:
        """Return the string. A path is read as the string that it has."""
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if self.empty:
            if not isinstance(value, str):
                raise invalid(error, field, value, f"must be a string{also}")
            return value
        return check_text(error, field, value, also=f"{': ' if self.what else ''}{self.what}{also}")


@dataclass(frozen=True)
class Choice(Values):
    """One of some names. `aliases` maps spellings to what is stored for them; those not in `names` are not listed.

    `unsupported`: other values exist elsewhere, so they raise `UnsupportedConfigError`.
    """

    names: tuple[str, ...]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unsupported: bool = False
    noun = "text"

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> str:
        """Return the name that is stored for `value`."""
        if isinstance(value, str) and value in self.aliases:
            return self.aliases[value]
        if self.unsupported and not (isinstance(value, str) and value in self.names):
            names = ", ".join(map(repr, self.names if not also else (None, *self.names)))
            raise invalid(UnsupportedConfigError, field, value, f"not implemented; allowed: {names}")
        return check_choice(error, field, value, self.names, also=also)

    def allowed(self) -> str:
        """List the names."""
        return one_of(self.names)


@dataclass(frozen=True)
class ListOf(Values):
    """A list of at least one value, stored as a tuple. `what` names them in the plural, as in `batch sizes`."""

    each: Values
    what: str
    noun = "list"

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> tuple[Any, ...]:
        """Return a tuple of checked values."""
        if not isinstance(value, list | tuple) or not value:
            raise invalid(error, field, value, f"must be a list of {self.what}{also}")
        return tuple(self.each.check(error, f"{field}[{i}]", item) for i, item in enumerate(value))

    def allowed(self) -> str:
        """Name the range of each value."""
        return f"each {self.each.allowed()}" if self.each.allowed() else ""


@dataclass(frozen=True)
class Settings(Values):
    """A dataclass `made` of options, or the dictionary that its `from_mapping` reads."""

    made: Any

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> Any:
        """Return an object of the dataclass."""
        if isinstance(value, self.made):
            return value
        if isinstance(value, Mapping):
            return self.made.from_mapping(value)
        raise invalid(error, field, value, f"must be a dictionary, a {self.made.__name__}{also}")


@dataclass(frozen=True)
class Object(Values):
    """A dictionary of JSON. `example` is one, for messages."""

    example: str

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> Mapping[str, Any]:
        """Return the dictionary."""
        if not isinstance(value, Mapping):
            raise invalid(error, field, value, f"must be a dictionary, such as {self.example}{also}")
        return value


@dataclass(frozen=True)
class Checked(Values):
    """Whatever `read` takes. It returns the stored form of a value, None included, or raises."""

    read: Callable[[Any], Any]
    words: str
    several: bool = False
    """True if a flag may be given more than once."""

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> Any:
        """Return what `read` makes of it."""
        return self.read(value)

    def allowed(self) -> str:
        """Describe the values."""
        return self.words


@dataclass(frozen=True, kw_only=True)
class Option:
    """A declared setting: its values and default, and the texts of its help and its row in docs/configuration.md.

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
    methods: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The flag, as in `--max-model-len`."""
        return f"--{self.flag_name or self.name.replace('_', '-')}"

    def check(self, error: type[SpecrsError], field: str, value: Any) -> Any:
        """Return `value` in its stored form. Raises `error`, which names `field`, the value and what is allowed."""
        also = ", or None" if self.none else ""
        if value is None and self.none and not isinstance(self.values, Checked):
            return None
        return self.values.check(error, field, value, also)

    @property
    def default_text(self) -> str:
        """The default in words. Empty for an option without one."""
        shown = "" if self.default in (None, "", dataclasses.MISSING) else show(self.default, self.values)
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
    """What `option` takes besides default and values."""

    note: str
    """What else to know before choosing."""
    default_is: str
    """What the default means, such as what None stands for."""
    details: str
    """Sentences for docs/configuration.md."""
    flag_name: str
    """The flag without its dashes, if that is not the field's name."""
    short: str
    """vLLM's short form of the flag."""
    commands: tuple[Command, ...]
    """The commands that have the flag."""
    methods: tuple[str, ...]
    """The methods of drafting that have the option; all without it."""


def option(default: Any, values: Values, help: str, *, none: bool = False, **texts: Unpack[OptionTexts]) -> Any:
    """Make a dataclass field that is an option. `dataclasses.MISSING` as `default`: it has to be given.

    `help`: what it sets, as a noun phrase without default and allowed values, which are added. `none`: None is allowed,
    too, as it is if it is the default.
    """
    declared = Option(values=values, default=default, help=help, none=none or default is None, **texts)
    return dataclasses.field(default=default, metadata={"option": declared})


_FOUND: dict[type, Mapping[str, Option]] = {}
"""Results of `options_of`, which is called for every request. mypy takes no dataclass for `functools.cache`."""


def options_of(owner: type) -> Mapping[str, Option]:
    """The options of the dataclass `owner` by their names, in the order of its fields."""
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
    """Name the allowed `values` in a help text."""
    return f"one of {', '.join(map(str, values))}"


def show(value: Any, values: Values) -> str:
    """Write a value as a flag would have it, as in `on`, `16M` or `1,2`."""
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
    """A bound, as a power of two if it is a large one."""
    for less in (0, 1):
        size = abs(bound) + less
        if size >= 1 << 20 and size & (size - 1) == 0:
            return f"{'-' if bound < 0 else ''}2^{size.bit_length() - 1}{' - 1' if less else ''}"
    return str(bound)
