"""Structured output through the whole engine: generated schemas under speculation, next to requests without
grammars."""

import json
import re
from functools import cache
from typing import Any

import jsonschema
import pytest
from specrs import LLM, RequestOutput, SamplingParams
from specrs.errors import InvalidRequestError
from specrs.pair import EAGLE3
from specrs.pair.prompts import PROMPTS
from specrs.structured import StructuredOutputsParams

from .schemas import make_schema

NUM_SCHEMAS = 200
NUM_NEIGHBOURS = 60
"""Number of requests of a mixed batch; every third has no grammar."""
RANDOM = SamplingParams(temperature=0.9, max_tokens=1000)
NEIGHBOUR = RANDOM.replace(max_tokens=40)
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


def make_llm(k: int, rule: str = "coupled", **settings: Any) -> LLM:
    # A native pass gives a row the same bits, whatever else is in the step.
    settings = {"max_model_len": 1200, "max_num_seqs": 24} | settings
    return LLM(speculative_config={"num_speculative_tokens": k, "rejection_sample_method": rule}, **settings)


def structured(seed: int, **fields: Any) -> SamplingParams:
    # white space is free without bound: a random model may write it for ever
    asked = StructuredOutputsParams(json=make_schema(seed), disable_any_whitespace=True)
    return RANDOM.replace(seed=seed, structured_outputs=asked, **fields)


def run(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    prompts = [PROMPTS[(p.seed or 0) % len(PROMPTS)][:200] for p in params]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.scheduler.check_integrity()
    return outputs


def check(output: RequestOutput, seed: int) -> None:
    completion = output.outputs[0]
    assert completion.finish_reason == "stop", (seed, completion.text)
    jsonschema.validate(
        json.loads(completion.text), make_schema(seed), jsonschema.Draft202012Validator, format_checker=CHECKER
    )


def text(output: RequestOutput) -> str:
    return output.outputs[0].text


@cache
def plain() -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Outputs at K = 0 of every schema, and of requests that run without grammars in their batch."""
    llm = make_llm(0)
    outputs = run(llm, [structured(i) for i in range(NUM_SCHEMAS)])
    return outputs, run(llm, [NEIGHBOUR.replace(seed=i) for i in range(0, NUM_NEIGHBOURS, 3)])


def test_every_text_validates_without_speculation() -> None:
    for i, output in enumerate(plain()[0]):
        check(output, i)
    assert len({text(output) for output in plain()[0]}) > NUM_SCHEMAS / 2


def test_every_text_validates_and_is_the_same_with_speculation() -> None:
    llm = make_llm(5)
    for i, output in enumerate(run(llm, [structured(i) for i in range(NUM_SCHEMAS)])):
        check(output, i)
        assert text(output) == text(plain()[0][i])
    # a draft that knew nothing of grammars would get few
    assert llm.stats().accepted_tokens > llm.stats().drafts


@pytest.mark.parametrize("depth", [1, 2])
def test_neighbours_keep_their_text(depth: int) -> None:
    llm = make_llm(5, max_steps_in_flight=depth)
    params = [structured(i) if i % 3 else NEIGHBOUR.replace(seed=i) for i in range(NUM_NEIGHBOURS)]
    for i, output in enumerate(run(llm, params)):
        if i % 3:
            check(output, i)
            assert text(output) == text(plain()[0][i])
        else:
            assert text(output) == text(plain()[1][i // 3])


def test_preemption_keeps_the_text() -> None:
    # Nothing is kept for output when another is admitted, and all texts are long, so that blocks do run out.
    llm = make_llm(5, block_size=4, max_model_len=280, num_gpu_blocks_override=71, num_reserved_decode_tokens=0)
    lengths = [len(output.outputs[0].token_ids) for output in plain()[0]]
    seeds = sorted((i for i in range(NUM_SCHEMAS) if lengths[i] < 200), key=lambda i: -lengths[i])[:24]
    params = [structured(i, max_tokens=200) for i in seeds]
    run(llm, params)  # compiles the grammars: requests that wait for theirs run one by one, and no blocks run out
    for i, output in zip(seeds, run(llm, params), strict=True):
        check(output, i)
        assert text(output) == text(plain()[0][i])
    assert llm.stats().num_preemptions > 0


def test_rejection_validates_too() -> None:
    for i, output in enumerate(run(make_llm(5, "rejection"), [structured(i) for i in range(60)])):
        check(output, i)


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_drafts_from_the_text_know_no_grammar(rule: str) -> None:
    """Check drafts from the text, which ignore grammars: most are not allowed where they are proposed, and texts are
    those of K = 0."""
    count = 24
    lookup = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    llm, vanilla = (
        LLM(
            speculative_config={"num_speculative_tokens": k, "rejection_sample_method": rule, **lookup},
            max_model_len=1200,
        )
        for k in (5, 0)
    )
    params = [NEIGHBOUR.replace(seed=i) if i % 4 == 0 else structured(i, max_tokens=120) for i in range(count)]
    for output, expected in zip(run(llm, params), run(vanilla, params), strict=True):
        assert text(output) == text(expected)
    stats = llm.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_greedy_is_the_same_at_any_k() -> None:
    params = [structured(i, temperature=0.0) for i in range(40)]
    texts = [[text(output) for output in run(make_llm(k), params)] for k in (0, 3)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "ngram", "suffix", "ngram,suffix", "draft_model,ngram"])
def test_k_auto_serves_grammars(method: str) -> None:
    """Check that `auto` works with grammars: costs are measured before the engine owns its runner, which asks the
    engine for grammars."""
    speculative = {"method": method, "num_speculative_tokens": "auto"}
    if method == "eagle3":
        speculative["model"] = str(EAGLE3)
    llm = LLM(speculative_config=speculative, max_model_len=256, max_num_seqs=4)
    asked = SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["red"]))
    (output,) = llm.generate(["colour = "], asked, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("red", "stop")


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        ({"choice": ["yes", "no", "perhaps"]}, {"yes", "no", "perhaps"}),
        ({"regex": "[ab]{2}"}, {"aa", "ab", "ba", "bb"}),
        ({"grammar": 'root ::= "x" ("y" | "z")'}, {"xy", "xz"}),
    ],
)
def test_other_kinds(asked: dict[str, Any], allowed: set[str]) -> None:
    params = [RANDOM.replace(seed=i, structured_outputs=asked) for i in range(16)]
    texts = [[text(output) for output in run(make_llm(k), params)] for k in (0, 4)]
    assert texts[0] == texts[1]
    assert set(texts[0]) <= allowed
    assert len(set(texts[0])) > 1


@pytest.mark.parametrize(
    ("method", "rule"),
    [("draft_model", "rejection"), ("draft_model", "coupled"), ("ngram", "rejection"), ("suffix", "coupled")],
)
def test_drafts_after_the_end_of_an_object_harm_nothing(method: str, rule: str) -> None:
    """Check that drafts after the end of an object do no harm. A draft may end the object long before `min_tokens`;
    then only the end may follow, and nothing has to."""
    params = SamplingParams(
        temperature=0.0, max_tokens=60, min_tokens=40, structured_outputs={"json_object": True}, seed=0
    )
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if method == "ngram" else {}
    asked = {"num_speculative_tokens": 5, "rejection_sample_method": rule, "method": method, **lookup}
    llm = LLM(speculative_config=asked, max_model_len=1200)
    both = [params.replace(num_speculative_tokens=0), params]
    plain, drafted = (output.outputs[0] for output in llm.generate(["a = 1\nb = 2\n"] * 2, both, use_tqdm=False))
    assert (drafted.token_ids, drafted.finish_reason) == (plain.token_ids, plain.finish_reason)
    assert len(drafted.token_ids) > 40


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_min_tokens_yields_at_the_end_of_the_grammar(rule: str) -> None:
    asked = [{"choice": ["yes", "no", "perhaps"]}, {"regex": "[ab]{2}"}, {"json": {"type": "boolean"}}]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=60,
            min_tokens=min_tokens,
            structured_outputs=kind,
            num_speculative_tokens=k,
        )
        for seed, kind in enumerate(asked)
        for temperature in (0.0, 1.0)
        for min_tokens in (0, 1, 50)
        for k in (0, 5)
    ]
    outputs = run(make_llm(5, rule), params)
    for output, own in zip(outputs, params, strict=True):
        completion = output.outputs[0]
        assert completion.finish_reason == "stop", output.error
        assert completion.text in ("yes", "no", "perhaps", "aa", "ab", "ba", "bb", "true", "false")
        # Where the end is the only way on, `min_tokens` changes nothing, and drafts never do.
        same = outputs[params.index(own.replace(min_tokens=0, num_speculative_tokens=0))].outputs[0]
        if rule == "coupled" or own.temperature == 0.0:
            assert completion.token_ids == same.token_ids


def test_constraints_that_never_meet_a_grammar_are_rejected_with_both_names() -> None:
    llm = make_llm(0)
    digits = [token for text, token in llm.get_tokenizer().backend.get_vocab().items() if text.isdigit()]
    params = RANDOM.replace(allowed_token_ids=digits, structured_outputs={"choice": ["yes", "no"]})
    with pytest.raises(
        InvalidRequestError, match=r"^allowed_token_ids=.*: no token is allowed at the start: with structured_outputs="
    ) as caught:
        llm.generate("a", params, use_tqdm=False)
    assert "min_tokens" not in str(caught.value)


@pytest.mark.parametrize("k", [0, 5])
def test_constraints_that_meet_no_more_end_their_request_alone(k: int) -> None:
    """Check that contradictory constraints end their request alone: after the digits the grammar allows only the end,
    which is not among the allowed ids."""
    llm = make_llm(k)
    digits = [token for text, token in llm.get_tokenizer().backend.get_vocab().items() if text.isdigit()]
    asked = RANDOM.replace(seed=1, allowed_token_ids=digits, structured_outputs={"regex": "[0-9]{3}"})
    outputs = run(llm, [structured(0), asked, structured(2)])
    broken = outputs.pop(1)
    completion = broken.outputs[0]
    assert completion.finish_reason == "error"
    assert re.fullmatch("[0-9]{3}", completion.text)
    position = len(broken.prompt_token_ids or ()) + len(completion.token_ids)
    assert isinstance(broken.error, InvalidRequestError)
    assert re.match(
        rf"allowed_token_ids=.*: no token is allowed at position {position}, after {len(completion.token_ids)} output "
        r"tokens: with structured_outputs=.* it excludes every token; ",
        str(broken.error),
    )
    for i, output in zip((0, 2), outputs, strict=True):
        assert text(output) == text(plain()[0][i])


GIVES_UP = "(((a{1,1000}){1,1000}){1,1000}){1,1000}"
"""Regular expression for which the library has too many states after a few letters: each letter may end any of the
counters."""


@pytest.mark.parametrize("k", [0, 4])
def test_a_grammar_that_gives_up_ends_its_request_alone(k: int) -> None:
    llm = make_llm(k)
    asked = StructuredOutputsParams(regex=GIVES_UP)
    params = [NEIGHBOUR.replace(seed=i) if i % 3 == 0 else structured(i) for i in range(6)]
    params.insert(2, RANDOM.replace(seed=6, max_tokens=400, structured_outputs=asked))
    outputs = run(llm, params)
    broken = outputs.pop(2)
    assert broken.outputs[0].finish_reason == "error"
    assert set(broken.outputs[0].text) <= {"a"}
    assert isinstance(broken.error, InvalidRequestError)
    made = len(broken.outputs[0].token_ids)
    assert re.match(rf"structured_outputs\.regex='.*': after {made} tokens: .*; use a simpler one$", str(broken.error))
    for i, output in enumerate(outputs):
        assert text(output) == text(plain()[0][i] if i % 3 else plain()[1][i // 3])
    # what it held is free again, and the engine goes on
    assert llm.engine.scheduler.num_running == llm.engine.scheduler.num_waiting == 0
    assert text(run(llm, [structured(7)])[0]) == text(plain()[0][7])
