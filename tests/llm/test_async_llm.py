"""AsyncLLM: the outputs of LLM, many calls at once, each ending alone; the effect of a broken engine on all."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar, cast

import pytest
from specrs.async_llm import AsyncLLM, OutputStream
from specrs.config import EngineConfig
from specrs.engine.loop import MAX_FAULTS
from specrs.errors import EngineDeadError, EngineError, InvalidRequestError, QueueFullError
from specrs.llm import LLM
from specrs.outputs import RequestOutput
from specrs.sampling import SamplingParams
from specrs.structured import StructuredOutputsParams
from specrs.tokenizer import Tokenizer

from .scripted import ScriptedEngine

GREEDY = SamplingParams(temperature=0.0)
LONG = GREEDY.replace(max_tokens=60)
ResultT = TypeVar("ResultT")


@pytest.fixture
def llm(engine: ScriptedEngine, tokenizer: Tokenizer) -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_engine(cast(Any, engine), tokenizer)
    yield llm
    assert llm.shutdown(timeout=30)


class Gate:
    """Lets the engine take as many steps as the test permits. A step without a permit returns and changes nothing."""

    def __init__(self, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._permits = threading.Semaphore(0)
        advance = engine.step
        # the engine's thread must see its commands while the gate is closed
        monkeypatch.setattr(engine, "step", lambda: advance() if self._permits.acquire(timeout=0.001) else [])

    def open(self, steps: int = 1) -> None:
        self._permits.release(steps)


@pytest.fixture
def gate(engine: ScriptedEngine, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(engine, monkeypatch)


def run(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def all_of(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params)]


async def settled(llm: AsyncLLM, engine: ScriptedEngine) -> int:
    """Return the number of live requests once the engine's thread has done all commands so far."""
    known, live = await asyncio.wrap_future(llm._loop.call(lambda: (len(llm._loop._owners), len(engine.live))))
    assert known == live
    return known


def test_an_output_per_step_and_deltas_that_add_up(llm: AsyncLLM, engine: ScriptedEngine, gate: Gate) -> None:
    async def main() -> None:
        texts, deltas = [], []
        gate.open()
        async for output in llm.generate("a", GREEDY.replace(max_tokens=6)):
            texts.append(output.outputs[0].text)
            deltas.append(output.outputs[0].delta)
            gate.open()
        assert texts == ["BB", "BBBB", "BBBBBB"]
        assert deltas == ["BB"] * 3
        assert output.finished
        assert output.outputs[0].finish_reason == "length"

    engine.script = lambda request: [34] * 100
    run(main())
    assert llm.num_unfinished == 0


def test_a_slow_reader_gets_one_output_with_all_that_it_missed(
    llm: AsyncLLM, engine: ScriptedEngine, gate: Gate
) -> None:
    async def main() -> None:
        seen: list[int] = []
        stream = await llm.submit(
            ["a", "b"],
            GREEDY.replace(max_tokens=10),
            observer=lambda i, out: seen.append(len(out.outputs[0].token_ids)),
        )
        gate.open(4)
        while seen.count(8) < 2:
            await asyncio.sleep(0)
        news = await stream.get()
        assert [(i, len(output.outputs[0].token_ids), output.finished) for i, output in news] == [
            (0, 8, False),
            (1, 8, False),
        ]
        assert [output.outputs[0].delta for _, output in news] == ["B" * 8] * 2
        gate.open()
        last = await stream.get()
        assert [(output.outputs[0].delta, output.finished) for _, output in last] == [("BB", True)] * 2
        assert await stream.get() == []
        assert sorted(seen) == sorted([2, 4, 6, 8, 10] * 2)

    engine.script = lambda request: [34] * 100
    run(main())


@pytest.mark.parametrize("how", ["close", "cancel", "break", "cancel while it is taken in"])
def test_leaving_ends_the_request_and_no_other(llm: AsyncLLM, engine: ScriptedEngine, gate: Gate, how: str) -> None:
    async def leave() -> None:
        if how == "close":
            (await llm.submit(["a"], LONG)).close()
            return
        outputs = llm.generate("a", LONG)
        task = asyncio.ensure_future(cast(Awaitable[Any], anext(outputs)))
        await asyncio.sleep(0)
        while len(engine.live) < 2 and how != "cancel while it is taken in":
            await asyncio.sleep(0)
        if how == "break":
            gate.open()
            await task
            await cast(Any, outputs).aclose()
            return
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def main() -> None:
        other = await llm.submit(["b"], GREEDY.replace(max_tokens=4))
        await leave()
        gate.open(10)
        news = []
        while more := await other.get():
            news += more
        assert news[-1][1].outputs[0].finish_reason == "length"
        assert await settled(llm, engine) == 0
        assert llm.num_unfinished == 0

    run(main())


def test_a_bad_prompt_starts_none_of_its_call(llm: AsyncLLM, engine: ScriptedEngine) -> None:
    async def main() -> None:
        with pytest.raises(InvalidRequestError, match=r"^prompt: 64 tokens; must be at most 63"):
            await llm.submit(["a", [1] * 64], GREEDY)
        with pytest.raises(InvalidRequestError, match=r"^structured_outputs\.regex='\('"):
            await llm.submit(["a"], GREEDY.replace(structured_outputs={"regex": "("}))
        with pytest.raises(InvalidRequestError, match=r"^priority='x'"):
            await llm.submit(["a"], GREEDY, priority=cast(Any, "x"))
        assert engine.seen == []
        assert llm.num_unfinished == 0
        assert (await all_of(llm, "a"))[-1].finished

    run(main())


def test_what_the_engine_refuses_when_it_is_added(
    llm: AsyncLLM, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = engine.add_request

    def refuse(request: Any) -> None:
        if request.prompt == "b":
            raise InvalidRequestError("prompt: refused")
        add(request)

    monkeypatch.setattr(engine, "add_request", refuse)

    async def main() -> None:
        with pytest.raises(InvalidRequestError, match="refused"):
            await llm.submit(["a", "b"], GREEDY)
        assert await settled(llm, engine) == 0
        assert llm.num_unfinished == 0

    run(main())


def test_the_queue_is_bounded(llm: AsyncLLM, gate: Gate) -> None:
    async def main() -> None:
        llm.max_num_queued_reqs = 4
        first = await llm.submit(["a"], GREEDY.replace(n=3))
        with pytest.raises(QueueFullError, match=r"3 requests wait and run, 2 more are asked for; must be at most 4"):
            await llm.submit(["b", "c"], GREEDY)
        second = await llm.submit(["d"], GREEDY)
        first.close()
        third = await llm.submit(["e"], GREEDY.replace(n=3))
        for stream in (second, third):
            stream.close()
        assert llm.num_unfinished == 0

    run(main())


def test_an_error_of_one_request_is_its_own(llm: AsyncLLM, engine: ScriptedEngine) -> None:
    fault = EngineError("no luck")
    engine.script = lambda request: fault if request.prompt == "bad" else [34] * 100

    async def main() -> None:
        good, bad = await asyncio.gather(all_of(llm, "good"), all_of(llm, "bad"), return_exceptions=True)
        assert bad is fault
        assert cast(Any, good)[-1].outputs[0].finish_reason == "length"

    run(main())
    assert llm.error is None


def failing(engine: ScriptedEngine, *, ends: bool) -> Callable[[Any], None]:
    """Return a step that raises. With `ends` it first ends its requests, as the engine does after a failed step."""

    def step(_: Any) -> None:
        for request in list(engine.live.values()) if ends else []:
            from specrs.engine.request import FinishReason

            request.finish(FinishReason.ERROR, EngineError("the step failed"))
            del engine.live[request.request_id]
        raise RuntimeError("a fault")

    return step


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(llm: AsyncLLM, engine: ScriptedEngine) -> None:
    async def main() -> None:
        for _ in range(MAX_FAULTS - 1):
            engine.before_step = failing(engine, ends=True)
            with pytest.raises(EngineError, match="the step failed"):
                await all_of(llm, "a")
        engine.before_step = lambda _: None
        for _ in range(2):
            # a step that works starts the count anew
            assert (await all_of(llm, "a"))[-1].finished
            engine.before_step = failing(engine, ends=True)
            with pytest.raises(EngineError, match="the step failed"):
                await all_of(llm, "a")
            engine.before_step = lambda _: None

    run(main())
    assert llm.error is None


@pytest.mark.parametrize("ends", [True, False])
def test_a_broken_engine_tells_everybody(llm: AsyncLLM, engine: ScriptedEngine, ends: bool) -> None:
    told = threading.Event()
    llm.on_dead = told.set

    async def main() -> None:
        engine.before_step = failing(engine, ends=ends)
        streams: list[OutputStream] = []
        while llm.error is None:
            try:
                streams.append(await llm.submit(["a", "b"], GREEDY))
                await streams[-1].get()
            except EngineDeadError:
                break
        assert len(streams) == (MAX_FAULTS if ends else 1)
        for attempt in (llm.submit(["c"], GREEDY), llm.stats()):
            with pytest.raises(EngineDeadError, match="a fault"):
                await attempt
        for stream in streams:
            stream.close()

    run(main())
    assert told.wait(30)
    assert llm.num_unfinished == 0


def test_shutdown_ends_streams_with_what_was_made(llm: AsyncLLM, engine: ScriptedEngine, gate: Gate) -> None:
    async def main() -> None:
        stream = await llm.submit(["a"], GREEDY)
        gate.open()
        await stream.get()
        llm._loop.stop()
        gate.open(10)
        last: list[Any] = []
        while news := await stream.get():
            last = news
        assert last[0][1].outputs[0].finish_reason == "abort"
        assert last[0][1].error is None
        with pytest.raises(EngineDeadError, match="shut down"):
            await llm.submit(["b"], GREEDY)

    run(main())
    assert engine.live == {}
    assert llm.error is None


def test_an_event_loop_that_went_away(llm: AsyncLLM, engine: ScriptedEngine, gate: Gate) -> None:
    async def main() -> None:
        await llm.submit(["a"], GREEDY.replace(max_tokens=60))

    run(main())
    gate.open(2)
    while run(settled(llm, engine)):  # the first step delivers nothing; the rest takes a turn or two
        pass
    assert llm.num_unfinished == 0


def test_the_same_texts_as_llm() -> None:
    settings: dict[str, Any] = {"speculative_config": {"num_speculative_tokens": 3}, "seed": 3}
    settings["max_prefill_stall_ms"] = 0  # how soon the two of n=2 draft must not depend on the machine's speed
    prompts = ["def add(a, b):", "class Stack:", [5, 6, 7], "import"]
    each = [
        GREEDY.replace(max_tokens=20, logprobs=2),
        SamplingParams(max_tokens=12, n=2),
        SamplingParams(max_tokens=15, seed=4, prompt_logprobs=1),
        SamplingParams(max_tokens=9, structured_outputs={"choice": [" os", " sys"]}, temperature=0.0),
    ]
    other = AsyncLLM(**settings)

    async def main() -> list[RequestOutput]:
        # one after another, because other requests may change its drafts, and so its text
        return [(await all_of(other, prompt, params))[-1] for prompt, params in zip(prompts, each, strict=True)]

    try:
        got = run(main())
        stats = run(other.stats())
    finally:
        assert other.shutdown(timeout=30)
    llm = LLM(**settings)
    wanted = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt, params in zip(prompts, each, strict=True)]
    for mine, theirs in zip(got, wanted, strict=True):
        for a, b in zip(mine.outputs, theirs.outputs, strict=True):
            assert (a.text, a.token_ids, a.finish_reason, a.logprobs) == (
                b.text,
                b.token_ids,
                b.finish_reason,
                b.logprobs,
            )
        assert mine.prompt_logprobs == theirs.prompt_logprobs
        assert mine.metrics.acceptance_histogram == theirs.metrics.acceptance_histogram
    assert stats.acceptance_histogram == llm.stats().acceptance_histogram


@pytest.mark.parametrize(("given", "bound"), [(None, 75.0), (0, 0.0), (40, 40.0)])
def test_prompts_hold_up_streams_for_75_ms_unless_told(
    engine: ScriptedEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, given: float | None, bound: float
) -> None:
    built = []

    def build(config: EngineConfig) -> ScriptedEngine:
        built.append(config.max_prefill_stall_ms)
        return engine

    monkeypatch.setattr("specrs.engine.build.build_engine", build)
    monkeypatch.setattr("specrs.engine.load.load_tokenizer", lambda config: tokenizer)
    assert AsyncLLM(max_prefill_stall_ms=given).shutdown(timeout=30)
    assert built == [bound]
    assert EngineConfig(max_prefill_stall_ms=given).max_prefill_stall_ms == given, "LLM has no bound of its own"


@pytest.mark.parametrize("closed_early", [False, True])
def test_what_was_reported_of_a_request_is_freed_without_a_collection(llm: AsyncLLM, closed_early: bool) -> None:
    """Check that what a request holds is freed without a garbage collection, which would stop every stream for as long
    as it takes."""

    async def main() -> weakref.ref[OutputStream]:
        async with await llm.submit(["a", "b"], LONG) as stream:
            while not closed_early and await stream.get():
                pass
        for _ in range(2):  # the engine's thread has the last command that it was given
            await llm.in_engine(lambda: None)
        return weakref.ref(stream)

    gc.disable()
    try:
        assert run(main())() is None
    finally:
        gc.enable()


def test_a_rejected_grammar_is_freed_without_a_collection(llm: AsyncLLM) -> None:
    """Check that a rejected grammar is freed without a garbage collection, although its exception refers to frames and
    futures."""
    freed = threading.Event()

    async def refused() -> None:
        params = LONG.replace(structured_outputs=StructuredOutputsParams(regex="(a"))
        try:
            await llm.submit(["a"], params)
        except InvalidRequestError as fault:
            weakref.finalize(fault, freed.set)
            return
        raise AssertionError("not refused")

    async def main() -> bool:
        await refused()
        # The thread that compiled may hold the fault a moment longer than its future.
        return await asyncio.to_thread(freed.wait, 10)

    gc.disable()
    try:
        assert run(main())
    finally:
        gc.enable()
