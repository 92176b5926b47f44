"""LLM on a scripted engine: several completions of a prompt, their seeds, bad words, logprobs."""

import itertools
from typing import Any, cast

import pytest
from specrs.config import EngineConfig
from specrs.engine.request import Request
from specrs.errors import EngineError, InvalidRequestError
from specrs.llm import LLM
from specrs.outputs import Logprob, TokenLogprob
from specrs.sampling import SamplingParams, derive_seed
from specrs.tokenizer import Tokenizer

from .scripted import ScriptedEngine

GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=0.8, max_tokens=4)


class LogprobEngine(ScriptedEngine):
    """Engine in which token i of the output has log probability -1 - i and rank 3 among the tokens 34, 35 and
    itself."""

    def _advance(self, request: Request) -> None:
        known = len(request.output_token_ids)
        super()._advance(request)
        if request.prompt_logprobs is not None and len(request.prompt_logprobs) == 1:
            request.prompt_logprobs += [
                self.entry(token, -0.5, request.params.prompt_logprobs) for token in request.prompt_token_ids[1:]
            ]
        if request.logprobs is not None:
            for i, token in enumerate(request.output_token_ids[known:], start=known):
                request.logprobs.append(self.entry(token, -1.0 - i, request.params.logprobs))

    @staticmethod
    def entry(token: int, value: float, count: int | None) -> TokenLogprob:
        top = [34, 35, token][:count]
        return TokenLogprob(token, value, 3, top, [value + 2 - i for i in range(len(top))])


@pytest.fixture
def engine() -> ScriptedEngine:
    engine = LogprobEngine()
    engine.script = lambda request: [40, 41, 42, 0]
    return engine


@pytest.fixture
def llm(engine: ScriptedEngine, tokenizer: Tokenizer) -> LLM:
    return LLM.from_engine(cast(Any, engine), tokenizer)


def by_seed(request: Request) -> list[int]:
    """Return a script that depends on the seed: one token, twice for an even seed and three times for an odd one, then
    EOS."""
    return [33 + request.seed % 64] * (2 + request.seed % 2) + [0]


def seeds(engine: ScriptedEngine) -> list[int]:
    return [request.seed for request in engine.seen]


def test_completions_in_their_order(llm: LLM, engine: ScriptedEngine) -> None:
    engine.script = by_seed
    outputs = llm.generate(["a", "b"], [RANDOM.replace(n=3, seed=5), RANDOM], use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [3, 1]
    assert [completion.index for completion in outputs[0].outputs] == [0, 1, 2]
    for completion, request in zip((*outputs[0].outputs, *outputs[1].outputs), engine.seen, strict=True):
        assert completion.token_ids == by_seed(request)
        assert (completion.finish_reason, completion.delta) == ("stop", completion.text)
    assert len({output.request_id for output in outputs}) == 2
    assert [request.prompt for request in engine.seen] == ["a", "a", "a", "b"]


def test_seeds_of_a_prompt_with_a_seed(llm: LLM, engine: ScriptedEngine) -> None:
    params = RANDOM.replace(n=4, seed=5)
    llm.generate(["a"], params, use_tqdm=False)
    assert seeds(engine) == [5, derive_seed(5, 1), derive_seed(5, 2), derive_seed(5, 3)]
    llm.generate(["b", "c"], params, use_tqdm=False)
    list(llm.stream("d", params))
    assert seeds(engine) == seeds(engine)[:4] * 4
    assert len(set(seeds(engine))) == 4


def test_seeds_of_prompts_without_one(llm: LLM, engine: ScriptedEngine) -> None:
    llm.generate(["a", "b"], RANDOM.replace(n=2), use_tqdm=False)
    list(llm.stream("c", RANDOM))
    llm.generate("d", RANDOM, use_tqdm=False)
    assert seeds(engine) == [derive_seed(7, *at) for at in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0))]
    assert len(set(seeds(engine))) == 6


def test_the_same_calls_have_the_same_seeds(tokenizer: Tokenizer) -> None:
    def calls(seed: int) -> list[int]:
        engine = ScriptedEngine()
        engine.config = EngineConfig(seed=seed)
        llm = LLM.from_engine(cast(Any, engine), tokenizer)
        llm.generate(["a", "b"], RANDOM, use_tqdm=False)
        llm.chat([{"role": "user", "content": "c"}], RANDOM.replace(n=2), use_tqdm=False)
        return seeds(engine)

    assert calls(3) == calls(3)
    assert not set(calls(3)) & set(calls(4))


@pytest.mark.parametrize("bad", ["", None])
def test_a_rejected_prompt_changes_no_other_seed(tokenizer: Tokenizer, bad: Any) -> None:
    def calls(middle: Any) -> dict[str | None, int]:
        engine = ScriptedEngine()
        llm = LLM.from_engine(cast(Any, engine), tokenizer)
        llm.generate(["a", middle, "b"], RANDOM, use_tqdm=False)
        llm.generate(["c"], RANDOM, use_tqdm=False)
        return {request.prompt: request.seed for request in engine.seen if request.prompt != middle}

    assert calls(bad) == calls("good")


def test_no_parameters_are_the_defaults(llm: LLM, engine: ScriptedEngine) -> None:
    llm.generate("a", use_tqdm=False)
    list(llm.stream("a"))
    assert [request.params for request in engine.seen] == [SamplingParams()] * 2
    assert engine.seen[0].params.temperature == 1.0


def test_metrics_are_sums_over_completions(llm: LLM, engine: ScriptedEngine) -> None:
    def record(running: ScriptedEngine) -> None:
        for request in running.live.values():
            request.output.record(4, request.request_id % 2)

    engine.before_step = record
    engine.script = by_seed
    (output,) = llm.generate("a", RANDOM.replace(n=2, seed=4), use_tqdm=False)
    lengths = [len(completion.token_ids) for completion in output.outputs]
    assert lengths == [len(by_seed(request)) for request in engine.seen]
    metrics = output.metrics
    assert metrics.num_generated_tokens == sum(lengths)
    assert metrics.drafts == sum(request.acceptance.drafts for request in engine.seen) > 2
    assert metrics.draft_tokens == 4 * metrics.drafts
    drafts = [request.acceptance.drafts for request in engine.seen]
    assert metrics.acceptance_histogram == [drafts[0], drafts[1], 0, 0, 0]
    times = [(request.arrival_time, request.first_token_time, request.finish_time) for request in engine.seen]
    assert metrics.arrival_time == times[0][0]
    assert metrics.first_token_time == min(cast(float, time[1]) for time in times)
    assert metrics.finish_time == max(cast(float, time[2]) for time in times)


def test_a_rejected_prompt_has_as_many_outputs(llm: LLM, engine: ScriptedEngine) -> None:
    bad, good = llm.generate(["", "a"], RANDOM.replace(n=3), use_tqdm=False)
    assert [(one.index, one.finish_reason, one.token_ids) for one in bad.outputs] == [
        (i, "error", []) for i in range(3)
    ]
    assert [one.finish_reason for one in good.outputs] == ["stop"] * 3
    assert len(engine.seen) == 3


def test_a_completion_that_fails(llm: LLM, engine: ScriptedEngine) -> None:
    fault = EngineError("request 1: the target's logits are not finite")
    engine.script = lambda request: fault if request.request_id == 1 else by_seed(request)
    params = RANDOM.replace(n=3)
    output, other = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [one.finish_reason for one in output.outputs] == ["stop", "error", "stop"]
    assert (output.error, other.error) == (fault, None)
    engine.script = lambda request: fault if request.request_id % 3 == 1 else by_seed(request)
    with pytest.raises(EngineError):
        llm.generate("a", params, use_tqdm=False)
    with pytest.raises(EngineError):
        list(llm.stream("a", params))
    assert not engine.live


@pytest.mark.parametrize("fault", [InvalidRequestError("full"), KeyboardInterrupt()])
def test_a_fault_among_completions_ends_the_ones_before(
    llm: LLM, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    add = engine.add_request

    def add_two(request: Request) -> None:
        if request.prompt == "bad" and len(engine.seen) == 3:
            raise fault
        add(request)

    monkeypatch.setattr(engine, "add_request", add_two)
    params = RANDOM.replace(n=2)
    if isinstance(fault, InvalidRequestError):
        _, bad = llm.generate(["a", "bad"], params, use_tqdm=False)
        assert bad.error is fault
    else:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "bad"], params, use_tqdm=False)
    assert engine.seen[2].finish_reason == "abort"
    assert not engine.live


def test_progress_counts_prompts(llm: LLM, engine: ScriptedEngine) -> None:
    bars: list[Any] = []

    class Bar:
        def __init__(self, total: int, **arguments: Any) -> None:
            self.total, self.done = total, 0
            bars.append(self)

        def update(self, count: int) -> None:
            self.done += count
            assert not set(range(3)) <= {request.request_id for request in engine.live.values()}

        def set_postfix_str(self, text: str) -> None: ...
        def close(self) -> None: ...

    engine.script = by_seed
    llm.generate(["a", "b"], RANDOM.replace(n=3), use_tqdm=Bar)
    assert [(bar.total, bar.done) for bar in bars] == [(2, 2)]


def test_stream_of_several_completions(llm: LLM, engine: ScriptedEngine) -> None:
    engine.tokens_per_step = 1
    engine.script = lambda request: [40 + request.request_id] * (2 + 3 * request.request_id) + [0]
    outputs = list(llm.stream("a", GREEDY.replace(n=3)))
    assert [[len(one.token_ids) for one in output.outputs] for output in outputs] == [
        [min(count, most) for most in (3, 6, 9)] for count in range(1, 10)
    ]
    assert [output.finished for output in outputs] == [False] * 8 + [True]
    texts = [""] * 3
    for output in outputs:
        for i, one in enumerate(output.outputs):
            texts[i] += one.delta
            assert (one.text, one.index) == (texts[i], i)
    assert [len(text) for text in texts] == [2, 5, 8]
    stream = llm.stream("a", GREEDY.replace(n=2))
    next(stream)
    assert len(engine.live) == 2
    cast(Any, stream).close()
    assert not engine.live


def test_bad_words_reach_the_engine_as_tokens(llm: LLM, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    llm.generate("a", GREEDY.replace(bad_words=["return", " x"], n=2), use_tqdm=False)
    first, second = engine.seen
    assert tuple(tokenizer.encode("return")) in first.bad_words_token_ids
    assert tuple(tokenizer.encode(" return")) in first.bad_words_token_ids
    assert tuple(tokenizer.encode(" x")) in first.bad_words_token_ids
    assert len(first.bad_words_token_ids) == 3
    assert second.bad_words_token_ids == first.bad_words_token_ids
    with pytest.raises(InvalidRequestError, match=r"^bad_words\[1\]='~!@.*: [0-9]+ tokens; must be from 1 to 32"):
        llm.generate("a", GREEDY.replace(bad_words=["x", "~!@#$%^&*" * 8]), use_tqdm=False)


def test_bad_words_bring_no_special_tokens(
    llm: LLM, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    encode = Tokenizer.encode

    def with_bos(
        self: Tokenizer, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        return [0] * add_special_tokens + encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", with_bos)
    llm.generate("a", GREEDY.replace(bad_words=["return"]), use_tqdm=False)
    assert all(0 not in word for word in engine.seen[0].bad_words_token_ids)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_logprobs(llm: LLM, tokenizer: Tokenizer, count: int) -> None:
    (output,) = llm.generate("a", GREEDY.replace(logprobs=count), use_tqdm=False)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    assert completion.cumulative_logprob == -10.0
    for i, (token, found) in enumerate(zip([40, 41, 42, 0], completion.logprobs, strict=True)):
        value = -1.0 - i
        expected = {token: Logprob(value, 3, tokenizer.decode([token], skip_special_tokens=False))}
        if count >= 1:
            expected[34] = Logprob(value + 2, 1, tokenizer.decode([34]))
        if count == 3:
            expected[35] = Logprob(value + 1, 2, tokenizer.decode([35]))
        assert found == expected
        assert list(found) == list(expected)
    assert completion.logprobs[3][0].decoded_token == "<|endoftext|>"
    assert output.prompt_logprobs is None


def test_no_logprobs_unless_asked_for(llm: LLM) -> None:
    (output,) = llm.generate("a", GREEDY, use_tqdm=False)
    completion = output.outputs[0]
    assert (completion.logprobs, completion.cumulative_logprob, output.prompt_logprobs) == (None, None, None)


def test_prompt_logprobs_are_reported_once(llm: LLM, engine: ScriptedEngine) -> None:
    params = GREEDY.replace(prompt_logprobs=1, n=3)
    (output,) = llm.generate([5, 6, 7], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    first, *rest = output.prompt_logprobs
    assert first is None
    assert [list(found) for found in rest if found is not None] == [[6, 34], [7, 34]]
    assert rest[0] is not None
    assert rest[0][6].logprob == -0.5
    assert [request.params.prompt_logprobs for request in engine.seen] == [1, None, None]
    assert all(one.logprobs is None for one in output.outputs)


def test_prompt_logprobs_of_chunks_are_no_result(llm: LLM, engine: ScriptedEngine) -> None:
    stream = llm.stream([5, 6, 7], GREEDY.replace(prompt_logprobs=0, max_tokens=9))
    assert next(stream).prompt_logprobs is not None
    entries = engine.seen[0].prompt_logprobs
    assert entries is not None
    del entries[2:]
    assert next(stream).prompt_logprobs is None


@pytest.mark.parametrize("how", ["no tokenizer", "no text"])
def test_logprobs_without_text(engine: ScriptedEngine, tokenizer: Tokenizer, how: str) -> None:
    llm = LLM.from_engine(cast(Any, engine), None if how == "no tokenizer" else tokenizer)
    params = GREEDY.replace(logprobs=1, detokenize=how == "no tokenizer")
    (output,) = llm.generate([5], params, use_tqdm=False)
    found = output.outputs[0].logprobs
    assert found is not None
    assert {one.decoded_token for one in itertools.chain.from_iterable(entry.values() for entry in found)} == {None}


def test_logprobs_in_a_stream_are_snapshots(llm: LLM) -> None:
    outputs = list(llm.stream("a", GREEDY.replace(logprobs=1)))
    (whole,) = llm.generate("a", GREEDY.replace(logprobs=1), use_tqdm=False)
    assert [len(output.outputs[0].logprobs or ()) for output in outputs] == [2, 4]
    assert [output.outputs[0].cumulative_logprob for output in outputs] == [-3.0, -10.0]
    assert outputs[-1].outputs[0].logprobs == whole.outputs[0].logprobs


def test_an_engine_that_never_ends_its_requests(llm: LLM, engine: ScriptedEngine) -> None:
    engine.before_step = lambda running: running.live.clear()
    with pytest.raises(EngineError, match="idle"):
        list(llm.stream("a", GREEDY.replace(n=2)))
