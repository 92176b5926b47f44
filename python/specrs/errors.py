"""Exceptions of specrs and the checks that raise them. Knows fields and ranges; knows no config and no request.

Every message about a value reads `field=value: what is allowed`, so that a user finds the argument, sees what arrived
and what to write instead. Long values are cut, because a prompt may be an argument.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from typing import Any, TypeVar

from specrs._core import InvalidConfigError, InvalidRequestError, SpecrsError, UnknownRequestError

__all__ = [
    "CheckpointError",
    "EngineDeadError",
    "EngineError",
    "InvalidConfigError",
    "InvalidRequestError",
    "QueueFullError",
    "RankLostError",
    "SpecrsError",
    "TokenizerMismatchError",
    "UnknownRequestError",
    "UnsupportedConfigError",
    "UnsupportedModelError",
    "UnsupportedRequestError",
    "check_bool",
    "check_choice",
    "check_int",
    "check_number",
    "check_text",
    "did_you_mean",
    "invalid",
    "invalid_config",
    "invalid_request",
    "near_names",
    "rejects_unknown_arguments",
    "short",
    "unknown_key",
]


class UnsupportedConfigError(InvalidConfigError, NotImplementedError):
    """A setting that exists elsewhere, at a value that specrs does not implement."""


class UnsupportedRequestError(InvalidRequestError, NotImplementedError):
    """A request field that exists elsewhere, at a value that specrs does not implement."""


class CheckpointError(InvalidConfigError):
    """A checkpoint or tokenizer that is missing, broken, or of a kind that is not read."""


class TokenizerMismatchError(InvalidConfigError):
    """Draft and target tokenizers give different meanings to the same token ids."""


class UnsupportedModelError(CheckpointError, NotImplementedError):
    """An architecture, or an option of one, that specrs does not implement."""


class EngineError(SpecrsError):
    """The engine failed, or ended a request for a reason other than its input, such as logits that are NaN."""


class EngineDeadError(EngineError):
    """The engine is gone: it broke, or was shut down. No request can be made of it any more."""


class RankLostError(EngineDeadError):
    """The engine is gone because one of its ranks has ended, failed or hung."""

    def __init__(self, rank: int, size: int, what: str) -> None:
        """`what` became of rank `rank` of `size`."""
        super().__init__(f"rank {rank} of {size} {what}")
        self.rank, self.size = rank, size


class QueueFullError(SpecrsError):
    """As many requests wait and run as may; the same request can be made again later."""


ErrorT = TypeVar("ErrorT", bound=SpecrsError)
ClassT = TypeVar("ClassT")

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = 8


def short(value: object) -> str:
    """`repr(value)`, cut to a length that fits in a message."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits, wherever in the value it is
        return f"<{type(value).__name__} with too many digits>"


def invalid(error: type[ErrorT], field: str, value: object, allowed: str) -> ErrorT:
    """The exception for `field` at `value`; `allowed` says what may stand there instead. Returned, not raised."""
    return error(f"{field}={short(value)}: {allowed}")


def invalid_config(field: str, value: object, allowed: str) -> InvalidConfigError:
    """`invalid` for a setting of the engine."""
    return invalid(InvalidConfigError, field, value, allowed)


def invalid_request(field: str, value: object, allowed: str) -> InvalidRequestError:
    """`invalid` for a field of a request."""
    return invalid(InvalidRequestError, field, value, allowed)


NEAR = 0.75
"""Least similarity, from 0 to 1, of a name that is suggested. At 0.6, difflib's own, "threads" suggests "headless"."""


def near_names(name: str, known: Iterable[str], n: int = 3) -> list[str]:
    """Up to `n` of the `known` names that `name` may have been meant for, the nearest first; empty if none is near.

    Case, dashes, underscores and dots do not count. A name whose first half or more is `name` is near.
    """
    wanted = _plain(name)
    if not wanted:
        return []
    found = []
    for other in dict.fromkeys(known):
        plain = _plain(other)
        share = SequenceMatcher(None, plain, wanted).ratio()
        if 2 * len(wanted) >= len(plain) and plain.startswith(wanted):
            share = max(share, NEAR)
        if share >= NEAR:
            found.append((-share, other))
    return [other for _, other in sorted(found)[:n]]


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest of the `known` names, empty if `value` is near none."""
    close = near_names(value, known, 1) if isinstance(value, str) else []
    return f"; did you mean {close[0]}?" if close else ""


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in "-_.")


def rejects_unknown_arguments(error: type[SpecrsError]) -> Callable[[type[ClassT]], type[ClassT]]:
    """Class decorator for dataclasses: an unknown argument raises `error` with near names, not Python's `TypeError`.

    Mutates the class: wraps its `__init__`.
    """

    def decorate(cls: type[ClassT]) -> type[ClassT]:
        init = cls.__init__
        accepted = frozenset(inspect.signature(cls).parameters)

        @functools.wraps(init)
        def checked(self: ClassT, *values: Any, **named: Any) -> None:
            for name in (name for name in named if name not in accepted):
                raise unknown_key(error, cls.__name__, name, cls.__dataclass_fields__)  # type: ignore[attr-defined]
            init(self, *values, **named)

        cls.__init__ = checked  # type: ignore[method-assign, assignment]
        return cls

    return decorate


def unknown_key(error: type[ErrorT], where: str, key: object, known: Iterable[str]) -> ErrorT:
    """The exception for a key that `where` does not have: close matches first, the whole list where it is short."""
    names = sorted(known)
    close = near_names(str(key), names)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"
    if close and len(names) <= 16:
        hint += f" known: {', '.join(names)}"
    return error(f"{where}: unknown key {short(key)}; {hint}")


def check_int(
    error: type[SpecrsError], field: str, value: object, low: int, high: int | None = None, *, also: str = ""
) -> int:
    """`value` as an int in `[low, high]` (no upper bound if None). A bool is not an int; `also` ends the message."""
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
    number: int | None = None
    if not isinstance(value, bool):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            number = None
    if number is None or number < low or (high is not None and number > high):
        raise invalid(error, field, value, f"must be an integer {bounds}{also}")
    return number


def check_number(
    error: type[SpecrsError],
    field: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    also: str = "",
) -> float:
    """`value` as a finite float in `[low, high]`, or `(low, high]` with `open_low`. NaN and infinities never pass."""
    if math.isinf(high):
        bounds = f"greater than {low:g}" if open_low else f"of at least {low:g}"
    else:
        bounds = f"greater than {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not math.isfinite(number) or number > high or number < low or (open_low and number == low):
        raise invalid(error, field, value, f"must be a finite number {bounds}{also}")
    return number


def check_bool(error: type[SpecrsError], field: str, value: object) -> bool:
    """`value` if it is True or False."""
    if not isinstance(value, bool):
        raise invalid(error, field, value, "must be True or False")
    return value


def check_text(error: type[SpecrsError], field: str, value: object, *, also: str = "") -> str:
    """`value` if it is a string with at least one character."""
    if not isinstance(value, str) or not value:
        raise invalid(error, field, value, f"must be a string that is not empty{also}")
    return value


def check_choice(error: type[SpecrsError], field: str, value: object, choices: Iterable[str], *, also: str = "") -> str:
    """`value` if it is one of `choices`. `also` follows them in the message."""
    names = list(choices)
    if not isinstance(value, str) or value not in names:
        raise invalid(error, field, value, f"must be one of {', '.join(names)}{also}{did_you_mean(value, names)}")
    return value
