"""Checks of values: their errors name field, value and what is allowed, whatever value arrives."""

import inspect
import math
import pickle
from typing import Any

import numpy as np
import pytest
from specrs import errors
from specrs.config import EngineConfig
from specrs.errors import (
    InvalidConfigError,
    InvalidRequestError,
    SpecrsError,
    check_choice,
    check_int,
    check_number,
    check_text,
    invalid_config,
    short,
    unknown_key,
)
from specrs.kv_events_config import KVEventsConfig
from specrs.sampling import SamplingParams
from specrs.speculative_config import SpeculativeConfig
from specrs.structured import StructuredOutputsParams


def test_message_names_field_value_and_what_is_allowed() -> None:
    assert str(invalid_config("block_size", 12, "must be a power of two")) == "block_size=12: must be a power of two"


@pytest.mark.parametrize("value", ["x" * 10_000, list(range(10_000)), {i: i for i in range(10_000)}, 10**400])
def test_long_values_are_cut(value: object) -> None:
    assert len(short(value)) < 150


def test_integers_that_python_does_not_write() -> None:
    huge = 10**5000
    for value in (huge, [huge], {1: huge}):
        assert short(value) == f"<{type(value).__name__} with too many digits>"
    with pytest.raises(InvalidRequestError, match=r"^k=<int with too many digits>: must be an integer from 1 to 5$"):
        check_int(InvalidRequestError, "k", huge, 1, 5)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, 0, 6, np.int64(0)])
def test_check_int_refuses(value: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"^k=.*: must be an integer from 1 to 5, or None$"):
        check_int(InvalidRequestError, "k", value, 1, 5, also=", or None")


def test_check_int_takes_what_is_an_index() -> None:
    value = check_int(InvalidRequestError, "k", np.int32(5), 1, 5)
    assert (value, type(value)) == (5, int)


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, True, "0.5", None, 1 + 0j, -0.1, 1.1])
def test_check_number_refuses(value: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"^p=.*: must be a finite number from 0 to 1$"):
        check_number(InvalidRequestError, "p", value, 0.0, 1.0)


def test_check_number_bounds() -> None:
    assert check_number(InvalidRequestError, "p", 0, 0.0, 1.0) == 0.0
    assert check_number(InvalidRequestError, "p", np.float32(1), 0.0, 1.0) == 1.0
    with pytest.raises(InvalidRequestError, match="greater than 0 and at most 1"):
        check_number(InvalidRequestError, "p", 0.0, 0.0, 1.0, open_low=True)
    with pytest.raises(InvalidRequestError, match=r"greater than 0$"):
        check_number(InvalidRequestError, "p", 0.0, 0.0, open_low=True)


def test_check_text_and_choice() -> None:
    for value in ("", None, 3, b"x"):
        with pytest.raises(InvalidConfigError, match="must be a string that is not empty"):
            check_text(InvalidConfigError, "model", value)
    with pytest.raises(InvalidConfigError, match="must be one of a, b"):
        check_choice(InvalidConfigError, "load_format", "c", ("a", "b"))


def test_unknown_key_suggests() -> None:
    assert "did you mean max_model_len?" in str(
        unknown_key(InvalidConfigError, "LLM", "max_modell_len", ["max_model_len"])
    )
    assert "known: a, b" in str(unknown_key(InvalidConfigError, "LLM", "zzz", ["b", "a"]))


def test_every_class_is_a_specrs_error_and_input_errors_are_value_errors() -> None:
    classes = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]
    assert len(classes) >= 10
    assert all(issubclass(cls, SpecrsError) for cls in classes)
    assert issubclass(errors.UnsupportedRequestError, (InvalidRequestError, NotImplementedError))
    for cls in (errors.CheckpointError, errors.TokenizerMismatchError, errors.UnsupportedRequestError):
        assert issubclass(cls, ValueError)


@pytest.mark.parametrize(
    ("cls", "wrong", "right"),
    [
        (SamplingParams, "max_token", "max_tokens"),
        (EngineConfig, "max_modle_len", "max_model_len"),
        (SpeculativeConfig, "num_speculative_token", "num_speculative_tokens"),
        (KVEventsConfig, "enpoint", "endpoint"),
        (StructuredOutputsParams, "regexp", "regex"),
    ],
)
def test_an_unknown_argument_is_answered_with_the_nearest(cls: type[Any], wrong: str, right: str) -> None:
    with pytest.raises(SpecrsError, match=f"^{cls.__name__}: unknown key '{wrong}'; did you mean {right}"):
        cls(**{wrong: 3})
    assert right in inspect.signature(cls).parameters
    assert pickle.loads(pickle.dumps(SamplingParams(max_tokens=3))) == SamplingParams(max_tokens=3)
