"""An engine that has nothing to do settles what is in flight and checks its state."""

import asyncio
from typing import Any

import pytest
from specrs import LLM, AsyncLLM, SamplingParams
from specrs.core import IntegrityError, Outputs, Scheduler
from specrs.engine.engine import Engine
from specrs.errors import EngineDeadError

from engine.harness import assert_idle
from engine.scripted_runner import make_engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
PROMPT = {"prompt_token_ids": [1, 2, 3]}


class Checked:
    """A scheduler that counts its invariant checks, and fails them once its state is corrupted."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.checks = 0
        self.corrupt = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def check_integrity(self) -> None:
        self.checks += 1
        assert self.scheduler.num_in_flight == 0
        if self.corrupt:
            raise IntegrityError("block 3 is in no list")


class Unwrapping:
    """Outputs that settle with the scheduler inside a `Checked`."""

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.outputs, name)

    def settle(self, scheduler: Any, *arguments: Any, **more: Any) -> Any:
        return self.outputs.settle(scheduler.scheduler, *arguments, **more)


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest) -> Engine:
    made = make_engine(request.param)
    made.scheduler = Checked(made.scheduler)  # type: ignore[assignment]
    made.outputs = Unwrapping(made.outputs)  # type: ignore[assignment]
    return made


def checks(engine: Engine) -> int:
    assert isinstance(engine.scheduler, Checked)
    engine._check_after = 0.0  # the next may come immediately
    return engine.scheduler.checks


def test_generate_checks_once_at_its_end(engine: Engine) -> None:
    llm = LLM.from_engine(engine)
    for count in (1, 2):
        llm.generate([PROMPT] * 3, PARAMS, use_tqdm=False)
        assert_idle(engine)  # its own check is one more
        engine.settle_idle()
        assert checks(engine) == 2 * count


def test_a_stream_checks_once_at_its_end(engine: Engine) -> None:
    llm = LLM.from_engine(engine)
    for _ in llm.stream(PROMPT, PARAMS):
        assert checks(engine) == 0
    assert checks(engine) == 1
    stream = llm.stream(PROMPT, PARAMS.replace(max_tokens=40))
    next(stream)
    llm.generate([PROMPT], PARAMS, use_tqdm=False)
    assert checks(engine) == 1, "the other still runs"
    stream.close()
    assert checks(engine) == 2


def test_checks_take_a_hundredth_of_the_time(engine: Engine) -> None:
    llm = LLM.from_engine(engine)
    llm.generate([PROMPT], PARAMS, use_tqdm=False)
    engine._check_after = float("inf")
    llm.generate([PROMPT], PARAMS, use_tqdm=False)
    assert checks(engine) == 1


def test_generate_finds_a_corrupt_state(engine: Engine) -> None:
    engine.scheduler.corrupt = True  # type: ignore[attr-defined]
    with pytest.raises(IntegrityError, match="block 3"):
        LLM.from_engine(engine).generate([PROMPT], PARAMS, use_tqdm=False)


def test_the_engines_thread_checks_when_it_has_nothing_to_do(engine: Engine) -> None:
    async def main() -> None:
        llm = AsyncLLM.from_engine(engine)
        for count in (1, 2):
            async for _ in llm.generate(PROMPT, PARAMS):
                pass
            async with asyncio.timeout(30):
                while checks(engine) < count:  # at depth 2 a step is still in flight
                    await llm.in_engine(lambda: None)
            assert checks(engine) == count
        engine.scheduler.corrupt = True  # type: ignore[attr-defined]
        async for output in llm.generate(PROMPT, PARAMS):
            last = output
        assert last.finished, "the answer is out before the check"
        llm._loop.join(30)
        assert llm.error is not None
        assert "block 3" in str(llm.error)
        with pytest.raises(EngineDeadError):
            await llm.submit([PROMPT], PARAMS)
        llm.shutdown()

    asyncio.run(main())
