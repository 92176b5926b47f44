"""LLM on a scripted engine: order, forms of prompts, which requests fail, what is left after a fault."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from specrs.engine.request import Request
from specrs.errors import (
    EngineError,
    InvalidRequestError,
    SpecrsError,
    UnsupportedRequestError,
)
from specrs.llm import LLM
from specrs.sampling import SamplingParams
from specrs.tokenizer import Tokenizer
from tokenizer_files import with_bos

from .scripted import ScriptedEngine

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def llm(engine: ScriptedEngine, tokenizer: Tokenizer) -> LLM:
    return LLM.from_engine(cast(Any, engine), tokenizer)


@pytest.fixture
def say(engine: ScriptedEngine, tokenizer: Tokenizer) -> Callable[[str], None]:
    """Return a function that makes a given text, then EOS, the output of every request."""

    def script(text: str) -> None:
        engine.script = lambda request: [i for c in text for i in tokenizer.encode(c)] + [0]

    return script


def echo(request: Request) -> list[int]:
    return [*request.prompt_token_ids, 0]


def test_outputs_in_the_order_of_prompts(llm: LLM, engine: ScriptedEngine) -> None:
    engine.script = echo
    prompts = ["a" * n for n in (9, 1, 5, 0, 3) if n]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].text for output in outputs] == prompts
    for output in outputs:
        completion = output.outputs[0]
        assert output.finished
        assert output.error is None
        assert (completion.finish_reason, completion.stop_reason, completion.index) == ("stop", None, 0)
        assert type(completion.finish_reason) is str
        assert completion.token_ids == [*output.prompt_token_ids, 0]
    assert len({output.request_id for output in outputs}) == len(outputs)


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ("ab", [["ab"]]),
        ({"prompt": "ab"}, [["ab"]]),
        ({"prompt_token_ids": [5, 6]}, [[5, 6]]),
        ({"prompt_token_ids": np.array([5, 6])}, [[5, 6]]),
        ({"prompt": "not this", "prompt_token_ids": (5, 6)}, [[5, 6]]),
        ([5, 6], [[5, 6]]),
        ([np.int64(5), 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["ab", {"prompt_token_ids": [5]}, [7, 8]], [["ab"], [5], [7, 8]]),
        (["ab"], [["ab"]]),
        ([], []),
    ],
)
def test_forms_of_prompts(llm: LLM, tokenizer: Tokenizer, prompts: Any, ids: list[Any]) -> None:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    expected = [tokenizer.encode(one[0]) if isinstance(one[0], str) else one for one in ids]
    assert [output.prompt_token_ids for output in outputs] == expected


BAD: list[tuple[Any, str]] = [
    ("", "prompt=[]: must have at least one token"),
    (None, "prompt=None: must be a string"),
    (3.5, "prompt=3.5: must be a string"),
    (b"ab", "prompt_token_ids=b'ab'"),
    ("\ud800", "lone surrogate"),
    ({}, "prompt={}: must be a string"),
    ({"prompt": 3}, "prompt=3: must be a string"),
    ({"prompt": 3, "prompt_token_ids": [1]}, "prompt['prompt']=3: must be a string"),
    ({"prompt_token_ids": []}, "prompt=[]: must have at least one token"),
    ({"prompt_token_ids": "12"}, "prompt_token_ids='12': must be a list of token ids"),
    ({"prompt_token_ids": [1, 2.5]}, "prompt_token_ids[1]=2.5"),
    ({"prompt_token_ids": [1, 2048]}, "prompt_token_ids[1]=2048: must be an integer from 0 to 2047"),
    ({"prompt_token_ids": [[1]]}, "prompt_token_ids[0]=[1]"),
    ({"prompt_token_ids": [1] * 64}, "prompt: 64 tokens; must be at most 63"),
    ({"prompt": "a", "multi_modal_data": {}}, "prompt: unknown key 'multi_modal_data'"),
    ({"prompt": "a", "cache_salt": 3}, "prompt['cache_salt']=3: must be a string"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD, ids=str)
def test_a_bad_prompt_fails_alone(
    llm: LLM, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture, prompt: Any, message: str
) -> None:
    engine.script = echo
    with caplog.at_level(logging.WARNING, logger="specrs"):
        first, bad, last = llm.generate(["abc", prompt, "de"], GREEDY, use_tqdm=False)
    assert (first.outputs[0].text, last.outputs[0].text) == ("abc", "de")
    assert first.error is None is last.error
    assert bad.finished
    assert (bad.outputs[0].finish_reason, bad.outputs[0].text, bad.outputs[0].token_ids) == ("error", "", [])
    assert isinstance(bad.error, InvalidRequestError)
    assert message in str(bad.error)
    (record,) = caplog.records
    assert record.getMessage() == f"prompt 1 failed: {bad.error}"
    assert "\n" not in record.getMessage()
    assert not engine.live


@pytest.mark.parametrize(("prompt", "message"), [case for case in BAD if not isinstance(case[0], list)], ids=str)
def test_a_lone_bad_prompt_raises(llm: LLM, engine: ScriptedEngine, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert message.split(":")[0].split("=")[0] in str(caught.value)
    assert not engine.live
    assert engine.num_steps == 0


def test_bad_parameters_fail_alone(llm: LLM) -> None:
    params = [GREEDY, GREEDY.replace(extra_args={"a": 1}), GREEDY.replace(num_speculative_tokens=5), GREEDY]
    outputs = llm.generate(["a"] * 4, params, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "error", "length"]
    assert isinstance(outputs[1].error, UnsupportedRequestError)
    assert str(outputs[2].error).startswith("num_speculative_tokens=5: must be at most 4")
    assert outputs[1].prompt_token_ids == outputs[0].prompt_token_ids


def test_parameters_one_for_all_or_one_each(llm: LLM) -> None:
    each = [GREEDY.replace(max_tokens=n) for n in (1, 4, 3)]
    outputs = llm.generate(["a"] * 3, each, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 4, 3]
    assert [len(o.outputs[0].token_ids) for o in llm.generate(["a"] * 3, GREEDY, use_tqdm=False)] == [16] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling_params": [GREEDY]}, "sampling_params: 1 for 2 prompts; must be one for all, or one each"),
        (
            {"sampling_params": {"temperature": 0}},
            "sampling_params=.*: must be a SamplingParams, a list of them, or None",
        ),
        ({"sampling_params": [GREEDY, 3]}, "sampling_params=.*: must be a SamplingParams"),
        ({"sampling_params": GREEDY, "priority": [1]}, "priority: 1 for 2 prompts"),
        ({"sampling_params": GREEDY, "priority": 3}, "^priority=3: must be a list of integers"),
        ({"sampling_params": GREEDY, "priority": [1, 0.5]}, r"^priority\[1\]=0.5: must be an integer from -9223372036"),
        (
            {"sampling_params": GREEDY, "priority": [2**63, 1]},
            r"^priority\[0\]=9223372036854775808: must be an integer",
        ),
    ],
)
def test_a_bad_call_raises_before_anything_runs(
    llm: LLM, engine: ScriptedEngine, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(["a", "b"], use_tqdm=False, **arguments)
    assert engine.seen == []


def test_prompts_that_are_no_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompts=3: must be a string, .*, or a list of these"):
        llm.generate(cast(Any, 3), GREEDY)


def test_priority_and_salt_reach_the_engine(llm: LLM, engine: ScriptedEngine) -> None:
    llm.generate(["a", {"prompt": "b", "cache_salt": "mine"}], GREEDY, priority=[3, -1], use_tqdm=False)
    assert [(request.priority, request.cache_salt) for request in engine.seen] == [(3, ""), (-1, "mine")]


@pytest.mark.parametrize("fault", [RuntimeError("broken"), KeyboardInterrupt(), InvalidRequestError("late")])
def test_a_fault_ends_what_the_call_started(llm: LLM, engine: ScriptedEngine, fault: BaseException) -> None:
    stream = llm.stream("other", GREEDY)
    next(stream)

    def raise_once(running: ScriptedEngine) -> None:
        if len(running.live) == 3 and running.num_steps == 3:
            raise fault

    engine.before_step = raise_once
    with pytest.raises(type(fault)):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert [request.finish_reason for request in engine.seen] == [None, "abort", "abort"]
    assert len(engine.live) == 1
    engine.before_step = lambda running: None
    (output,) = llm.generate("a", GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert [*stream][-1].outputs[0].finish_reason == "length"


def test_a_fault_while_prompts_are_read(llm: LLM, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Tokenizer.encode

    def interrupt(self: Tokenizer, text: str, **arguments: Any) -> list[int]:
        if text == "b":
            raise KeyboardInterrupt
        return encode(self, text, **arguments)

    monkeypatch.setattr(Tokenizer, "encode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert len(engine.seen) == 1
    assert not engine.live


def test_a_request_that_fails_as_it_runs(llm: LLM, engine: ScriptedEngine) -> None:
    fault = EngineError("request 1: the target's logits are not finite")
    engine.script = lambda request: fault if request.prompt == "bad" else echo(request)
    good, bad = llm.generate(["good", "bad"], GREEDY, use_tqdm=False)
    assert (good.outputs[0].text, bad.outputs[0].finish_reason, bad.error) == ("good", "error", fault)
    with pytest.raises(EngineError):
        llm.generate("bad", GREEDY, use_tqdm=False)
    with pytest.raises(EngineError):
        list(llm.stream("bad", GREEDY))


def test_an_engine_that_forgets_is_told_from_one_that_waits(llm: LLM, engine: ScriptedEngine) -> None:
    engine.before_step = lambda running: running.live.clear()
    with pytest.raises(EngineError, match="idle"):
        llm.generate(["a"], GREEDY, use_tqdm=False)


def test_stop_strings(llm: LLM, say: Callable[[str], None]) -> None:
    say("one two three")
    (output,) = llm.generate("a", GREEDY.replace(stop=["two"]), use_tqdm=False)
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("one ", "stop", "two")
    assert len(completion.token_ids) == len("one two")
    (output,) = llm.generate("a", GREEDY.replace(stop=["two"], include_stop_str_in_output=True), use_tqdm=False)
    assert output.outputs[0].text == "one two"


def test_stop_token_ids(llm: LLM, say: Callable[[str], None], tokenizer: Tokenizer) -> None:
    say("one two")
    (blank,) = tokenizer.encode(" ")
    (output,) = llm.generate("a", GREEDY.replace(stop_token_ids=[blank]), use_tqdm=False)
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("one", "stop", blank)
    assert completion.token_ids[-1] == blank


def test_without_detokenizing(llm: LLM, say: Callable[[str], None]) -> None:
    say("abc")
    (output,) = llm.generate("a", GREEDY.replace(detokenize=False), use_tqdm=False)
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 4)


def test_stream_gives_what_generate_gives(llm: LLM, say: Callable[[str], None]) -> None:
    say("ab 🎉 STOp it STOP here")
    params = GREEDY.replace(stop="STOP", max_tokens=60)
    (whole,) = llm.generate("x", params, use_tqdm=False)
    outputs = list(llm.stream("x", params))
    assert "".join(output.outputs[0].delta for output in outputs) == whole.outputs[0].text == "ab 🎉 STOp it "
    text = ""
    for output in outputs:
        text += output.outputs[0].delta
        assert output.outputs[0].text == text
        assert output.finished == (output is outputs[-1])
    assert outputs[-1].outputs[0].token_ids == whole.outputs[0].token_ids
    assert outputs[-1].outputs[0].stop_reason == "STOP"
    assert len(outputs) == len(whole.outputs[0].token_ids) // 2 + len(whole.outputs[0].token_ids) % 2
    assert [len(output.outputs[0].token_ids) for output in outputs[:3]] == [2, 4, 6]  # snapshots, not one live list


def test_stream_refuses_at_once(llm: LLM, engine: ScriptedEngine) -> None:
    bad = GREEDY.replace(logit_bias={2048: 1})
    for prompt, params in (("", GREEDY), ("a", bad), (None, GREEDY), ("a", {"temperature": 0})):
        with pytest.raises(InvalidRequestError):
            llm.stream(cast(Any, prompt), cast(Any, params))
    assert engine.seen == []


def test_closing_a_stream_ends_its_request(llm: LLM, engine: ScriptedEngine) -> None:
    stream = llm.stream("a", GREEDY)
    assert not engine.live  # nothing runs before the first output is asked for
    next(stream)
    assert len(engine.live) == 1
    cast(Any, stream).close()
    assert not engine.live
    assert engine.seen[0].finish_reason == "abort"


def test_streams_and_calls_interleave(llm: LLM, engine: ScriptedEngine) -> None:
    engine.script = echo
    one, two = llm.stream("first one", GREEDY), llm.stream("second two", GREEDY)
    texts = ["", ""]
    next_one, next_two = next(one), next(two)
    texts = [next_one.outputs[0].delta, next_two.outputs[0].delta]
    (between,) = llm.generate("between", GREEDY, use_tqdm=False)
    assert between.outputs[0].text == "between"
    texts[1] += "".join(output.outputs[0].delta for output in two)
    texts[0] += "".join(output.outputs[0].delta for output in one)
    assert texts == ["first one", "second two"]


def test_chat(llm: LLM, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    one = [{"role": "system", "content": "be"}, {"role": "user", "content": "brief"}]
    (output,) = llm.chat(one, GREEDY, use_tqdm=False)
    assert output.prompt == "be\nbrief"
    assert output.prompt_token_ids == tokenizer.encode("be\nbrief")
    both = llm.chat([one, one[1:]], GREEDY, use_tqdm=False, chat_template="{{ messages | length }}")
    assert [output.prompt for output in both] == ["2", "1"]


def test_a_chat_brings_its_own_special_tokens(engine: ScriptedEngine, tmp_path: Path) -> None:
    tokenizer = Tokenizer(str(with_bos(tmp_path / "bos")))
    llm = LLM.from_engine(cast(Any, engine), tokenizer)
    (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == tokenizer.encode("hi", add_special_tokens=False)
    (output,) = llm.generate("hi", GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == tokenizer.encode("hi")


def test_a_bad_conversation_fails_alone(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    bad, good = llm.chat([[{"role": "user", "content": 3}], one], GREEDY, use_tqdm=False)
    assert str(bad.error).startswith("messages[0]['content']=3: ")
    assert good.error is None
    with pytest.raises(InvalidRequestError, match=r"^messages\[0\]\['content'\]=3: "):
        llm.chat([{"role": "user", "content": 3}], GREEDY, use_tqdm=False)
    for messages in ("hi", {"role": "user"}, 3):
        with pytest.raises(InvalidRequestError, match=r"^messages=.*: must be a list of messages"):
            llm.chat(cast(Any, messages), GREEDY)


def test_without_a_tokenizer(engine: ScriptedEngine) -> None:
    llm = LLM.from_engine(cast(Any, engine))
    (output,) = llm.generate([5, 6], GREEDY, use_tqdm=False)
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 16)
    for call in (
        lambda: llm.generate("text", GREEDY),
        lambda: llm.generate([5], GREEDY.replace(stop="x")),
        lambda: llm.generate([5], GREEDY.replace(bad_words=["x"])),
        lambda: llm.chat([{"role": "user", "content": "x"}], GREEDY),
    ):
        with pytest.raises(SpecrsError, match="needs a tokenizer; with skip_tokenizer_init=True"):
            call()
    assert llm.get_tokenizer() is None


class Bar:
    """Stands in for tqdm."""

    def __init__(self, total: int, **arguments: Any) -> None:
        self.total, self.done, self.postfix, self.closed = total, 0, "", False

    def update(self, count: int) -> None:
        self.done += count

    def set_postfix_str(self, text: str) -> None:
        self.postfix = text

    def close(self) -> None:
        self.closed = True


def test_progress(llm: LLM, engine: ScriptedEngine) -> None:
    bars: list[Bar] = []

    def make(**arguments: Any) -> Bar:
        bars.append(Bar(**arguments))
        return bars[-1]

    def record(running: ScriptedEngine) -> None:
        for request in running.live.values():
            request.output.record(4, 3)

    engine.before_step = record
    llm.generate(["a", "", "b"], GREEDY, use_tqdm=make)
    (bar,) = bars
    assert (bar.total, bar.done, bar.closed) == (2, 2, True)
    assert bar.postfix.endswith(" tok/s, acceptance length 4.00")
    engine.before_step = lambda running: (_ for _ in ()).throw(RuntimeError)
    with pytest.raises(RuntimeError):
        llm.generate("a", GREEDY, use_tqdm=make)
    assert bars[-1].closed


def test_real_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "tok/s" in shown


def test_metrics_of_a_request(llm: LLM, engine: ScriptedEngine) -> None:
    def record(running: ScriptedEngine) -> None:
        for request in running.live.values():
            request.output.record(4, running.num_steps % 2 * 4)

    engine.before_step = record
    (output,) = llm.generate("a", GREEDY, use_tqdm=False)
    metrics = output.metrics
    assert (metrics.drafts, metrics.draft_tokens, metrics.accepted_tokens) == (8, 32, 16)
    assert (metrics.acceptance_length, metrics.acceptance_rate) == (3.0, 0.5)
    assert metrics.acceptance_histogram == [4, 0, 0, 0, 4]
    assert metrics.per_position == [0.5] * 4
    assert metrics.num_generated_tokens == 16
    first, latency = metrics.time_to_first_token, metrics.latency
    assert first is not None
    assert latency is not None
    assert 0 < first < latency
    assert metrics.time_per_output_token == pytest.approx((latency - first) / 15)


def test_stats_pass_through(llm: LLM) -> None:
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert llm.stats().generation_tokens == 32
    llm.reset_stats()
    assert llm.stats().generation_tokens == 0


def test_get_tokenizer(llm: LLM, tokenizer: Tokenizer) -> None:
    assert llm.get_tokenizer() is tokenizer
