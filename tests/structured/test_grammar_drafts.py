"""Tokens that grammars force, as drafts: they are accepted, need no logits, and change no text."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from specrs import LLM, SamplingParams
from specrs.backends.cpu.callable_model import CallableModel
from specrs.errors import InvalidRequestError
from specrs.structured import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "department": {"enum": ["research", "sales"]},
        "children": {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "integer", "maximum": 9}},
    },
    "required": ["name", "department", "children"],
    "additionalProperties": False,
}
ASKED = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
PROMPTS = ["A person: ", "Anna works in the department of research. ", "def f(x):\n"]
DRAFTERS: dict[str, dict[str, Any]] = {
    "grammar": {"method": "grammar", "num_speculative_tokens": 7},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 7},
    "auto": {"method": "suffix"},
    "draft_model": {"num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3},
    "list": {"method": "suffix,draft_model", "num_speculative_tokens": 4},
}


def params(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=80, structured_outputs=ASKED if seed < 4 else None
        )
        for seed in range(6)
    ]


def texts(llm: LLM, temperature: float) -> list[str]:
    asked = params(temperature)
    outputs = llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(len(asked))], asked, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@cache
def plain(temperature: float) -> list[str]:
    return texts(LLM(), temperature)


@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_are_those_without_drafts(name: str) -> None:
    llm = LLM(speculative_config={"rejection_sample_method": "coupled", **DRAFTERS[name]})
    for temperature in (0.0, 0.8):
        assert texts(llm, temperature) == plain(temperature)
    if DRAFTERS[name].get("method", "draft_model") in ("draft_model", "eagle3"):
        return  # their masked drafts have forced tokens, too
    drafted = llm.engine.stats().drafters["grammar"]
    assert drafted.draft_tokens > 50
    if name == "grammar":
        assert drafted.accepted_tokens > 0.75 * drafted.draft_tokens, "little else is allowed"


def test_forced_tokens_are_drafted_where_the_planner_expects_nothing_of_other_drafts() -> None:
    # n-grams of 1,024 tokens: the only drafts are those of grammars
    speculative = {"method": "ngram", "prompt_lookup_min": 1024, "prompt_lookup_max": 1024}
    llm = LLM(speculative_config=speculative)
    assert texts(llm, 0.0) == plain(0.0)
    stats = llm.engine.stats()
    assert stats.drafters["ngram"].draft_tokens == 0
    assert stats.drafters["grammar"].draft_tokens > 50
    assert stats.drafters["grammar"].accepted_tokens > 0.75 * stats.drafters["grammar"].draft_tokens


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """A list that gets, for each pass of a model that Python calls, the number of rows and of rows with logits."""
    seen: list[tuple[int, int]] = []
    forward = CallableModel.forward

    def counted(self: CallableModel, inputs: dict[str, Any], wanted: Any, *others: Any) -> Any:
        seen.append((len(inputs["input_ids"]), len(wanted)))
        return forward(self, inputs, wanted, *others)

    monkeypatch.setattr(CallableModel, "forward", counted)
    return seen


def test_forced_tokens_need_no_logits(rows: list[tuple[int, int]]) -> None:
    llm = LLM(enforce_eager=True, speculative_config=DRAFTERS["grammar"])
    asked = SamplingParams(temperature=0.0, max_tokens=80, structured_outputs=ASKED)
    [output] = llm.generate(PROMPTS[0], asked, use_tqdm=False)
    accepted = output.metrics.accepted_tokens
    passes = llm.engine.runner.num_target_passes
    num_tokens = len(output.outputs[0].token_ids)
    assert accepted >= 20
    # Every token but the forced ones is drawn from a row; the last row's may lie past the end.
    assert sum(wanted for _, wanted in rows) <= num_tokens - accepted + 1
    assert sum(wanted for _, wanted in rows) <= passes + 1
    rows.clear()
    [logged] = llm.generate(PROMPTS[0], asked.replace(logprobs=0), use_tqdm=False)
    assert logged.outputs[0].token_ids == output.outputs[0].token_ids
    assert sum(wanted for _, wanted in rows) >= num_tokens, "log probabilities need every row's logits"
    values = [next(iter(entry.values())).logprob for entry in logged.outputs[0].logprobs or []]
    assert np.isfinite(values).all()


@pytest.mark.parametrize("excluded", ["bad_words", "allowed_token_ids"])
def test_a_forced_token_that_other_constraints_exclude_ends_the_request_alike(excluded: str) -> None:
    ends = []
    for speculative in (None, DRAFTERS["grammar"]):
        llm = LLM(speculative_config=speculative)
        tokenizer = llm.get_tokenizer()
        constraint: dict[str, Any] = {"bad_words": ["department"]}
        if excluded == "allowed_token_ids":
            constraint = {"allowed_token_ids": {*tokenizer.encode('{"name":"abcdefgh', add_special_tokens=False)}}
        asked = SamplingParams(temperature=0.0, max_tokens=80, structured_outputs=ASKED, **constraint)
        try:
            [output] = llm.generate(PROMPTS[0], asked, use_tqdm=False)
            ends.append((output.outputs[0].token_ids, output.outputs[0].finish_reason, str(output.error)))
        except InvalidRequestError as error:
            ends.append(([], "error", str(error)))
    assert ends[0] == ends[1]
