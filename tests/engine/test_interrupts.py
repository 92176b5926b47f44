"""An interrupt between any two instructions of the engine leaves nothing of its requests, and later texts are right."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest
from specrs import LLM
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.errors import UnknownRequestError
from specrs.sampling import SamplingParams
from specrs.tokenizer import Tokenizer
from sweep import stride

from engine.harness import assert_idle
from engine.scripted_runner import ScriptedRunner, continuation, make_engine, told

HERE = ("specrs/engine/", "specrs/backends/ring.py")


class Interrupt(BaseException):
    """Stands in for KeyboardInterrupt, which would stop pytest itself."""


@contextmanager
def interrupt_at(*counts: int) -> Iterator[None]:
    """Raise `Interrupt` before the `counts`-th instructions of the engine and of its runner's steps."""
    seen = [0]
    ours: dict[CodeType, bool] = {}

    def local(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "opcode":
            seen[0] += 1
            if seen[0] in counts:
                raise Interrupt
        return local

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if code not in ours:
            ours[code] = any(part in code.co_filename for part in HERE) or code is ScriptedRunner.execute.__code__
        if not ours[code]:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return local

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Anything:
    """A grammar that allows every text, and its matcher, which counts the accepted tokens."""

    error = None

    def __init__(self) -> None:
        self.num_accepted = 0

    def matcher(self, stop_ids: object) -> Any:
        return self

    def accept(self, token: int) -> bool:
        self.num_accepted += 1
        return True


class Session:
    """Requests on an engine that has served others: some are added, stepped, one is aborted, the rest run to their
    ends."""

    def __init__(self, depth: int, tokenizer: Tokenizer, structured: bool = False) -> None:
        self.structured = structured
        self.engine: Engine = make_engine(depth)
        self.tokenizer = tokenizer
        self.next_id = 0

    def request(self, length: int, max_tokens: int, **fields: Any) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)
        self.next_id += 1
        # every other prompt is known already: prefix hits
        prompt = [1 + (self.next_id // 2 * 37 + i) % 250 for i in range(length)]
        return Request(self.next_id, prompt, params, decoder=self.tokenizer.decoder, num_speculative_tokens=3)

    def run(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.add_request(request)
        self.engine.step()
        self.engine.abort(requests[0].request_id)
        while self.engine.has_unfinished():
            self.engine.step()

    def requests(self) -> list[Request]:
        made = [self.request(9, 6), self.request(5, 4, stop=["never"]), self.request(3, 3, logprobs=0)]
        if self.structured:
            made[1].grammar = Anything()  # type: ignore[assignment]
        return made

    def end(self, requests: list[Request]) -> None:
        """Abort all requests that have not ended, as a caller does after an interrupt."""
        for request in requests:
            if not request.finished:
                with contextlib.suppress(UnknownRequestError):
                    self.engine.abort(request.request_id)
        while self.engine.has_unfinished():
            self.engine.step()

    def check(self) -> None:
        assert_idle(self.engine)
        assert not self.engine.requests


@pytest.mark.parametrize(
    ("depth", "structured", "again"),
    [(1, False, False), (2, False, False), (2, True, False), (1, False, True), (2, True, True)],
)
def test_an_interrupt_at_any_instruction(depth: int, structured: bool, again: bool, tokenizer: Tokenizer) -> None:
    """Check an interrupt at any instruction. With `again`, a second one comes while the engine cleans up after the
    first, or soon after."""
    session = Session(depth, tokenizer, structured)
    # Cases of one stride begin at places of their own.
    every = stride(4) * (3 if again else 1)
    at = (depth + structured - 1) % every - every + 1
    interrupts = 0
    while True:
        requests = session.requests()
        at += every
        interrupted = False
        try:
            with interrupt_at(at, at + 1 + at % 97 if again else at):
                try:
                    session.run(requests)
                except Interrupt:
                    interrupted = True
                    interrupts += 1
                    session.end(requests)
        except Interrupt:
            interrupts += 1
        session.end(requests)
        session.check()
        for request in requests:
            expected = told(request)
            assert request.output_token_ids == expected[: len(request.output_token_ids)], at
            if request.logprobs is not None:
                assert [one.logprob for one in request.logprobs] == [-token for token in request.output_token_ids], at
            if request.finish_reason == "length":
                assert request.output_token_ids == expected, at
                assert request.text == session.tokenizer.decode(expected)
        after = session.request(7, 5)
        session.engine.add_request(after)
        while session.engine.has_unfinished():
            session.engine.step()
        assert (after.finish_reason, after.output_token_ids) == ("length", told(after)), at
        if not interrupted:
            break
    assert at > 1000
    assert interrupts >= at // every


@pytest.mark.parametrize("depth", [1, 2])
def test_generate_leaves_nothing_behind(depth: int, tokenizer: Tokenizer) -> None:
    """Check an interrupt during `LLM.generate`, anywhere in the engine: afterwards nothing waits, runs or is in
    flight."""
    engine = make_engine(depth)
    llm = LLM.from_engine(engine, tokenizer)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    at, interrupted = 0, True
    while interrupted:
        at, interrupted = at + 7 * stride(2), False
        prompts = [{"prompt_token_ids": [1 + (at + i) % 250, 5, 6]} for i in range(3)]
        try:
            with interrupt_at(at):
                llm.generate(prompts, params, use_tqdm=False)
        except Interrupt:
            interrupted = True
        assert not engine.requests
        outputs = llm.generate(prompts[:1], params, use_tqdm=False)
        assert outputs[0].outputs[0].token_ids == continuation(prompts[0]["prompt_token_ids"], 6)
        assert_idle(engine)
    assert at > 1000
