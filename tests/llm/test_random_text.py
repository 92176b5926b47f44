"""`LLM` on the real engine at temperature 0.8 with both rules: seeds, n, logprobs, masks, grammars, faults.

Under `coupled`, text must not depend on other requests. Under `rejection` it may, because they change which requests
draft when.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from specrs import LLM, InvalidRequestError, SamplingParams, StructuredOutputsParams
from specrs.engine_options import LOGPROBS_MODES
from specrs.outputs import Logprob, RequestOutput
from specrs.pair.prompts import PROMPTS
from specrs.sampling import derive_seed

RANDOM = SamplingParams(temperature=0.8, seed=11, max_tokens=24)
GREEDY = RANDOM.replace(temperature=0.0)
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def make_llm(rule: str, **settings: Any) -> LLM:
    return LLM(
        speculative_config={"num_speculative_tokens": 4, "rejection_sample_method": rule}, **SETTINGS, **settings
    )


@pytest.fixture(scope="module", params=["rejection", "coupled"])
def rule(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(rule: str) -> Iterator[LLM]:
    llm = make_llm(rule)
    yield llm
    while llm.engine.has_unfinished():
        llm.engine.step()
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.num_free_blocks == llm.engine.scheduler.num_blocks


def generate(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def ids(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def logprobs(output: RequestOutput) -> list[dict[int, Logprob]]:
    found = output.outputs[0].logprobs
    assert found is not None
    return found


def test_completions_differ(llm: LLM) -> None:
    (output,) = generate(llm, PROMPTS[:1], RANDOM.replace(n=5))
    assert len({tuple(one) for one in ids(output)}) == 5


def test_coupled_completions_come_again_in_any_company() -> None:
    llm = make_llm("coupled")
    (output,) = generate(llm, PROMPTS[:1], RANDOM.replace(n=5))
    again, other = generate(llm, PROMPTS[:2], RANDOM.replace(n=5))
    assert ids(again) == ids(output) != ids(other)
    for i, tokens in enumerate(ids(output)):
        (alone,) = generate(llm, PROMPTS[:1], RANDOM.replace(seed=derive_seed(11, i) if i else 11))
        assert ids(alone) == [tokens]


def test_the_same_calls_to_fresh_engines_give_the_same_text(rule: str) -> None:
    first, second = (generate(make_llm(rule), PROMPTS[:3], RANDOM.replace(n=2)) for _ in range(2))
    assert [ids(output) for output in first] == [ids(output) for output in second]
    assert first[0].metrics.acceptance_histogram == second[0].metrics.acceptance_histogram


def test_a_stream_tells_what_generate_tells(rule: str) -> None:
    params = RANDOM.replace(n=3, logprobs=2)
    (whole,) = generate(make_llm(rule), PROMPTS[:1], params)
    deltas = [""] * 3
    for output in make_llm(rule).stream(PROMPTS[0], params):
        for completion in output.outputs:
            deltas[completion.index] += completion.delta
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.token_ids)
            completion.delta = completion.text
    assert output.outputs == whole.outputs
    assert deltas == [completion.text for completion in whole.outputs]


def test_prompts_without_a_seed(rule: str) -> None:
    params = RANDOM.replace(seed=None, n=2)

    def calls(seed: int) -> list[list[int]]:
        fresh = make_llm(rule, seed=seed)
        return [one for _ in range(2) for output in generate(fresh, [PROMPTS[0]] * 2, params) for one in ids(output)]

    texts = calls(5)
    assert len({tuple(one) for one in texts}) == 8
    assert calls(5) == texts
    assert not {tuple(one) for one in texts} & {tuple(one) for one in calls(6)}


def test_the_default_is_random(llm: LLM) -> None:
    first, second = (output for _ in range(2) for output in llm.generate(PROMPTS[0], use_tqdm=False))
    assert ids(first) != ids(second)


def test_greedy_text_is_the_same_for_every_seed_and_completion(llm: LLM) -> None:
    (one,) = generate(llm, PROMPTS[:1], GREEDY)
    (three,) = generate(llm, PROMPTS[:1], GREEDY.replace(n=3, seed=12))
    (warm,) = generate(llm, PROMPTS[:1], RANDOM.replace(temperature=9.9e-6))
    assert ids(three) == ids(one) * 3
    assert ids(warm) == ids(one)


def test_coupled_text_is_that_without_drafts() -> None:
    llm = make_llm("coupled")
    params = RANDOM.replace(top_p=0.95, top_k=50, min_p=0.01, repetition_penalty=1.1, logit_bias={10: 1.5}, n=2)
    drafted = generate(llm, PROMPTS[:3], params)
    assert llm.stats().accepted_tokens > 0
    plain = generate(llm, PROMPTS[:3], params.replace(num_speculative_tokens=0))
    assert [ids(output) for output in drafted] == [ids(output) for output in plain]


def test_figures_of_completions_add_up(llm: LLM) -> None:
    llm.reset_stats()
    outputs = generate(llm, PROMPTS[:2], RANDOM.replace(n=3))
    stats, metrics = llm.stats(), [output.metrics for output in outputs]
    assert stats.drafts == sum(one.drafts for one in metrics) > 0
    assert stats.draft_tokens == sum(one.draft_tokens for one in metrics)
    assert stats.accepted_tokens == sum(one.accepted_tokens for one in metrics)
    assert stats.acceptance_histogram == [
        sum(counts) for counts in zip(*(one.acceptance_histogram for one in metrics), strict=True)
    ]
    assert stats.generation_tokens == sum(one.num_generated_tokens for one in metrics)
    assert stats.num_cached_tokens == sum(one.num_cached_tokens for one in metrics)
    assert stats.prompt_tokens == 3 * sum(len(output.prompt_token_ids) for output in outputs)


@pytest.mark.parametrize("params", [RANDOM, GREEDY], ids=["random", "greedy"])
def test_logprobs(llm: LLM, params: SamplingParams) -> None:
    (output,) = generate(llm, PROMPTS[:1], params.replace(logprobs=3))
    (completion,) = output.outputs
    found = logprobs(output)
    assert ids(generate(llm, PROMPTS[:1], params)[0]) == [completion.token_ids]
    assert len(found) == len(completion.token_ids)
    for token, entry in zip(completion.token_ids, found, strict=True):
        assert next(iter(entry)) == token
        assert len(entry) == (3 if (entry[token].rank or 0) <= 3 else 4)
        assert {one.rank for one in entry.values()} == {1, 2, 3, entry[token].rank}
        ranked = sorted(entry.values(), key=lambda one: one.rank or 0)
        assert [one.logprob for one in ranked] == sorted((one.logprob for one in ranked), reverse=True)
        assert entry[token].decoded_token == llm.get_tokenizer().decode([token], skip_special_tokens=False)
        if params.greedy:
            assert entry[token].rank == 1
    if not params.greedy:
        assert any((entry[token].rank or 0) > 1 for token, entry in zip(completion.token_ids, found, strict=True))
    own = [entry[token].logprob for token, entry in zip(completion.token_ids, found, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(own))
    assert "".join(
        entry[token].decoded_token or "" for token, entry in zip(completion.token_ids, found, strict=True)
    ) == (completion.text)


def test_logprobs_are_those_of_the_same_text_as_a_prompt(llm: LLM) -> None:
    (output,) = generate(llm, PROMPTS[:1], RANDOM.replace(logprobs=2))
    text = output.prompt_token_ids + output.outputs[0].token_ids
    (scored,) = generate(llm, [text], RANDOM.replace(prompt_logprobs=2, max_tokens=1))
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs[0] is None
    assert len(scored.prompt_logprobs) == len(text)
    for written, read in zip(logprobs(output), scored.prompt_logprobs[len(output.prompt_token_ids) :], strict=True):
        assert read is not None
        assert list(read) == list(written)
        for token, one in written.items():
            assert (read[token].rank, read[token].decoded_token) == (one.rank, one.decoded_token)
            assert read[token].logprob == pytest.approx(one.logprob, abs=1e-5)


def test_logprobs_of_the_vocabulary() -> None:
    llm = make_llm("coupled", max_logprobs=-1)
    (output,) = generate(llm, PROMPTS[:1], RANDOM.replace(logprobs=-1, prompt_logprobs=-1, max_tokens=3))
    assert output.prompt_logprobs is not None
    for entry in (*logprobs(output), *output.prompt_logprobs[1:]):
        assert entry is not None
        assert len(entry) == 2048
        assert sum(math.exp(one.logprob) for one in entry.values()) == pytest.approx(1, abs=1e-4)


def test_neighbours_have_the_logprobs_they_ask_for(llm: LLM, rule: str) -> None:
    wanted = [RANDOM.replace(logprobs=count) for count in (None, 0, 5)]
    outputs = generate(llm, [PROMPTS[0]] * 3, wanted)
    if rule == "coupled":  # under the other a text depends on how many drafts each has
        assert len({tuple(ids(output)[0]) for output in outputs}) == 1
    assert outputs[0].outputs[0].logprobs is None
    assert {len(entry) for entry in logprobs(outputs[1])} == {1}
    assert {len(entry) for entry in logprobs(outputs[2])} <= {5, 6}


def test_modes_of_logprobs() -> None:
    """Check how the four modes of log probabilities relate to each other for one text."""
    params = RANDOM.replace(top_k=4, logit_bias={10: 3.0}, logprobs=20, max_tokens=6)
    found = {}
    for mode in LOGPROBS_MODES:
        (output,) = generate(make_llm("coupled", logprobs_mode=mode), PROMPTS[:1], params)
        tokens = output.outputs[0].token_ids
        found[mode] = [{token: one.logprob for token, one in entry.items()} for entry in logprobs(output)]
    raw, processed, raw_logits, processed_logits = found.values()
    for token, *entries in zip(tokens, raw, processed, raw_logits, processed_logits, strict=True):
        probabilities, sampled, logits, adjusted = entries
        # the normalisation is one number for all tokens of a position
        first, *rest = (logits[other] - probabilities[other] for other in probabilities)
        assert rest == pytest.approx([first] * len(rest), abs=1e-4)
        kept = {other: value for other, value in sampled.items() if math.isfinite(value)}
        assert len(kept) == 4
        assert token in kept
        assert sum(math.exp(value) for value in kept.values()) == pytest.approx(1, abs=1e-4)
        for other in kept.keys() & logits.keys():
            bias = 3.0 if other == 10 else 0.0
            assert adjusted[other] == pytest.approx((logits[other] + bias) / 0.8, abs=1e-4)


def test_allowed_token_ids(llm: LLM) -> None:
    allowed = [30, 40, 50, 60]
    (output,) = generate(llm, PROMPTS[:1], RANDOM.replace(allowed_token_ids=allowed, temperature=9.0))
    assert 1 < len(set(ids(output)[0])) <= 4
    assert set(ids(output)[0]) <= set(allowed)


def test_logit_bias(llm: LLM) -> None:
    (output,) = generate(llm, PROMPTS[:1], RANDOM.replace(logit_bias={"77": 100}, max_tokens=9))
    assert ids(output) == [[77] * 9]
    (free,) = generate(llm, PROMPTS[:1], RANDOM)
    banned = set(ids(free)[0])
    (output,) = generate(llm, PROMPTS[:1], RANDOM.replace(logit_bias=dict.fromkeys(banned, -100)))
    assert not banned & set(ids(output)[0])


def test_bad_words(llm: LLM) -> None:
    for prompt in PROMPTS[:3]:
        words = ["self", "return", "if", "in"]
        (free,) = generate(llm, prompt, GREEDY.replace(max_tokens=60))
        written = [word for word in words if word in free.outputs[0].text]
        for params in (GREEDY, RANDOM):
            (output,) = generate(llm, prompt, params.replace(max_tokens=60, bad_words=words))
            tokens = map(llm.get_tokenizer().backend.id_to_token, ids(output)[0])
            assert not {*tokens} & {*words, *(f"Ġ{word}" for word in words)}
        assert written or prompt != PROMPTS[0]


def test_stop_ids_are_not_written_before_min_tokens(llm: LLM) -> None:
    (free,) = generate(llm, PROMPTS[:1], RANDOM)
    stop = ids(free)[0][3]
    params = RANDOM.replace(stop_token_ids=[stop], min_tokens=10)
    (output,) = generate(llm, PROMPTS[:1], params)
    assert stop not in ids(output)[0][:10]
    assert len(ids(output)[0]) >= 10


BAD: list[dict[str, Any]] = [
    {"logit_bias": {2048: 1.0}},
    {"allowed_token_ids": [2048]},
    {"bad_words": ["~!@#$%^&*" * 8]},
    {"num_speculative_tokens": 5},
    {"stop_token_ids": [4096]},
    {"extra_args": {"a": 1}},
]


def test_rejected_requests_leave_their_neighbours_alone(rule: str) -> None:
    alone = [ids(output) for output in generate(make_llm(rule), PROMPTS[:3], RANDOM)]
    bad = [RANDOM.replace(n=2, **fields) for fields in BAD]
    prompts = [PROMPTS[0], *PROMPTS[3:6], PROMPTS[1], *PROMPTS[3:6], PROMPTS[2]]
    outputs = generate(make_llm(rule), prompts, [RANDOM, *bad[:3], RANDOM, *bad[3:], RANDOM])
    assert [ids(outputs[i]) for i in (0, 4, 8)] == alone
    for i, fields in zip((1, 2, 3, 5, 6, 7), BAD, strict=True):
        assert isinstance(outputs[i].error, InvalidRequestError)
        assert str(outputs[i].error).startswith(next(iter(fields)))


@pytest.mark.parametrize("written", [0, 1])
def test_a_request_that_may_write_nothing_fails_alone(written: int) -> None:
    """Check that a request for which no token is allowed fails alone: from the start, as its fields show, or after a
    token."""
    llm = make_llm("coupled")
    alone = [ids(generate(llm, prompt, RANDOM)[0]) for prompt in PROMPTS[:2]]
    word = "return"
    (token,) = llm.get_tokenizer().encode(word)
    nothing = RANDOM.replace(allowed_token_ids=[token], bad_words=[word * (written + 1)])
    first, bad, last = generate(llm, [PROMPTS[0], PROMPTS[2], PROMPTS[1]], [RANDOM, nothing, RANDOM])
    assert [ids(first), ids(last)] == alone
    assert ids(bad) == [[token] * written]
    assert bad.outputs[0].finish_reason == "error"
    assert isinstance(bad.error, InvalidRequestError)
    assert ("after 1 output tokens" if written else "at the start") in str(bad.error)


def test_structured_outputs(llm: LLM) -> None:
    choices = ["return", "yield from", "raise"]
    wanted = [
        RANDOM.replace(structured_outputs={"choice": choices}, n=4, temperature=2.0),
        RANDOM.replace(structured_outputs={"regex": "[a-d]{3,5}[0-9]{4}"}, n=2),
        GREEDY.replace(structured_outputs=StructuredOutputsParams(regex="[a-d]{3,5}[0-9]{4}")),
        RANDOM,
    ]
    outputs = generate(llm, PROMPTS[:4], wanted)
    assert [output.error for output in outputs] == [None] * 4
    assert {one.text for one in outputs[0].outputs} <= set(choices)
    for output in outputs[1:3]:
        for one in output.outputs:
            assert re.fullmatch("[a-d]{3,5}[0-9]{4}", one.text)
            assert one.finish_reason == "stop"
    (bad,) = generate(llm, [PROMPTS[0]], RANDOM.replace(structured_outputs={"regex": "("}))
    assert str(bad.error).startswith("structured_outputs.regex='(': ")


def test_a_coupled_structured_text_is_that_without_drafts() -> None:
    llm = make_llm("coupled")
    params = RANDOM.replace(structured_outputs={"regex": "([a-z]+ [0-9]+, ){4}end"}, n=3, max_tokens=60)
    (drafted,) = generate(llm, PROMPTS[:1], params)
    assert llm.stats().accepted_tokens > 0
    (plain,) = generate(llm, PROMPTS[:1], params.replace(num_speculative_tokens=0))
    assert ids(drafted) == ids(plain)
