"""LLM on a scripted engine: which requests wait for a grammar, and what a rejected grammar leaves."""

from concurrent.futures import Future
from typing import Any, cast

import pytest
from specrs.engine.request import Request
from specrs.errors import InvalidRequestError
from specrs.llm import LLM
from specrs.sampling import SamplingParams, validate_request
from specrs.structured import StructuredOutputsParams
from specrs.structured import grammar as grammar_module
from specrs.tokenizer import Tokenizer

from .scripted import ScriptedEngine

GREEDY = SamplingParams(temperature=0.0)
REFUSAL = InvalidRequestError("structured_outputs.regex='(': refused")


@pytest.fixture
def llm(engine: ScriptedEngine, tokenizer: Tokenizer) -> LLM:
    return LLM.from_engine(cast(Any, engine), tokenizer)


class Compiler:
    """Stands in for the grammar compiler: grammars are ready when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[StructuredOutputsParams, int]] = []
        self.futures: dict[str, Future[Any]] = {}

    def submit(self, params: StructuredOutputsParams, tokenizer: Tokenizer, vocab_size: int) -> Future[Any]:
        self.asked.append((params, vocab_size))
        return self.futures.setdefault(params.regex or "", Future())


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(grammar_module, "submit_grammar", compiler.submit)
    return compiler


def structured(regex: str, **fields: Any) -> SamplingParams:
    return GREEDY.replace(structured_outputs={"regex": regex}, **fields)


def test_parameters_are_read_at_construction() -> None:
    assert structured("a+").structured_outputs == StructuredOutputsParams(regex="a+")
    assert structured("a+").replace(max_tokens=3).structured_outputs == StructuredOutputsParams(regex="a+")
    for value, message in (
        ({"regexp": "a"}, r"^structured_outputs: unknown key 'regexp'; did you mean regex"),
        ({}, r"^structured_outputs: nothing given"),
        ({"regex": ""}, r"^structured_outputs\.regex='': "),
        ({"regex": "a", "choice": ["b"]}, r"^structured_outputs: regex and choice given"),
        ("a+", r"^structured_outputs='a\+': must be a StructuredOutputsParams, a dictionary of its fields, or None"),
        (3, r"^structured_outputs=3: must be a StructuredOutputsParams"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            SamplingParams(structured_outputs=value)


def test_completions_share_a_grammar(llm: LLM, engine: ScriptedEngine, compiler: Compiler) -> None:
    compiled = object()
    compiler.futures["a+"] = Future()
    compiler.futures["a+"].set_result(compiled)
    llm.generate(["x", "y"], [structured("a+", n=2), GREEDY], use_tqdm=False)
    grammars = {(request.prompt, request.grammar) for request in engine.seen}
    assert grammars == {("x", compiled), ("y", None)}
    assert compiler.asked == [(StructuredOutputsParams(regex="a+"), engine.limits.vocab_size)]


def test_others_run_while_a_grammar_compiles(llm: LLM, engine: ScriptedEngine, compiler: Compiler) -> None:
    order: list[tuple[str | None, int]] = []
    add = engine.add_request

    def record(request: Request) -> None:
        order.append((request.prompt, engine.num_steps))
        add(request)

    def let(running: ScriptedEngine) -> None:
        if running.num_steps == 3:
            compiler.futures["slow"].set_result(object())

    engine.add_request = record  # type: ignore[method-assign]
    engine.before_step = let
    slow, fast = llm.generate(["slow", "fast"], [structured("slow"), GREEDY], use_tqdm=False)
    assert order == [("fast", 0), ("slow", 4)]
    assert [output.outputs[0].finish_reason for output in (slow, fast)] == ["length", "length"]


def test_nobody_else_to_run(llm: LLM, engine: ScriptedEngine, compiler: Compiler, monkeypatch: Any) -> None:
    waited: list[int] = []

    def wait(futures: Any, return_when: str) -> None:
        waited.append(engine.num_steps)
        for future in futures:
            future.set_result(object())

    monkeypatch.setattr("specrs.llm.wait", wait)
    (output,) = llm.generate("x", structured("slow"), use_tqdm=False)
    assert (output.outputs[0].finish_reason, waited) == ("length", [0])


def test_a_step_ahead_settles_while_a_grammar_compiles(
    llm: LLM, engine: ScriptedEngine, compiler: Compiler, monkeypatch: Any
) -> None:
    """Check that a step in flight settles while a grammar compiles. It touches no request, and none waits or runs after
    it."""

    def wait(futures: Any, return_when: str) -> None:
        for future in futures:
            future.set_result(object())

    monkeypatch.setattr("specrs.llm.wait", wait)
    engine.planned_ahead = True
    outputs = llm.generate(["fast", "slow"], [GREEDY, structured("slow")], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]


def test_a_step_ahead_settles_while_a_streams_grammar_compiles(
    llm: LLM, engine: ScriptedEngine, compiler: Compiler, monkeypatch: Any
) -> None:
    engine.planned_ahead = True
    others = llm.stream("fast", GREEDY)
    next(others)
    compiler.futures["slow"] = future = Future()
    monkeypatch.setattr(future, "result", lambda timeout=None: object())
    assert [output.finished for output in llm.stream("slow", structured("slow"))][-1]
    assert list(others)[-1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_rejected_grammar_fails_alone(llm: LLM, engine: ScriptedEngine, compiler: Compiler, when: str) -> None:
    def refuse(running: ScriptedEngine) -> None:
        if running.num_steps == (0 if when == "at once" else 20):
            compiler.futures["("].set_exception(REFUSAL)

    engine.before_step = refuse
    params = [GREEDY, structured("(", n=2), GREEDY.replace(max_tokens=50)]
    first, bad, last = llm.generate(["x", "y", "z"], params, use_tqdm=False)
    assert [output.error for output in (first, bad, last)] == [None, REFUSAL, None]
    assert [(one.index, one.finish_reason, one.text) for one in bad.outputs] == [(0, "error", ""), (1, "error", "")]
    assert [request.prompt for request in engine.seen] == ["x", "z"]
    assert not engine.live


def test_a_lone_rejected_grammar_raises(llm: LLM, engine: ScriptedEngine, compiler: Compiler) -> None:
    compiler.futures["("] = Future()
    compiler.futures["("].set_exception(REFUSAL)
    with pytest.raises(InvalidRequestError, match="refused"):
        llm.generate("x", structured("("), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="refused"):
        llm.stream("x", structured("("))
    assert engine.seen == []


def test_nothing_compiles_for_a_request_that_is_rejected_anyway(llm: LLM, compiler: Compiler) -> None:
    llm.generate(["", "x"], [structured("a"), structured("b", stop_token_ids=[4096])], use_tqdm=False)
    assert compiler.asked == []


def test_an_interrupt_while_a_grammar_compiles(llm: LLM, engine: ScriptedEngine, compiler: Compiler) -> None:
    def interrupt(running: ScriptedEngine) -> None:
        raise KeyboardInterrupt

    engine.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x", "y"], [structured("slow"), GREEDY], use_tqdm=False)
    assert not engine.live
    engine.before_step = lambda running: None
    assert llm.generate("z", GREEDY, use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_a_stream_waits_for_its_grammar_while_others_go_on(
    llm: LLM, engine: ScriptedEngine, compiler: Compiler
) -> None:
    other = llm.stream("other", GREEDY)
    assert len(next(other).outputs[0].token_ids) == 2
    compiled = object()

    def let(running: ScriptedEngine) -> None:
        if running.num_steps == 3:
            compiler.futures["slow"].set_result(compiled)

    engine.before_step = let
    stream = llm.stream("x", structured("slow"))
    assert len(engine.seen[0].output_token_ids) == 8
    next(stream)
    assert [request.grammar for request in engine.seen] == [None, compiled]
    list(other)
    assert list(stream)[-1].outputs[0].finish_reason == "length"


def test_without_a_tokenizer(engine: ScriptedEngine) -> None:
    llm = LLM.from_engine(cast(Any, engine))
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs=.*: needs a tokenizer"):
        llm.generate([5], structured("a"))


def test_the_engine_checks_no_grammar() -> None:
    validate_request([1], structured("("), ScriptedEngine().limits)
