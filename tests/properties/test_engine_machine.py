"""A state machine drives the engine with one or two steps in flight: whatever the order of events, text and invariants
hold."""

import contextlib
from pathlib import Path
from typing import ClassVar

import pytest
from engine.harness import LONGEST, Bank, assert_idle, make_bank, make_engine, poison, request
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from specrs.core import NotRunningError
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from sweep import sweep

K = 4


class EngineMachine(RuleBasedStateMachine):
    """Admits, aborts, preempts and steps in any order, with a pool that is often short of blocks."""

    bank: ClassVar[Bank]
    live = Bundle("live")

    @initialize(
        blocks=st.sampled_from([16, 20, 40]),
        prefix=st.booleans(),
        budget=st.sampled_from([7, 64]),
        depth=st.sampled_from([1, 2, 2]),
    )
    def start(self, blocks: int, prefix: bool, budget: int, depth: int) -> None:
        self.engine: Engine = make_engine(
            self.bank.target,
            self.bank.drafts["close"],
            k=K,
            max_steps_in_flight=depth,
            block_size=8,
            num_gpu_blocks_override=blocks,
            enable_prefix_caching=prefix,
            max_num_batched_tokens=budget,
            max_num_seqs=4,
        )
        poison(self.engine)
        self.jobs: list[tuple[Request, int]] = []

    @rule(
        target=live,
        prompt=st.integers(0, 19),
        k=st.one_of(st.none(), st.integers(0, K)),
        length=st.integers(1, LONGEST),
        priority=st.integers(-1, 1),
    )
    def admit(self, prompt: int, k: int | None, length: int, priority: int) -> Request:
        job = request(len(self.jobs), self.bank.prompts[prompt], k=k, max_tokens=length, engine_k=K)
        job.priority = priority
        self.engine.add_request(job)
        self.jobs.append((job, prompt))
        return job

    @rule(job=consumes(live))
    def abort(self, job: Request) -> None:
        if not job.finished:
            self.engine.abort(job.request_id)
            assert job.finish_reason == "abort"

    @rule(target=live, job=consumes(live))
    def preempt(self, job: Request) -> Request | object:
        if job.finished:
            return multiple()
        with contextlib.suppress(NotRunningError):  # it waits already
            self.engine.scheduler.preempt(job.request_id)
        return job

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @invariant()
    def core_is_sound(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        steps = 0
        while self.engine.has_unfinished():
            self.engine.step()
            steps += 1
            assert steps < 20_000, "the engine makes no progress"
        assert_idle(self.engine)
        for job, prompt in self.jobs:
            expected = self.bank.expected(prompt, job.params.max_tokens)
            if job.finish_reason == "abort":
                assert job.output_token_ids == expected[: len(job.output_token_ids)]
            else:
                assert job.output_token_ids == expected


@pytest.fixture(scope="module")
def machine_bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    folder: Path = tmp_path_factory.mktemp("machine")
    return make_bank(folder)


def test_engine_machine(machine_bank: Bank) -> None:
    EngineMachine.bank = machine_bank
    run_state_machine_as_test(
        EngineMachine,
        settings=sweep(25, stateful_step_count=40),
    )
