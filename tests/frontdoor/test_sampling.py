"""SamplingParams: vLLM's defaults; wrong values are refused by name, what is not implemented when added."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from specrs.errors import InvalidRequestError, UnsupportedRequestError
from specrs.sampling import FIELDS, RequestLimits, SamplingParams, reject_unimplemented, validate_request

LIMITS = RequestLimits(max_model_len=32, vocab_size=100, num_speculative_tokens=5, eos_token_ids=(7, 3))
GREEDY = SamplingParams(temperature=0.0)


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **fields)


def test_defaults_are_those_of_vllm() -> None:
    expected = {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": None,
        "stop_token_ids": None,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "structured_outputs": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "extra_args": None,
        "num_speculative_tokens": None,
    }
    assert expected == FIELDS


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("n", 0, "an integer from 1 to 128"),
        ("n", 129, "an integer from 1 to 128"),
        ("temperature", math.nan, "a finite number of at least 0"),
        ("temperature", math.inf, "a finite number of at least 0"),
        ("temperature", -0.1, "a finite number of at least 0"),
        ("temperature", None, "a finite number of at least 0"),
        ("top_p", 0.0, "greater than 0 and at most 1"),
        ("top_p", 1.5, "greater than 0 and at most 1"),
        ("top_k", -2, "an integer of at least -1"),
        ("top_k", 1.5, "an integer of at least -1"),
        ("min_p", 2, "from 0 to 1"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", math.nan, "from -2 to 2"),
        ("repetition_penalty", 0.0, "greater than 0"),
        ("seed", 2**63, "an integer from"),
        ("seed", "1", "an integer from"),
        ("max_tokens", 0, "an integer of at least 1, or None"),
        ("max_tokens", -1, "an integer of at least 1, or None"),
        ("max_tokens", 1.0, "an integer of at least 1, or None"),
        ("max_tokens", True, "an integer of at least 1, or None"),
        ("min_tokens", -1, "an integer of at least 0"),
        ("min_tokens", 17, "at most max_tokens=16"),
        ("logprobs", -2, "an integer of at least -1, or None"),
        ("num_speculative_tokens", -1, "an integer from 0 to 16, or None"),
        ("num_speculative_tokens", 17, "an integer from 0 to 16, or None"),
        ("stop", 3, "a string, a list of strings, or None"),
        ("stop_token_ids", 3, "a list of token ids, or None"),
        ("stop_token_ids", "12", "a list of token ids, or None"),
        ("ignore_eos", 1, "True or False"),
        ("detokenize", None, "True or False"),
        ("skip_special_tokens", "yes", "True or False"),
        ("include_stop_str_in_output", 0, "True or False"),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: object, allowed: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"{field}={value!r}: ")
    assert allowed in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["a", ""]}, r"^stop\[1\]='': must be a string that is not empty"),
        ({"stop": ["a", 3]}, r"^stop\[1\]=3: "),
        ({"stop": ["x"] * 65}, "^stop: 65 strings, allowed are at most 64"),
        ({"stop": ["x"] * 10_000}, "^stop: 10000 strings, allowed are at most 64"),
        ({"stop": "x" * 1025}, r"^stop\[0\]: 1025 characters, allowed are at most 1024"),
        ({"stop": "x", "detokenize": False}, "needs detokenize=True"),
        ({"stop_token_ids": [1, -1]}, r"^stop_token_ids\[1\]=-1: "),
        ({"stop_token_ids": [1, 2.0]}, r"^stop_token_ids\[1\]=2.0: "),
        ({"stop_token_ids": list(range(65))}, "^stop_token_ids: 65 ids, allowed are at most 64"),
    ],
)
def test_stop_lists(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**fields)


def test_values_are_normal_after_construction() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[np.int64(3)], top_k=-1, temperature=0, max_tokens=np.int32(4))
    assert params.stop == ("x",) == params.stop_strings
    assert params.stop_token_ids == (3,)
    assert params.top_k == 0
    assert (type(params.temperature), type(params.max_tokens)) == (float, int)
    assert SamplingParams(stop=[], stop_token_ids=[]) == SamplingParams()


def test_immutable_and_replaced_with_checks() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GREEDY.max_tokens = 3  # type: ignore[misc]
    assert GREEDY.replace(max_tokens=3) == greedy(max_tokens=3)
    with pytest.raises(InvalidRequestError, match="max_tokens=0"):
        GREEDY.replace(max_tokens=0)
    with pytest.raises(InvalidRequestError, match=r"did you mean max_tokens?"):
        GREEDY.replace(max_token=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.7),
        ("n", 2),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("logprobs", 0),
        ("prompt_logprobs", 1),
        ("logit_bias", {3: 1.0}),
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
        ("structured_outputs", {"json": {}}),
        ("spaces_between_special_tokens", False),
        ("extra_args", {"a": 1}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(field: str, value: object) -> None:
    params = GREEDY.replace(**{field: value})
    with pytest.raises(UnsupportedRequestError, match=f"^{field}=.*: not implemented yet; allowed: "):
        reject_unimplemented(params)
    with pytest.raises(UnsupportedRequestError, match=f"^{field}="):
        validate_request([1], params, LIMITS)


def test_spelled_out_defaults_are_served() -> None:
    defaults = {name: value for name, value in FIELDS.items() if name != "temperature"}
    reject_unimplemented(greedy(**defaults))
    reject_unimplemented(greedy(logit_bias={}, bad_words=[], allowed_token_ids=[], extra_args={}, seed=5, top_k=-1))


def test_default_temperature_is_refused_until_sampling_arrives() -> None:
    with pytest.raises(UnsupportedRequestError, match=r"^temperature=1.0: not implemented yet; allowed: 0.0"):
        validate_request([1], SamplingParams(), LIMITS)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"^prompt=\[\]: must have at least one token"),
        ([1] * 32, r"^prompt: 32 tokens, allowed are at most 31 \(max_model_len=32 less one token to generate\)"),
        ([1, 100], r"^prompt_token_ids\[1\]=100: must be an integer from 0 to 99"),
        ([1, 2, -1], r"^prompt_token_ids\[2\]=-1: must be an integer from 0 to 99"),
        ([1, 2**70], r"^prompt_token_ids\[1\]=1180591620717411303424: "),
        ([1, 2.0], r"^prompt_token_ids\[1\]=2.0: "),
        ([True], r"^prompt_token_ids\[0\]=True: "),
        ([None], r"^prompt_token_ids\[0\]=None: "),
    ],
)
def test_bad_prompts(prompt: list[Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        validate_request(prompt, GREEDY, LIMITS)


def test_bounds_of_a_good_request() -> None:
    bounds = validate_request([1] * 31, GREEDY, LIMITS)
    assert (bounds.limit, bounds.num_speculative_tokens, bounds.stop_token_ids) == (32, 5, (3, 7))
    bounds = validate_request([1] * 10, greedy(max_tokens=4, num_speculative_tokens=2, stop_token_ids=[9, 7]), LIMITS)
    assert (bounds.limit, bounds.num_speculative_tokens, bounds.stop_token_ids) == (14, 2, (3, 7, 9))
    bounds = validate_request([1] * 10, greedy(max_tokens=None, ignore_eos=True, num_speculative_tokens=0), LIMITS)
    assert (bounds.limit, bounds.num_speculative_tokens, bounds.stop_token_ids) == (32, 0, ())
    assert validate_request([1], greedy(max_tokens=10**12), LIMITS).limit == 32


def test_stop_ids_are_counted_with_eos_and_lie_in_the_vocabulary() -> None:
    limits = dataclasses.replace(LIMITS, eos_token_ids=(98, 99))
    assert len(validate_request([1], greedy(stop_token_ids=list(range(62))), limits).stop_token_ids) == 64
    with pytest.raises(InvalidRequestError, match=r"^stop_token_ids: 65 ids with the checkpoint's eos ids"):
        validate_request([1], greedy(stop_token_ids=list(range(63))), limits)
    with pytest.raises(InvalidRequestError, match=r"^stop_token_ids\[1\]=100: "):
        validate_request([1], greedy(stop_token_ids=[5, 100]), LIMITS)


def test_more_drafts_than_the_engine_has() -> None:
    assert validate_request([1], greedy(num_speculative_tokens=5), LIMITS).num_speculative_tokens == 5
    with pytest.raises(InvalidRequestError, match=r"^num_speculative_tokens=6: must be at most 5, the engine's number"):
        validate_request([1], greedy(num_speculative_tokens=6), LIMITS)
