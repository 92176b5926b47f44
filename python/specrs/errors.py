"""Exceptions of specrs, and checks of values that raise them. Knows no configuration and no request.

Every message about a value reads `field=value: must be ...`, or `field=value: what is wrong; what to do instead`. A
user sees which argument it was, what arrived and what to write instead. Long values are cut, because a prompt may be an
argument.
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
    """Error for a setting that exists elsewhere, at a value that specrs does not implement."""


class UnsupportedRequestError(InvalidRequestError, NotImplementedError):
    """Error for a request field that exists elsewhere, at a value that specrs does not implement."""


class CheckpointError(InvalidConfigError):
    """Error for a checkpoint or tokenizer that is missing, broken, or of an unsupported kind."""


class TokenizerMismatchError(InvalidConfigError):
    """Error for tokenizers of draft and target that give different meanings to the same token ids."""


class UnsupportedModelError(CheckpointError, NotImplementedError):
    """Error for an architecture, or an option of one, that specrs does not implement."""


class EngineError(SpecrsError):
    """Error of the engine: it failed, or ended a request for another reason than its input, such as NaN logits."""


class EngineDeadError(EngineError):
    """Error for calls to an engine that broke or was shut down. It accepts no more requests."""


class RankLostError(EngineDeadError):
    """Error of an engine that cannot go on because one of its ranks has ended, failed or hung."""

    def __init__(self, rank: int, size: int, what: str) -> None:
        """Make the error for rank `rank` of `size`. `what` says what happened to it."""
        super().__init__(f"rank {rank} of {size} {what}")
        self.rank, self.size = rank, size


class QueueFullError(SpecrsError):
    """Error for a request that arrives when the maximum number of requests wait or run. It can be sent again later."""


ErrorT = TypeVar("ErrorT", bound=SpecrsError)
ClassT = TypeVar("ClassT")

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = 8


def short(value: object) -> str:
    """Return `repr(value)`, cut to a length that fits in a message."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits, wherever in the value it is
        return f"<{type(value).__name__} with too many digits>"


def invalid(error: type[ErrorT], field: str, value: object, allowed: str) -> ErrorT:
    """Return (not raise) the exception for `field` at `value`. `allowed` says what may be set instead."""
    return error(f"{field}={short(value)}: {allowed}")


def invalid_config(field: str, value: object, allowed: str) -> InvalidConfigError:
    """Return the `InvalidConfigError` for a setting of the engine: `field` at `value`. `allowed` says what may be set
    instead."""
    return invalid(InvalidConfigError, field, value, allowed)


def invalid_request(field: str, value: object, allowed: str) -> InvalidRequestError:
    """Return the `InvalidRequestError` for a field of a request: `field` at `value`. `allowed` says what may be set
    instead."""
    return invalid(InvalidRequestError, field, value, allowed)


NEAR = 0.75
"""Minimum similarity, from 0 to 1, of a name that is suggested. At difflib's default of 0.6, "threads" suggests
"headless"."""


def near_names(name: str, known: Iterable[str], n: int = 3) -> list[str]:
    """Return up to `n` of the `known` names that `name` may have been meant for, nearest first; empty if none is near.

    Case, dashes, underscores and dots do not count. A known name is also near if `name` is its first half or more.
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
    """Return `; did you mean X?` for the nearest of the `known` names; empty if `value` is near none."""
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
    """Return the exception for an unknown `key` of `where`. It names close matches, and all known keys if they are
    few."""
    names = sorted(known)
    close = near_names(str(key), names)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"
    if close and len(names) <= 16:
        hint += f" known: {', '.join(names)}"
    return error(f"{where}: unknown key {short(key)}; {hint}")


def check_int(
    error: type[SpecrsError], field: str, value: object, low: int, high: int | None = None, *, also: str = ""
) -> int:
    """Return `value` as an int in `[low, high]`; without an upper bound if `high` is None. `also` ends the error
    message. A bool is not an int. Raises `error` for any other value."""
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
    """Return `value` as a finite float in `[low, high]`, or `(low, high]` with `open_low`. `also` ends the error
    message. Raises `error` for any other value, NaN and infinities included."""
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
    """Return `value` if it is True or False. Raises `error` for any other value."""
    if not isinstance(value, bool):
        raise invalid(error, field, value, "must be True or False")
    return value


def check_text(error: type[SpecrsError], field: str, value: object, *, also: str = "") -> str:
    """Return `value` if it is a string with at least one character. `also` ends the error message. Raises `error` for
    any other value."""
    if not isinstance(value, str) or not value:
        raise invalid(error, field, value, f"must be a string that is not empty{also}")
    return value


def check_choice(error: type[SpecrsError], field: str, value: object, choices: Iterable[str], *, also: str = "") -> str:
    """Return `value` if it is one of `choices`. `also` follows them in the error message. Raises `error` for any other
    value."""
    names = list(choices)
    if not isinstance(value, str) or value not in names:
        raise invalid(error, field, value, f"must be one of {', '.join(names)}{also}{did_you_mean(value, names)}")
    return value
