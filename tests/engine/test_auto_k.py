"""num_speculative_tokens="auto": the same text, statistics without the warm-up, and draft KV that is rebuilt after a
fault."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from models.native_passes import tensors_of
from specrs import LLM, SamplingParams
from specrs.backends.cpu.runner import CpuRunner
from specrs.backends.ring import Header, RingSlot
from specrs.core import CostModel, SpeculationPlanner
from specrs.engine import warm_up
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.parts import EngineParts
from specrs.engine.request import Request
from specrs.pair.prompts import PROMPTS

from engine.harness import Bank, assert_idle, config, request, run, weights

K = 4


@pytest.fixture(autouse=True)
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the warm-up short: the costs of steps do not matter to these tests."""
    monkeypatch.setattr(warm_up, "SECONDS", 0.1)


def auto_engine(bank: Bank, draft: str = "close", most: int | None = K, **fields: object) -> Engine:
    """Make an engine that chooses up to `most` drafts."""
    path = bank.drafts[draft]
    settings = config(bank.target, path, k=1, dtype=bank.dtype, **fields)
    assert settings.speculative_config is not None
    speculative = replace(settings.speculative_config, num_speculative_tokens="auto", max_num_speculative_tokens=most)
    return build_engine(replace(settings, speculative_config=speculative), weights(bank.target, path, bank.dtype))


def restless(engine: Engine, seed: int) -> None:
    """Replace the planner by one whose costs change every few steps, so that K jumps, also to 0."""
    chance, settled = random.Random(seed), 0

    def jump(slot: RingSlot, header: Header, ms: float) -> None:
        nonlocal settled
        settled += 1
        if settled % 3 == 0:
            most = engine.num_speculative_tokens
            costs = CostModel([1, 8], [0, 1, most], [[1.0, 1 + chance.random(), 1 + 4 * chance.random()]] * 2)
            engine.planner = SpeculationPlanner(
                max_num_seqs=engine.config.max_num_seqs, num_speculative_tokens=most, costs=costs
            )

    engine.watch = jump


def test_what_is_one_call_on_a_cpu_is_measured_for_a_shorter_time(
    native_qwen_bank: Bank, qwen_bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that costs of native passes are measured for a shorter time. With no time at all, two batches are measured
    in one round; without a bound, every round is run."""
    measured: list[tuple[int, int]] = []

    def measure(_: object, batch: int, k: int) -> float:
        measured.append((batch, k))
        return 1.0

    monkeypatch.setattr(warm_up, "_measure", measure)
    monkeypatch.setattr(warm_up, "SECONDS", math.inf)
    monkeypatch.setattr(warm_up, "NATIVE_SECONDS", 0.0)
    for bank, rounds in ((native_qwen_bank, 1), (qwen_bank, warm_up.MAX_ROUNDS)):
        measured.clear()
        draft = bank.drafts["close"]
        settings = config(bank.target, draft, k=1, dtype=bank.dtype, max_num_seqs=8)
        assert settings.speculative_config is not None
        speculative = replace(settings.speculative_config, num_speculative_tokens="auto", max_num_speculative_tokens=K)
        build_engine(replace(settings, speculative_config=speculative))
        # Once with drafts of the host, and once with those of the model.
        assert measured.count((2, K)) == 2 * rounds
        assert max(batch for batch, _ in measured) == (2 if rounds == 1 else 8)


@pytest.mark.parametrize(("draft_ms", "many"), [(0.02, True), (0.24, True), (0.26, False), (2.0, False)])
def test_many_drafts_are_measured_where_drafts_are_cheap(
    native_qwen_bank: Bank, monkeypatch: pytest.MonkeyPatch, draft_ms: float, many: bool
) -> None:
    measured: list[tuple[int, int]] = []

    def measure(_: object, batch: int, k: int) -> float:
        measured.append((batch, k))
        return 1.0 + batch * draft_ms * k + (0.5 if k == 16 else 0.0)

    monkeypatch.setattr(warm_up, "_measure", measure)
    monkeypatch.setattr(warm_up, "NATIVE_SECONDS", math.inf)
    engine = auto_engine(native_qwen_bank, most=None)
    assert engine.planner is not None
    assert engine.planner.num_speculative_tokens == 16
    costs = engine.planner.costs()
    assert costs.ks == [0, 1, 2, 3, 4, 8, *([16] if many else [])]
    assert {k for _, k in measured} == set(costs.ks)
    for batch in (1, 2, 4, 8):
        assert costs.ms(batch, 16) == pytest.approx(1.0 + 16 * batch * draft_ms + (0.5 if many else 0.0))

    # Without time only one request runs with many drafts; for more, costs continue the line of few drafts.
    measured.clear()
    monkeypatch.setattr(warm_up, "NATIVE_SECONDS", 0.0)
    engine = auto_engine(native_qwen_bank, most=None)
    assert engine.planner is not None
    assert ((1, 16) in measured) == many
    assert (2, 16) not in measured
    assert engine.planner.costs().ms(2, 16) == pytest.approx(1.0 + 32 * draft_ms)


def test_a_lag_is_closed_once_for_each_measurement(qwen_bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a lag of draft KV is closed once for each measurement: no further step is run once the draft's KV is
    complete."""
    chunks = drafting = 0
    execute = CpuRunner.execute

    def counted(runner: CpuRunner, slot: RingSlot, header: Header) -> None:
        nonlocal chunks, drafting
        execute(runner, slot, header)
        chunks += header.num_draft_chunks
        drafting += header.max_k > 0

    monkeypatch.setattr(CpuRunner, "execute", counted)
    monkeypatch.setattr(warm_up, "_measure", lambda *_: 1.0)
    engine = auto_engine(qwen_bank, most=None, max_steps_in_flight=1)
    assert engine.planner is not None
    assert chunks == drafting == warm_up.NUM_STEPS + 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("draft", "most"), [("close", K), ("close", 16), ("small", K)])
def test_greedy_text_is_the_targets_whatever_k_does(native_qwen_bank: Bank, draft: str, most: int, depth: int) -> None:
    for seed in range(2):
        engine = auto_engine(native_qwen_bank, draft, most, max_steps_in_flight=depth, max_num_seqs=3)
        if seed:
            restless(engine, seed)
        jobs = []
        for i, bound in enumerate((None, 0, 1, 3, None, 2, most - 1)):
            job = request(i, native_qwen_bank.prompts[3 + i], k=bound, max_tokens=40, engine_k=most, ignore_eos=True)
            engine.add_request(job)
            jobs.append((job, bound, native_qwen_bank.expected(3 + i, 40, ignore_eos=True)))
        run(engine)
        for job, bound, expected in jobs:
            assert job.output_token_ids == expected
            assert job.acceptance.draft_tokens <= (most if bound is None else bound) * job.acceptance.drafts


def test_coupled_text_does_not_change_with_k() -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=48)
    texts = []
    for k in (0, 3, "auto"):
        speculative = {"num_speculative_tokens": k, "rejection_sample_method": "coupled"}
        llm = LLM(speculative_config=speculative, max_model_len=256, max_num_seqs=2)
        outputs = llm.generate(list(PROMPTS[:3]), params, use_tqdm=False)
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1] == texts[2]


def test_nothing_is_left_of_the_warm_up(qwen_bank: Bank) -> None:
    engine = auto_engine(qwen_bank)
    assert_idle(engine)
    stats = engine.stats()
    assert (stats.draft_tokens, stats.draft_passes, stats.target_passes, stats.generation_tokens) == (0, 0, 0, 0)
    assert (stats.prompt_tokens, stats.num_cached_tokens, stats.num_preemptions, stats.drafts) == (0, 0, 0, 0)
    assert engine.planner is not None
    assert engine.planner.num_speculative_tokens == K
    costs = engine.planner.costs()
    assert (costs.batches, costs.ks) == ([1, 2, 4, 8], [0, 1, 2, 3, 4])
    assert all(row == sorted(row) for row in costs.table)
    # What the warm-up fed, fed again: none of it comes from the prefix cache.
    length = 16
    for i in range(2):
        prompt = [(i * 7919 + j * 104729 + 1) % 211 for j in range(length)]
        engine.add_request(request(i, prompt, k=0, max_tokens=2, engine_k=K))
    run(engine)
    assert engine.stats().num_cached_tokens == 0


def test_one_engine_is_made_and_is_complete(qwen_bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that measuring costs makes no second engine, and that a new engine has its planner."""
    made: list[Engine] = []
    init = Engine.__init__

    def noted(engine: Engine, parts: EngineParts) -> None:
        init(engine, parts)
        assert engine.planner is not None
        assert engine.runner.num_target_passes == 0
        made.append(engine)

    monkeypatch.setattr(Engine, "__init__", noted)
    engine = auto_engine(qwen_bank)
    assert made == [engine]
    assert (engine.scheduler.num_steps, engine.scheduler.num_free_blocks) == (0, engine.scheduler.num_blocks)


def test_costs_are_those_of_the_steps(qwen_bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check measured costs with a clock that only passes advance: by 3 ms for a target's pass, 0.5 ms for a draft's,
    and a little for each row."""
    now = 0.0
    monkeypatch.setattr(warm_up.time, "perf_counter", lambda: now)
    execute = CpuRunner.execute

    def timed(runner: CpuRunner, slot: RingSlot, header: Header) -> None:
        nonlocal now
        execute(runner, slot, header)
        rows = header.num_decode + header.num_prefill_tokens
        now += 1e-3 * (3.0 + 0.5 * header.max_k + 0.01 * rows + 0.25 * header.num_draft_tokens)

    monkeypatch.setattr(CpuRunner, "execute", timed)
    monkeypatch.setattr(warm_up, "SECONDS", 1e9)
    monkeypatch.setattr(warm_up, "MAX_ROUNDS", 2)
    engine = auto_engine(qwen_bank)
    assert engine.planner is not None
    costs = engine.planner.costs()
    for batch in costs.batches:
        for k in costs.ks:
            assert costs.ms(batch, k) == pytest.approx(3.0 + 0.5 * k + 0.01 * batch), (batch, k)


def test_a_context_too_short_to_draft_in_still_serves(qwen_bank: Bank) -> None:
    engine = auto_engine(qwen_bank, max_model_len=3)
    engine.add_request(request(0, [5, 5], k=None, max_tokens=1, engine_k=K, ignore_eos=True))
    run(engine)
    assert engine.stats().drafts == 0


@pytest.mark.parametrize(("draft", "better"), [("equal", True), ("small", False)])
def test_the_planner_is_told_what_became_of_every_step(native_qwen_bank: Bank, draft: str, better: bool) -> None:
    engine = auto_engine(native_qwen_bank, draft)
    assert engine.planner is not None
    flat_costs(engine, 0.05)
    before = engine.planner.conditional_acceptance()[0]
    engine.add_request(request(0, native_qwen_bank.prompts[4], k=None, max_tokens=40, engine_k=K, ignore_eos=True))
    run(engine)
    assert engine.stats().drafts > 5
    after = engine.planner.conditional_acceptance()[0]
    assert after > before if better else after < before


def flat_costs(engine: Engine, draft_ms: float) -> None:
    """Give the engine a planner with fixed costs, so that nothing depends on this machine's speed."""
    rows = engine.config.max_num_seqs
    line = [[1.0 + draft_ms * k for k in (0, 1, 2)]]
    engine.planner = SpeculationPlanner(
        max_num_seqs=rows, num_speculative_tokens=engine.num_speculative_tokens, costs=CostModel([1], [0, 1, 2], line)
    )
    learn = engine._learn
    engine._learn = lambda slot, ms: learn(slot, None)  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_draft_whose_kv_is_overwritten_is_rebuilt_and_acceptance_comes_back(
    native_qwen_bank: Bank, depth: int
) -> None:
    # The draft is the target, so every draft is accepted, until its KV is gone.
    engine = auto_engine(
        native_qwen_bank,
        "equal",
        max_steps_in_flight=depth,
        max_model_len=512,
        max_num_seqs=2,
        max_num_batched_tokens=1024,
    )
    flat_costs(engine, 0.05)
    jobs = [
        request(i, native_qwen_bank.prompts[i], k=None, max_tokens=440, engine_k=K, ignore_eos=True) for i in (4, 5)
    ]
    for job in jobs:
        engine.add_request(job)

    def acceptance(steps: int) -> float:
        before = engine.stats()
        for _ in range(steps):
            engine.step()
        after = engine.stats()
        return (after.accepted_tokens - before.accepted_tokens) / max(1, after.draft_tokens - before.draft_tokens)

    acceptance(10)
    assert acceptance(20) > 0.95
    drafter = engine.drafter
    assert drafter is not None
    noise = torch.Generator().manual_seed(0)
    for layer in tensors_of(drafter.kv_cache).layers:
        layer.copy_(torch.randn(layer.shape, generator=noise, dtype=layer.dtype) * 3)
    assert acceptance(4) < 0.5
    acceptance(25)
    assert acceptance(20) > 0.95
    assert not any(job.finished for job in jobs)
    # The blocks that they leave to others have been built again, too.
    prompt = jobs[0].prompt_token_ids + jobs[0].output_token_ids[:64]
    for job in jobs:
        engine.abort(job.request_id)
    late = Request(
        9,
        prompt,
        SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False),
        num_speculative_tokens=K,
    )
    engine.add_request(late)
    run(engine)
    assert late.num_cached_tokens > 0
    assert late.acceptance.acceptance_rate > 0.9


def test_a_useless_draft_ends_at_no_drafts(native_qwen_bank: Bank) -> None:
    engine = auto_engine(native_qwen_bank, "small", max_model_len=512, max_num_seqs=2)
    flat_costs(engine, 0.5)
    for i in (4, 5):
        engine.add_request(request(i, native_qwen_bank.prompts[i], k=None, max_tokens=440, engine_k=K, ignore_eos=True))
    for _ in range(100):
        engine.step()
    before = engine.stats().drafts
    for _ in range(250):
        engine.step()
    assert engine.stats().drafts - before <= 16, "two probes at the most"
