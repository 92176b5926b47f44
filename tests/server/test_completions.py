"""`/v1/completions` against `LLM.generate`: texts, log probabilities, usage, acceptance; whole and as a stream."""

from typing import Any

import pytest
from specrs.llm import LLM
from specrs.sampling import SamplingParams

from .conftest import K
from .harness import Server, text_of

PROMPT = "def add(a, b):\n    return"
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "num_speculative_tokens": 0},
    {"temperature": 0, "num_speculative_tokens": 2, "ignore_eos": True},
    {"temperature": 1, "seed": 7, "n": 3},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 11},
    {"temperature": 0, "stop": ["self", "\n\n"]},
    {"temperature": 0, "stop": "return", "include_stop_str_in_output": True},
    {"temperature": 0, "stop_token_ids": [13, 198], "min_tokens": 5},
    {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0, "logit_bias": {"100": 20.0}, "bad_words": [" a"]},
    {"temperature": 0, "structured_outputs": {"choice": [" a + b", " b - a"]}},
    {"temperature": 0, "allowed_token_ids": [5, 6, 7]},
]


@pytest.mark.parametrize("fields", PARAMETERS, ids=lambda fields: "-".join(fields))
def test_texts_are_those_of_llm_generate(server: Server, llm: LLM, fields: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=24, **fields)
    wanted = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs
    whole = server.complete(prompt=PROMPT, max_tokens=24, **fields)
    chunks = server.stream(prompt=PROMPT, max_tokens=24, **fields)
    for i, output in enumerate(wanted):
        choice = whole["choices"][i]
        assert (choice["index"], choice["text"]) == (i, output.text)
        assert (choice["finish_reason"], choice["stop_reason"]) == (output.finish_reason, output.stop_reason)
        assert text_of(chunks, i) == output.text
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == i]
        endings = [(choice["finish_reason"], choice["stop_reason"]) for choice in choices if choice["finish_reason"]]
        assert endings == [(output.finish_reason, output.stop_reason)]
        assert choices[-1]["finish_reason"]
    tokens = sum(len(output.token_ids) for output in wanted)
    length = len(llm.tokenizer.encode(PROMPT)) if llm.tokenizer else 0
    assert whole["usage"]["completion_tokens"] == tokens
    assert whole["usage"]["prompt_tokens"] == length
    assert whole["usage"]["total_tokens"] == length + tokens


def test_forms_of_prompts(server: Server, llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(PROMPT)
    one = server.complete(prompt=PROMPT, max_tokens=8, temperature=0)["choices"][0]["text"]
    for prompt, count in ((ids, 1), ([PROMPT, PROMPT], 2), ([ids, ids, ids], 3)):
        answer = server.complete(prompt=prompt, max_tokens=8, temperature=0)
        assert [choice["text"] for choice in answer["choices"]] == [one] * count
        assert [choice["index"] for choice in answer["choices"]] == list(range(count))
        assert answer["usage"]["prompt_tokens"] == count * len(ids)
    two = server.complete(prompt=[PROMPT, "x"], n=2, max_tokens=4, seed=1)
    assert [choice["index"] for choice in two["choices"]] == [0, 1, 2, 3]


def test_defaults_are_vllms(server: Server) -> None:
    answer = server.complete(prompt=PROMPT, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert "metrics" not in answer
    # clients spell out defaults
    spelled = server.complete(
        prompt=PROMPT, ignore_eos=True, best_of=1, suffix=None, n=1, stop=None, logprobs=None, echo=False, user="me"
    )
    assert spelled["usage"]["completion_tokens"] == 16
    # and routers those of SGLang
    sglang = {"no_stop_trim": False, "return_hidden_states": False, "regex": None, "ebnf": None, "lora_path": None}
    sglang |= {"separate_reasoning": True, "stream_reasoning": True, "json_schema": None, "sampling_seed": None}
    spelled = server.complete(prompt=PROMPT, ignore_eos=True, **sglang)
    assert spelled["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("streamed", [False, True])
def test_echo_with_logprobs(server: Server, llm: LLM, max_tokens: int, streamed: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2, "echo": True}
    wanted = llm.generate(
        PROMPT, SamplingParams(max_tokens=max_tokens or 1, temperature=0, logprobs=2, prompt_logprobs=2), use_tqdm=False
    )[0]
    if streamed:
        chunks = server.stream(**body)
        text = text_of(chunks)
        parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
        logprobs = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        finish = chunks[-1]["choices"][0]["finish_reason"]
    else:
        answer = server.complete(**body)
        (choice,) = answer["choices"]
        text, logprobs, finish = choice["text"], choice["logprobs"], choice["finish_reason"]
        assert answer["usage"]["completion_tokens"] == max_tokens
    output = wanted.outputs[0]
    kept = max_tokens if max_tokens else 0
    assert finish == "length"
    assert text == PROMPT + (output.text if max_tokens else "")
    assert "".join(logprobs["tokens"]) == text
    offsets = [0]
    for token in logprobs["tokens"][:-1]:
        offsets.append(offsets[-1] + len(token))
    assert logprobs["text_offset"] == offsets
    assert wanted.prompt_logprobs is not None
    assert output.logprobs is not None
    ids = [*wanted.prompt_token_ids, *output.token_ids[:kept]]
    entries = [*wanted.prompt_logprobs, *output.logprobs[:kept]]
    assert len(logprobs["tokens"]) == len(ids)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for token_id, entry, value, top in zip(
        ids[1:], entries[1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
    ):
        assert entry is not None
        assert value == pytest.approx(entry[token_id].logprob, abs=1e-9)
        assert max(top.values()) == pytest.approx(max(item.logprob for item in entry.values()), abs=1e-9)


def test_tokens_as_ids(server: Server, llm: LLM) -> None:
    answer = server.complete(
        prompt=PROMPT, max_tokens=3, temperature=0, logprobs=0, return_tokens_as_token_ids=True, return_token_ids=True
    )
    (choice,) = answer["choices"]
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(choice["token_ids"]) == choice["text"]
    assert choice["prompt_token_ids"] == llm.tokenizer.encode(PROMPT)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["top_logprobs"] is None


def test_prompt_logprobs_of_their_own(server: Server, llm: LLM) -> None:
    choice = server.complete(prompt=PROMPT, max_tokens=2, temperature=0, prompt_logprobs=1)["choices"][0]
    wanted = llm.generate(PROMPT, SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1), use_tqdm=False)[0]
    assert wanted.prompt_logprobs is not None
    assert choice["prompt_logprobs"][0] is None
    for got, entry in zip(choice["prompt_logprobs"][1:], wanted.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert {int(key): value["rank"] for key, value in got.items()} == {key: e.rank for key, e in entry.items()}


def test_a_chunk_per_iteration_and_usage(server: Server) -> None:
    chunks = server.stream(
        prompt=PROMPT,
        max_tokens=60,
        temperature=0,
        ignore_eos=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        per_request_spec_decode_metrics="summary",
    )
    *with_text, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 60
    counts = [chunk["usage"]["completion_tokens"] for chunk in with_text]
    assert counts == sorted(counts)
    assert counts[-1] == 60
    figures = last["metrics"]["speculative_decoding"]
    assert figures["num_accepted_draft_tokens"] > 0
    # every iteration gives one token more than it accepted drafts
    assert len(with_text) <= 60 - figures["num_accepted_draft_tokens"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("metrics" not in chunk for chunk in with_text)


def test_streams_without_usage_end_with_the_metrics(server: Server) -> None:
    chunks = server.stream(
        prompt=[PROMPT, "x"], max_tokens=9, ignore_eos=True, per_request_spec_decode_metrics="summary"
    )
    assert [chunk for chunk in chunks if "usage" in chunk] == []
    assert [i for i, chunk in enumerate(chunks) if "metrics" in chunk] == [len(chunks) - 1]
    assert text_of(chunks, 0)
    assert text_of(chunks, 1)


def test_speculation_figures_agree_with_the_counters(server: Server) -> None:
    before = server.wait_until_idle()
    bodies: list[dict[str, Any]] = [
        {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True},
        {"prompt": [PROMPT, "import os"], "n": 2, "max_tokens": 20, "seed": 3},
        {"prompt": "class A:", "max_tokens": 10, "num_speculative_tokens": 0},
        {"prompt": "class A:", "max_tokens": 30, "num_speculative_tokens": 3, "ignore_eos": True},
    ]
    figures, generated, prompts = [], 0, 0
    for body in bodies:
        answer = server.complete(**body, per_request_spec_decode_metrics="summary")
        figures.append(answer["metrics"]["speculative_decoding"])
        generated += answer["usage"]["completion_tokens"]
        prompts += answer["usage"]["prompt_tokens"] * body.get("n", 1)
    after = server.wait_until_idle()

    def grown(name: str) -> float:
        return after[f"vllm:{name}"] - before.get(f"vllm:{name}", 0)

    assert figures[2]["num_spec_steps"] == 0
    assert figures[2]["mean_acceptance_length"] == 1.0
    for one in figures:
        histogram = one["acceptance_histogram"]
        assert len(histogram) == one["num_spec_tokens"] + 1 == K + 1
        assert sum(histogram) == one["num_spec_steps"]
        assert sum(m * count for m, count in enumerate(histogram)) == one["num_accepted_draft_tokens"]
        if one["num_spec_steps"]:
            length = 1 + one["num_accepted_draft_tokens"] / one["num_spec_steps"]
            assert one["mean_acceptance_length"] == pytest.approx(length)
            rate = one["num_accepted_draft_tokens"] / one["num_draft_tokens"]
            assert one["draft_acceptance_rate"] == pytest.approx(rate)
    assert grown("spec_decode_num_drafts_total") == sum(one["num_spec_steps"] for one in figures) > 0
    assert grown("spec_decode_num_draft_tokens_total") == sum(one["num_draft_tokens"] for one in figures)
    accepted = sum(one["num_accepted_draft_tokens"] for one in figures)
    assert grown("spec_decode_num_accepted_tokens_total") == accepted
    per_position = [grown(f'spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}') for i in range(K)]
    assert sum(per_position) == accepted
    assert per_position[0] == sum(sum(one["acceptance_histogram"][1:]) for one in figures)
    assert grown("generation_tokens_total") == generated
    assert grown("prompt_tokens_total") == prompts
    ended = sum(grown(f'request_success_total{{finished_reason="{reason}"}}') for reason in ("stop", "length"))
    assert ended == 1 + 4 + 1 + 1
    assert grown("time_to_first_token_seconds_count") == 7
    assert grown("e2e_request_latency_seconds_count") == 5
    assert grown("inter_token_latency_seconds_count") > 0


def test_a_request_of_many_completions_leaves_places_to_others(server: Server) -> None:
    """Check that a request of 64 completions leaves places in the batch of 16 to others: another request is answered
    before any of the 64 has ended."""
    with server.streaming(prompt="def f(", n=64, max_tokens=500, ignore_eos=True) as crowd:
        next(crowd)
        server.wait_until("vllm:num_requests_running", 16)
        answer = server.complete(prompt="x = ", max_tokens=4, ignore_eos=True)
        assert len(answer["choices"]) == 1
        now = server.metrics()
        assert now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"] == 64


def test_completions_that_make_way_for_others_have_the_text_they_have_alone(server: Server) -> None:
    asked = {"prompt": "def g(", "n": 24, "max_tokens": 40, "temperature": 0.9, "seed": 5}
    alone = server.complete(**asked)
    with server.streaming(prompt="def f(", n=32, max_tokens=400, ignore_eos=True) as crowd:
        next(crowd)
        server.wait_until("vllm:num_requests_running", 16)
        beside = server.complete(**asked)
    assert [choice["text"] for choice in beside["choices"]] == [choice["text"] for choice in alone["choices"]]
