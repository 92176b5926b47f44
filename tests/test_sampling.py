"""SamplingParams: vLLM's defaults; wrong values are rejected, unimplemented ones when the request is added."""

import dataclasses
import enum
import itertools
import math
from typing import Any

import numpy as np
import pytest
from specrs.errors import InvalidRequestError, UnsupportedRequestError, short
from specrs.sampling import (
    FIELDS,
    RequestLimits,
    RequestOutputKind,
    SamplingParams,
    derive_seed,
    reject_unimplemented,
    tokenize_bad_words,
    validate_request,
)
from specrs.vllm_arguments import SAMPLING

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
        "output_kind": RequestOutputKind.CUMULATIVE,
        "num_speculative_tokens": None,
        "prediction": None,
        "return_drafts": False,
    }
    assert expected == FIELDS


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("n", 0, "an integer from 1 to 128"),
        ("n", 129, "an integer from 1 to 128"),
        ("temperature", math.nan, "a finite number from 0 to 100"),
        ("temperature", math.inf, "a finite number from 0 to 100"),
        ("temperature", -0.1, "a finite number from 0 to 100"),
        ("temperature", 100.5, "a finite number from 0 to 100"),
        pytest.param("temperature", 10**400, "a finite number from 0 to 100", id="temperature-10**400"),
        ("temperature", None, "a finite number from 0 to 100"),
        ("temperature", "0.5", "a finite number from 0 to 100"),
        ("top_p", math.nan, "greater than 0 and at most 1"),
        ("top_p", -math.inf, "greater than 0 and at most 1"),
        ("top_p", True, "greater than 0 and at most 1"),
        ("top_p", 0.0, "greater than 0 and at most 1"),
        ("top_p", 1.5, "greater than 0 and at most 1"),
        ("top_k", -2, "an integer from -1 to 2147483647"),
        ("top_k", 1.5, "an integer from -1 to 2147483647"),
        ("top_k", 2**31, "an integer from -1 to 2147483647"),
        ("top_k", math.nan, "an integer from -1 to 2147483647"),
        ("min_p", 2, "from 0 to 1"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", math.nan, "from 0 to 1"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("presence_penalty", math.inf, "from -2 to 2"),
        ("frequency_penalty", math.nan, "from -2 to 2"),
        ("frequency_penalty", -2.1, "from -2 to 2"),
        ("repetition_penalty", 0.0, "from 0.01 to 100"),
        ("repetition_penalty", 1e-30, "from 0.01 to 100"),
        ("repetition_penalty", 101, "from 0.01 to 100"),
        ("repetition_penalty", math.inf, "from 0.01 to 100"),
        ("seed", 2**63, "an integer from"),
        ("seed", "1", "an integer from"),
        ("max_tokens", 0, "an integer of at least 1, or None"),
        ("max_tokens", -1, "an integer of at least 1, or None"),
        ("max_tokens", 1.0, "an integer of at least 1, or None"),
        ("max_tokens", True, "an integer of at least 1, or None"),
        ("min_tokens", -1, "an integer from 0 to 2147483647"),
        ("min_tokens", 2**70, "an integer from 0 to 2147483647"),
        ("min_tokens", 17, "at most max_tokens=16"),
        ("logprobs", -2, "an integer of at least -1, or None"),
        ("logprobs", 1.5, "an integer of at least -1, or None"),
        ("logprobs", True, "an integer of at least -1, or None"),
        ("prompt_logprobs", -2, "an integer of at least -1, or None"),
        ("prompt_logprobs", "5", "an integer of at least -1, or None"),
        ("logit_bias", [1], "a dictionary of token ids to numbers, or None"),
        ("allowed_token_ids", [], "at least one token id, or be None"),
        ("allowed_token_ids", 3, "a list of token ids, or None"),
        ("allowed_token_ids", {3: 1}, "a list of token ids, or None"),
        ("bad_words", "word", "a list of strings, or None"),
        ("bad_words", 3, "a list of strings, or None"),
        ("bad_words", b"word", "a list of strings, or None"),
        ("num_speculative_tokens", -1, "an integer from 0 to 16, or None"),
        ("num_speculative_tokens", 17, "an integer from 0 to 16, or None"),
        ("stop", 3, "a string, a list of strings, or None"),
        ("stop_token_ids", 3, "a list of token ids, or None"),
        ("stop_token_ids", "12", "a list of token ids, or None"),
        ("ignore_eos", 1, "True or False"),
        ("detokenize", None, "True or False"),
        ("skip_special_tokens", "yes", "True or False"),
        ("include_stop_str_in_output", 0, "True or False"),
        ("return_drafts", 1, "True or False"),
    ],
)
def test_wrong_values_are_rejected(field: str, value: object, allowed: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"{field}={short(value)}: ")
    assert allowed in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["a", ""]}, r"^stop\[1\]='': must be a string that is not empty"),
        ({"stop": ["a", 3]}, r"^stop\[1\]=3: "),
        ({"stop": ["x"] * 65}, "^stop: 65 strings; must be at most 64"),
        ({"stop": ["x"] * 10_000}, "^stop: 10000 strings; must be at most 64"),
        ({"stop": "x" * 1025}, r"^stop\[0\]: 1025 characters; must be at most 1024"),
        ({"stop": "x", "detokenize": False}, "needs detokenize=True"),
        ({"stop_token_ids": [1, -1]}, r"^stop_token_ids\[1\]=-1: "),
        ({"stop_token_ids": [1, 2.0]}, r"^stop_token_ids\[1\]=2.0: "),
        ({"stop_token_ids": list(range(65))}, "^stop_token_ids: 65 ids; must be at most 64"),
        ({"bad_words": ["a", ""]}, r"^bad_words\[1\]='': must be a string that is not empty"),
        ({"bad_words": ["a", "b\ud800"]}, r"^bad_words\[1\]='b\\ud800': must be text: a lone surrogate is no"),
        ({"stop": "\udfff"}, r"^stop\[0\]='\\udfff': must be text: a lone surrogate is no character"),
        ({"bad_words": ["a", None]}, r"^bad_words\[1\]=None: "),
        ({"bad_words": ["x"] * 257}, "^bad_words: 257 strings; must be at most 256"),
        ({"bad_words": ["x" * 1025]}, r"^bad_words\[0\]: 1025 characters; must be at most 1024"),
        ({"allowed_token_ids": [1, -1]}, r"^allowed_token_ids\[1\]=-1: "),
        ({"allowed_token_ids": [1, 2.5]}, r"^allowed_token_ids\[1\]=2.5: "),
        ({"allowed_token_ids": [4, 1, 2, 1]}, r"^allowed_token_ids\[3\]=1: occurs twice; name each id once"),
        ({"logit_bias": {5: math.nan}}, r"^logit_bias\[5\]=nan: must be a finite number from -100 to 100"),
        ({"logit_bias": {5: math.inf}}, r"^logit_bias\[5\]=inf: must be a finite number from -100 to 100"),
        ({"logit_bias": {5: -100.5}}, r"^logit_bias\[5\]=-100.5: must be a finite number from -100 to 100"),
        ({"logit_bias": {5: "1"}}, r"^logit_bias\[5\]='1': must be a finite number from -100 to 100"),
        ({"logit_bias": {5: None}}, r"^logit_bias\[5\]=None: must be a finite number"),
        ({"logit_bias": {-1: 1.0}}, r"^logit_bias\[-1\]=1.0: keys must be token ids: integers of at least 0"),
        ({"logit_bias": {1.5: 1.0}}, r"^logit_bias\[1.5\]=1.0: keys must be token ids"),
        ({"logit_bias": {True: 1.0}}, r"^logit_bias\[True\]=1.0: keys must be token ids"),
        ({"logit_bias": {"a": 1.0}}, r"^logit_bias\['a'\]=1.0: keys must be token ids: .*, or strings of them"),
        ({"logit_bias": {"-1": 1.0}}, r"^logit_bias\['-1'\]=1.0: keys must be token ids"),
        ({"logit_bias": {"1_0": 1.0}}, r"^logit_bias\['1_0'\]=1.0: keys must be token ids"),
        ({"logit_bias": {"\u0663": 1.0}}, r"^logit_bias\['\u0663'\]=1.0: keys must be token ids"),
        ({"logit_bias": {"9" * 5000: 1.0}}, r"^logit_bias\['9+\.\.\.9+'\]=1.0: keys must be token ids"),
        ({"logit_bias": {5: 1.0, "5": 2.0}}, r"^logit_bias\['5'\]=2.0: occurs twice; name each id once"),
    ],
)
def test_lists_and_mappings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**fields)


def test_values_are_normal_after_construction() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[np.int64(3)], top_k=-1, temperature=0, max_tokens=np.int32(4))
    assert params.stop == ("x",) == params.stop_strings
    assert params.stop_token_ids == (3,)
    assert params.top_k == 0
    assert (type(params.temperature), type(params.max_tokens)) == (float, int)
    assert SamplingParams(stop=[], stop_token_ids=[], bad_words=[], logit_bias={}, seed=-1) == SamplingParams()
    params = SamplingParams(
        logit_bias={"7": 1, np.int64(8): -100}, bad_words=["b", "a", "b"], allowed_token_ids=np.array([5, 2])
    )
    assert params.logit_bias == {7: 1.0, 8: -100.0}
    assert {(type(k), type(v)) for k, v in params.logit_bias.items()} == {(int, float)}
    assert params.bad_words == ("b", "a")
    assert params.allowed_token_ids == (5, 2)


def test_the_caller_may_change_what_was_passed() -> None:
    bias = {7: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[7] = math.nan
    assert params.logit_bias == {7: 1.0}


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9.9e-6, True), (1e-5, False), (1.0, False)])
def test_what_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy == greedy


def test_immutable_and_replaced_with_checks() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GREEDY.max_tokens = 3  # type: ignore[misc]
    assert GREEDY.replace(max_tokens=3) == greedy(max_tokens=3)
    with pytest.raises(InvalidRequestError, match="max_tokens=0"):
        GREEDY.replace(max_tokens=0)
    with pytest.raises(InvalidRequestError, match=r"did you mean max_tokens?"):
        GREEDY.replace(max_token=3)


@pytest.mark.parametrize(("field", "value"), [("spaces_between_special_tokens", False), ("extra_args", {"a": 1})])
def test_what_is_not_implemented_is_rejected(field: str, value: object) -> None:
    params = GREEDY.replace(**{field: value})
    with pytest.raises(UnsupportedRequestError, match=f"^{field}=.*: not implemented yet; allowed: "):
        reject_unimplemented(params)
    with pytest.raises(UnsupportedRequestError, match=f"^{field}="):
        validate_request([1], params, LIMITS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("truncate_prompt_tokens", 5),
        ("flat_logprobs", True),
        ("logprob_token_ids", [1]),
        ("prompt_logprob_token_ids", [1]),
        ("prompt_logprob_start", 0),
        ("skip_reading_prefix_cache", True),
        ("stream_interval", 2),
        ("thinking_token_budget", 5),
        ("repetition_detection", {}),
        ("logits_processors", [print]),
        # 0 == False, but not here
        ("skip_clone", 0),
    ],
)
def test_parameters_of_vllm_are_rejected(field: str, value: object) -> None:
    with pytest.raises(UnsupportedRequestError, match=f"^{field}=.*: not implemented; allowed: "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedRequestError, match=f"^{field}="):
        GREEDY.replace(**{field: value})


def test_parameters_of_vllm_are_served_at_their_defaults() -> None:
    defaults = {
        field.name: field.default for field in SamplingParams.__dataclass_fields__.values() if field.name not in FIELDS
    }
    assert len(defaults) == 12
    assert list(defaults) == list(SAMPLING)  # so that each is checked under its own name
    assert GREEDY.replace(**defaults) == GREEDY


def test_kinds_of_output() -> None:
    """Check that `output_kind` accepts members of specrs's enum and of vLLM's, which have the same names."""
    assert SamplingParams().output_kind is RequestOutputKind.CUMULATIVE
    for kind in RequestOutputKind:
        assert SamplingParams(output_kind=kind).output_kind is kind
    theirs = enum.Enum("RequestOutputKind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"])
    assert SamplingParams(output_kind=theirs["DELTA"]).output_kind is RequestOutputKind.DELTA  # type: ignore[arg-type]
    assert SamplingParams(output_kind=None).output_kind is RequestOutputKind.CUMULATIVE  # type: ignore[arg-type]
    for wrong in (1, "DELTA", enum.Enum("Other", ["FIRST"])["FIRST"]):
        with pytest.raises(InvalidRequestError, match=r"^output_kind=.*must be a RequestOutputKind"):
            SamplingParams(output_kind=wrong)  # type: ignore[arg-type]


def test_spelled_out_defaults_are_served() -> None:
    validate_request([1], SamplingParams(**FIELDS), LIMITS)
    validate_request([1], SamplingParams(extra_args={}, top_k=-1), LIMITS)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 2**63 - 1},
        {"temperature": 100, "top_p": 1e-300, "top_k": 2**31 - 1, "min_p": 1, "seed": -(2**63)},
        {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 0.01},
        {"logit_bias": {99: 100, "0": -100}},
        {"allowed_token_ids": {0, 99}},
        {"bad_words": ["x"] * 256},
        {"n": 128},
        {"logprobs": 20, "prompt_logprobs": 0},
    ],
)
def test_values_at_the_bounds_are_served(fields: dict[str, Any]) -> None:
    validate_request([1], SamplingParams(**fields), LIMITS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {3: 1, 100: 2.5}}, r"^logit_bias\[100\]=2.5: keys must be ids of the vocabulary, .* 0 to 99"),
        ({"logit_bias": {"2047": 1}}, r"^logit_bias\[2047\]=1.0: keys must be ids of the vocabulary"),
        ({"allowed_token_ids": [99, 100]}, r"^allowed_token_ids\[1\]=100: must be an integer from 0 to 99"),
        (
            {"allowed_token_ids": [3, 7], "min_tokens": 1},
            r"^allowed_token_ids=\(3, 7\): must have an id that is no stop id, for min_tokens=1",
        ),
        (
            {"logprobs": 21},
            r"^logprobs=21: must be from 0 to 20, the engine's max_logprobs \(--max-logprobs\); -1, all, needs",
        ),
        (
            {"logprobs": -1},
            r"^logprobs=-1: must be from 0 to 20, .*; -1, all, needs max_logprobs of -1 or at least 100",
        ),
        ({"prompt_logprobs": 21}, "^prompt_logprobs=21: must be from 0 to 20"),
    ],
)
def test_values_that_the_engine_cannot_take(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        validate_request([1], SamplingParams(**fields), LIMITS)


def test_only_stop_ids_may_be_written_where_no_minimum_forbids_them() -> None:
    validate_request([1], SamplingParams(allowed_token_ids=[3, 7]), LIMITS)
    validate_request([1], SamplingParams(allowed_token_ids=[3, 7], min_tokens=1, ignore_eos=True), LIMITS)


@pytest.mark.parametrize(
    ("most", "wanted", "fits"), [(-1, -1, 1), (100, -1, 1), (99, -1, 0), (-1, 101, 0), (200, 101, 0)]
)
def test_logprobs_of_the_whole_vocabulary(most: int, wanted: int, fits: bool) -> None:
    limits = dataclasses.replace(LIMITS, max_logprobs=most)
    if fits:
        validate_request([1], SamplingParams(logprobs=wanted, prompt_logprobs=wanted), limits)
    else:
        with pytest.raises(InvalidRequestError, match=f"^logprobs={wanted}: must be from 0 to "):
            validate_request([1], SamplingParams(logprobs=wanted), limits)


def test_seeds_are_those_of_the_published_generator() -> None:
    numbers = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [derive_seed(1234567, i) % 2**64 for i in range(5)] == numbers
    assert derive_seed(1234567, 1, 2) == derive_seed(3203168211198807973, 2)
    assert derive_seed(5) == 5


def test_seeds_differ_and_fit_in_64_bits() -> None:
    seeds = {
        derive_seed(seed, *rest) for seed in (0, 1, -1, 2**63 - 1) for rest in itertools.product(range(30), repeat=2)
    }
    assert len(seeds) == 4 * 900
    assert min(seeds) >= -(2**63)
    assert max(seeds) < 2**63
    assert min(seeds) < 0 < max(seeds)


def encode(text: str) -> list[int]:
    """Encode a text: each character is a token, except that a blank joins the letter after it, as in most
    vocabularies."""
    ids, blank = [], False
    for c in text:
        if c == " ":
            if blank:
                ids.append(32)
            blank = True
        else:
            ids.append(ord(c) + 1000 * blank)
            blank = False
    return ids + [32] * blank


def test_bad_words_within_a_text_and_at_its_start() -> None:
    assert tokenize_bad_words(["ab"], encode, 2000) == ((97, 98), (1097, 98))
    assert tokenize_bad_words([" ab"], encode, 2000) == ((1097, 98),)
    assert tokenize_bad_words(["ab", " ab", "ab"], encode, 2000) == ((97, 98), (1097, 98))
    # no other first token: one form is enough
    assert tokenize_bad_words(["ab"], lambda text: [7, len(text)], 2000) == ((7, 2),)
    assert tokenize_bad_words([], encode, 2000) == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b" * 33], r"^bad_words\[1\]='b+': 33 tokens; must be from 1 to 32"),
        (["a", "\u4e00"], r"^bad_words\[1\]='\u4e00': has token 19968; must have ids below 2000, the model's"),
        (["|"], r"^bad_words\[0\]='\|': 0 tokens; must be from 1 to 32"),
    ],
)
def test_bad_words_that_cannot_be_forbidden(words: list[str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        tokenize_bad_words(words, lambda text: encode(text.replace("|", "")), 2000)
    assert tokenize_bad_words(["b" * 32], encode, 2000)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"^prompt=\[\]: must have at least one token"),
        ([1] * 32, r"^prompt: 32 tokens; must be at most 31 \(max_model_len=32 less one token to generate\)"),
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


def test_drafts_of_an_engine_without_speculation_are_rejected_with_its_remedy() -> None:
    limits = RequestLimits(max_model_len=32, vocab_size=100)
    says = r"^num_speculative_tokens=2: must be 0 or None, because the engine does not draft; .* a speculative_config$"
    with pytest.raises(InvalidRequestError, match=says):
        validate_request([1], greedy(num_speculative_tokens=2), limits)
    assert validate_request([1], greedy(num_speculative_tokens=0), limits).num_speculative_tokens == 0
