"""Predicted outputs: drafts from `SamplingParams.prediction` change no text, and are counted."""

import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs import LLM, SamplingParams
from specrs.errors import InvalidRequestError

PROMPTS = ["Once upon a time", "def add(a, b):\n", "The three of them "]
DRAFTERS: dict[str, dict[str, Any]] = {
    "prediction": {"method": "prediction", "num_speculative_tokens": 7},
    "suffix": {"method": "suffix"},
    "draft_model": {"num_speculative_tokens": 4},
}
ASKED = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
NEVER = {"method": "ngram", "prompt_lookup_min": 1024, "prompt_lookup_max": 1024, "num_speculative_tokens": 7}
"""Drafter that never proposes anything, so that all drafts are those of predictions."""


@cache
def plain(temperature: float) -> list[list[int]]:
    outputs = LLM().generate(PROMPTS, ASKED.replace(temperature=temperature, seed=7), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@cache
def drafting(name: str) -> LLM:
    speculative = {**DRAFTERS.get(name, NEVER), "rejection_sample_method": "coupled"}
    return LLM(speculative_config=speculative)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(list(DRAFTERS)),
    temperature=st.sampled_from([0.0, 0.9]),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_no_prediction_changes_a_text(name: str, temperature: float, seed: int, data: st.DataObject) -> None:
    draw, asked = random.Random(seed), []
    for ids in plain(temperature):
        wrong = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
        edited = [token for token in ids if draw.random() >= wrong / 2]
        edited = [draw.randrange(1000) if draw.random() < wrong / 2 else token for token in edited]
        asked.append(ASKED.replace(temperature=temperature, seed=7, prediction=edited))
    outputs = drafting(name).generate(PROMPTS, asked, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == plain(temperature)
    for output in outputs:
        drafted = output.metrics.num_predicted_tokens
        assert drafted is None or 0 <= output.metrics.num_accepted_predicted_tokens <= drafted


def test_a_true_prediction_is_accepted_whole_and_counted() -> None:
    [ids, *_] = plain(0.0)
    [output] = drafting("never").generate(PROMPTS[0], ASKED.replace(prediction=ids), use_tqdm=False)
    metrics = output.metrics
    assert output.outputs[0].token_ids == ids
    # The first token comes with the prompt; of 59 others, one of eight comes after seven drafts.
    assert metrics.num_accepted_predicted_tokens == metrics.num_predicted_tokens == 51
    assert drafting("never").engine.stats().drafters["prediction"].accepted_tokens >= 51


def test_text_is_found_again_after_an_edit() -> None:
    llm, [ids, *_] = drafting("never"), plain(0.0)
    inserted = [*ids[:20], 5, 6, 7, *ids[20:]]
    for prediction in (inserted, ids[:20] + ids[23:], llm.get_tokenizer().decode(ids)):
        [output] = llm.generate(PROMPTS[0], ASKED.replace(prediction=prediction), use_tqdm=False)
        assert output.outputs[0].token_ids == ids
        assert output.metrics.num_accepted_predicted_tokens >= 40


def test_requests_without_a_prediction_count_nothing() -> None:
    [output] = drafting("never").generate(PROMPTS[0], ASKED, use_tqdm=False)
    assert output.metrics.num_predicted_tokens is None
    [output] = LLM().generate(PROMPTS[0], ASKED.replace(prediction="anything"), use_tqdm=False)
    assert output.metrics.num_predicted_tokens == 0, "an engine without drafts"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prediction": "x", "n": 2}, "prediction='x': not allowed with n=2; allowed: n=1"),
        ({"prediction": 3}, "prediction=3: must be a list of token ids, or None"),
        ({"prediction": [-1]}, "prediction[0]=-1"),
        ({"prediction": [5, 10**6]}, "prediction[1]=1000000: must be below"),
        ({"prediction": "a\ud800"}, "prediction"),
    ],
)
def test_wrong_predictions_are_rejected(fields: dict[str, Any], message: str) -> None:
    llm = drafting("never")
    with pytest.raises(InvalidRequestError) as fault:
        llm.generate(PROMPTS[0], SamplingParams(**fields), use_tqdm=False)
    assert message in str(fault.value)


def test_an_empty_prediction_is_none_and_a_long_one_is_cut() -> None:
    llm = drafting("never")
    assert SamplingParams(prediction="").prediction is None
    [output] = llm.generate(PROMPTS[0], ASKED.replace(prediction=plain(0.0)[0] * 100), use_tqdm=False)
    assert output.outputs[0].token_ids == plain(0.0)[0]
