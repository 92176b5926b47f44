"""Checks of request fields that hold several values: texts, token ids, biases. Each function checks one field and
returns its stored form. It raises `InvalidRequestError` for a wrong value, with field, value and what is allowed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from numbers import Integral

from specrs.core import MAX_STOP_IDS
from specrs.errors import InvalidRequestError, check_int, check_number, check_text, invalid, short

MAX_STOP_TOKEN_IDS = MAX_STOP_IDS
"""Maximum number of stop ids of one request, the checkpoint's eos ids included. Each row of device state has room for
this many."""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 1024
MAX_LOGIT_BIAS = 100.0


def read_stop_strings(value: object) -> tuple[str, ...]:
    return _texts("stop", value, MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH)


def read_bad_words(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        raise invalid(InvalidRequestError, "bad_words", value, "must be a list of strings, or None")
    return tuple(dict.fromkeys(_texts("bad_words", value, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)))


def _texts(field: str, value: object, most: int, longest: int) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise invalid(InvalidRequestError, field, value, "must be a string, a list of strings, or None")
    if len(value) > most:
        raise InvalidRequestError(f"{field}: {len(value)} strings; must be at most {most}")
    strings = tuple(check_text(InvalidRequestError, f"{field}[{i}]", item) for i, item in enumerate(value))
    for i, item in enumerate(strings):
        if len(item) > longest:
            raise InvalidRequestError(f"{field}[{i}]: {len(item)} characters; must be at most {longest}")
        if any("\ud800" <= c <= "\udfff" for c in item):
            raise invalid(InvalidRequestError, f"{field}[{i}]", item, "must be text: a lone surrogate is no character")
    return strings


def read_stop_token_ids(value: object) -> tuple[int, ...]:
    return () if value is None else _ids("stop_token_ids", value, MAX_STOP_TOKEN_IDS)


def read_allowed_token_ids(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = _ids("allowed_token_ids", value)
    if not ids:
        raise invalid(InvalidRequestError, "allowed_token_ids", value, "must have at least one token id, or be None")
    if len(set(ids)) < len(ids):
        first = {item: i for i, item in reversed(list(enumerate(ids)))}
        i, item = next((i, item) for i, item in enumerate(ids) if first[item] < i)
        raise invalid(InvalidRequestError, f"allowed_token_ids[{i}]", item, "occurs twice; name each id once")
    return ids


def _ids(field: str, value: object, most: int | None = None) -> tuple[int, ...]:
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping)):
        raise invalid(InvalidRequestError, field, value, "must be a list of token ids, or None")
    if most is not None and len(value) > most:
        raise InvalidRequestError(f"{field}: {len(value)} ids; must be at most {most}")
    return tuple(check_int(InvalidRequestError, f"{field}[{i}]", item, 0) for i, item in enumerate(value))


def read_prediction(value: object) -> str | tuple[int, ...] | None:
    if value is None or isinstance(value, str):
        return None if not value else check_text(InvalidRequestError, "prediction", value)
    return _ids("prediction", value)


def read_logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise invalid(InvalidRequestError, "logit_bias", value, "must be a dictionary of token ids to numbers, or None")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        field = f"logit_bias[{short(key)}]"
        # JSON has no other keys than strings
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise invalid(
                InvalidRequestError, field, bias, "keys must be token ids: integers of at least 0, or strings of them"
            )
        if int(token) in biases:
            raise invalid(InvalidRequestError, field, bias, "occurs twice; name each id once")
        biases[int(token)] = check_number(InvalidRequestError, field, bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return biases or None


def read_structured_outputs(value: object) -> object:
    if value is None:
        return None
    from specrs.structured.params import StructuredOutputsParams

    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise invalid(
            InvalidRequestError,
            "structured_outputs",
            value,
            "must be a StructuredOutputsParams, a dictionary of its fields, or None",
        )
    return StructuredOutputsParams.from_mapping(value)
