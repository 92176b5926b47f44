"""Text of an engine on ranks: that of one process, token for token, in float64, for any drafter and sampling."""

import random
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.faulty_drafter import Faulty
from engine.harness import Bank, assert_idle, greedy_jobs, make_bank, request, run, run_greedy
from engine.harness import config as engine_config
from engine.test_equivalence import engine_settings
from hypothesis import given
from hypothesis import strategies as st
from specrs import LLM, SamplingParams
from specrs.backends.blueprint import Blueprint
from specrs.backends.cpu.runner import CpuRunner
from specrs.backends.ranks import LeadingRunner
from specrs.backends.ring import Header, RingSlot
from specrs.config import EngineConfig
from specrs.drafters.cpu import CpuDrafter
from specrs.engine.build import build_engine
from specrs.engine.weights import load_weights
from specrs.errors import CheckpointError, RankLostError
from specrs.parallel.ranks import Ranks
from specrs.tokenizer import Tokenizer
from sweep import stride, sweep
from torch import Tensor

from parallel.harness import engine_on_threads
from parallel.threads import on_ranks

PROMPTS = ["class Point:\n    def __init__(self, x, y):\n        self.x", "import os\n\n\ndef "]
DRAFTERS: dict[str, dict[str, Any]] = {
    "a draft model": {"num_speculative_tokens": 4},
    "a draft model in parts": {"num_speculative_tokens": 4, "draft_tensor_parallel_size": 2},
    "a draft model by shared noise": {"num_speculative_tokens": 3, "rejection_sample_method": "coupled"},
    "a head": {"method": "eagle3", "num_speculative_tokens": 3},
    "a head in parts": {"method": "eagle3", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2},
    "the text": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2},
    "two drafters": {
        "method": "suffix,draft_model",
        "num_speculative_tokens": 4,
        "rejection_sample_method": "coupled",
    },
}
SAMPLED = [
    SamplingParams(temperature=0.0, max_tokens=16, logprobs=2),
    SamplingParams(temperature=1.0, seed=1, max_tokens=12, n=2),
    SamplingParams(temperature=0.8, seed=2, max_tokens=12, top_p=0.9, top_k=30, min_p=0.01, repetition_penalty=1.1),
]
GRAMMAR = SamplingParams(temperature=0.7, seed=3, max_tokens=12, structured_outputs={"regex": r"[a-f]{4,9}\n"})


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Checkpoints of a small Qwen3 whose heads can be divided between two ranks. Its draft model has one KV head, which
    each of the two ranks holds."""
    return make_bank(tmp_path_factory.mktemp("ranks"), kv_heads=2)


def degree_of(config: EngineConfig, degree: int) -> EngineConfig:
    """Return `config` with a draft of this degree of tensor parallelism."""
    assert config.speculative_config is not None
    speculative = replace(config.speculative_config, draft_tensor_parallel_size=degree)
    return replace(config, speculative_config=speculative)


def test_embeddings(bank: Bank) -> None:
    """Check embeddings. Ranks add in another order than one process, so the last bits may differ."""
    alone = LLM.from_engine(build_engine(engine_config(bank.target, None, k=0)))
    prompts = [prompt for prompt in bank.prompts[:4] if prompt]
    expected = [output.outputs.embedding for output in alone.embed(prompts, use_tqdm=False)]
    with engine_on_threads(engine_config(bank.target, None, k=0, tensor_parallel_size=2)) as engine:
        found = LLM.from_engine(engine).embed(prompts, use_tqdm=False)
        for output, other in zip(found, expected, strict=True):
            assert output.outputs.embedding == pytest.approx(other, abs=1e-6)
        assert_idle(engine)


@sweep(18)
@given(data=st.data())
def test_greedy_text(data: st.DataObject, bank: Bank) -> None:
    settings = data.draw(engine_settings(), label="engine")
    k = data.draw(st.integers(1, 6), label="engine K")
    draft = data.draw(st.sampled_from(["close", "small", "equal"]), label="draft")
    config = engine_config(bank.target, bank.drafts[draft], k=k, tensor_parallel_size=2, **settings)
    degree = data.draw(st.sampled_from([1, 2]), label="the draft's degree")
    with engine_on_threads(degree_of(config, degree)) as engine:
        run_greedy(engine, bank, data.draw(greedy_jobs(bank, k), label="requests"), k)
        assert_idle(engine)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_is_that_of_one_process(drafter: str, tokenizer: Tokenizer) -> None:
    settings = {"dtype": "float64", "max_model_len": 128, "device": "cpu"}
    speculative = DRAFTERS[drafter]
    whole = LLM(speculative_config=speculative | {"draft_tensor_parallel_size": 1}, **settings)
    config = EngineConfig.from_kwargs(speculative_config=speculative, tensor_parallel_size=2, **settings)
    with engine_on_threads(config) as engine:
        split = LLM.from_engine(engine, tokenizer)
        for params in [*SAMPLED, GRAMMAR] if drafter == "a draft model in parts" else SAMPLED:
            made, expected = (llm.generate(PROMPTS, params, use_tqdm=False) for llm in (split, whole))
            for one, other in zip(made, expected, strict=True):
                assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
        ran, expected = split.stats(), whole.stats()
        # Of two drafters the one that is worth more drafts, by times that are measured.
        assert drafter == "two drafters" or ran.acceptance_histogram == expected.acceptance_histogram
        assert ran.num_cached_tokens == expected.num_cached_tokens > 0
        assert ran.accepted_tokens > 0


@pytest.mark.parametrize("drafter", ["a draft model in parts", "a head"])
def test_a_quantized_cache(drafter: str, tokenizer: Tokenizer) -> None:
    settings = {"dtype": "float64", "max_model_len": 128, "device": "cpu", "kv_cache_dtype": "fp8"}
    speculative = DRAFTERS[drafter]
    whole = LLM(speculative_config=speculative | {"draft_tensor_parallel_size": 1}, **settings)
    config = EngineConfig.from_kwargs(speculative_config=speculative, tensor_parallel_size=2, **settings)
    with engine_on_threads(config) as engine:
        runner = engine.runner
        assert isinstance(runner, LeadingRunner)
        assert {layer.dtype for layer in runner.kv_cache.layers} == {torch.float8_e4m3fn}
        split = LLM.from_engine(engine, tokenizer)
        made, expected = (llm.generate(PROMPTS, SAMPLED[0], use_tqdm=False) for llm in (split, whole))
        assert [one.outputs[0].token_ids for one in made] == [one.outputs[0].token_ids for one in expected]
        assert split.stats().accepted_tokens > 0


def test_four_ranks(bank: Bank) -> None:
    """Check four ranks, more than there are KV heads."""
    config = engine_config(bank.target, bank.drafts["close"], k=3, tensor_parallel_size=4)
    with engine_on_threads(config) as engine:
        run_greedy(engine, bank, [(i, None, 20, 1) for i in range(6)], 3)


@pytest.mark.parametrize(("degree", "draft_heads"), [(1, 2), (2, 1)])
def test_blocks_count_a_part_of_the_target_and_the_whole_draft(bank: Bank, degree: int, draft_heads: int) -> None:
    """Check that blocks count a part of the target and the whole draft, or a part of it; both have two KV heads and two
    layers."""
    config = degree_of(engine_config(bank.target, bank.drafts["close"], k=3, tensor_parallel_size=2), degree)
    found = on_ranks(2, lambda ranks: Blueprint(config, load_weights(config, ranks)).bytes_per_block)
    of_a_head = 2 * config.block_size * 48 * 2 * 8  # layers, positions, numbers, K and V, bytes
    assert found == [of_a_head * (1 + draft_heads)] * 2


def on_other_rank() -> bool:
    """Return whether this thread is another rank than 0. Rank 0 of `engine_on_threads` is the main thread."""
    return threading.current_thread() is not threading.main_thread()


FAILING: dict[str, dict[str, Any]] = {
    "a draft model": {},
    "a draft model in parts": {"draft_tensor_parallel_size": 2},
    "a head": {"method": "eagle3"},
    "a head in parts": {"method": "eagle3", "draft_tensor_parallel_size": 2},
    "two drafters": {"method": "suffix,draft_model"},
}
WHERE: dict[str, Callable[[], bool]] = {
    "rank 0": lambda: not on_other_rank(),
    "rank 1": on_other_rank,
    "every rank": lambda: True,
}
SHORT = {"dtype": "float64", "max_model_len": 128, "device": "cpu", "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def undrafted() -> list[list[int]]:
    """Token ids of all completions of `PROMPTS` with `SAMPLED[:2]`, then with `GRAMMAR`, generated without a drafter.
    With `coupled`, no drafter changes them."""
    return token_ids(LLM(**SHORT))


def token_ids(llm: LLM) -> list[list[int]]:
    made = [llm.generate(PROMPTS, params, use_tqdm=False) for params in (*SAMPLED[:2], GRAMMAR)]
    return [completion.token_ids for outputs in made for output in outputs for completion in output.outputs]


@pytest.mark.parametrize(
    ("drafter", "where"),
    [
        ("a draft model", "rank 0"),
        ("a draft model", "rank 1"),
        ("a draft model in parts", "rank 1"),
        ("a draft model in parts", "every rank"),
        ("a head", "rank 0"),
        ("a head in parts", "rank 1"),
        ("two drafters", "every rank"),
    ][:: stride(2)],
)
def test_a_drafter_that_fails_costs_its_drafts(
    drafter: str,
    where: str,
    undrafted: list[list[int]],
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Check that a failing drafter costs its drafts on all ranks: texts stay, later steps draft, no rank ends or gets
    other results, and its NaN is never read. The rank that failed logs it, and rank 0 counts it."""
    speculative = {"num_speculative_tokens": 3, "rejection_sample_method": "coupled"} | FAILING[drafter]
    config = EngineConfig.from_kwargs(
        speculative_config=speculative, tensor_parallel_size=2, distributed_timeout=20.0, **SHORT
    )
    faulty = Faulty({1, 3, 8, 30}.__contains__, monkeypatch, WHERE[where])
    with engine_on_threads(config) as engine:
        split = LLM.from_engine(engine, tokenizer)
        assert token_ids(split) == undrafted
        stats = split.stats()
        (failures,) = (
            count for name, count in stats.draft_errors.items() if name not in ("suffix", "grammar", "prediction")
        )
        assert 3 <= failures <= faulty.raised
        assert stats.draft_passes > 40
        assert stats.accepted_tokens > 0
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("failed, and its step went on" in message for message in told) == 1
    assert sum("on rank 1 of 2 the drafter failed" in message for message in told) == (where != "rank 0")


def test_ranks_that_come_to_other_results_end(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that ranks with different results end with an error. Here they draft different tokens, as different
    processors might."""
    source = CpuRunner._draft_source

    def other(runner: CpuRunner, drafter: CpuDrafter) -> Any:
        model = source(runner, drafter)
        forward = model.forward

        def negated(*args: Any) -> Any:
            logits, *more = forward(*args)
            return (logits if logits is None else -logits, *more)

        if on_other_rank():
            model.forward = negated
        return model

    monkeypatch.setattr(CpuRunner, "_draft_source", other)
    config = engine_config(bank.target, bank.drafts["equal"], k=1, tensor_parallel_size=2, distributed_timeout=1.0)
    with engine_on_threads(config, exit_code=1) as engine:
        job = request(0, bank.prompts[4], k=None, max_tokens=60, engine_k=1, ignore_eos=True)
        engine.add_request(job)
        with pytest.raises(RankLostError, match="rank 1 of 2 came to other results than rank 0"):
            run(engine)


@pytest.mark.parametrize("at", random.Random(0).sample(range(1, 200), 20)[:: stride(10)])
def test_a_rank_that_fails_anywhere(at: int, bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a rank that fails at a random exchange: every request of rank 0 ends with an error that names the rank; the
    scheduler's state agrees."""
    config = engine_config(bank.target, bank.drafts["close"], k=3, tensor_parallel_size=2, distributed_timeout=1.0)
    gather = Ranks.gather

    def fail(ranks: Ranks, x: Tensor) -> Tensor:
        if ranks.rank == 1 and ranks.num_begun == at:
            raise CheckpointError("as on purpose")
        return gather(ranks, x)

    monkeypatch.setattr(Ranks, "gather", fail)
    with engine_on_threads(config, exit_code=1) as engine:
        jobs = [request(i, bank.prompts[i], k=None, max_tokens=100, engine_k=3, ignore_eos=True) for i in range(3)]
        for job in jobs:
            engine.add_request(job)
        while engine.has_unfinished():
            with pytest.raises(RankLostError, match="rank 1 of 2 failed: CheckpointError"):
                run(engine)
        assert all("rank 1 of 2 failed" in str(job.error) for job in jobs)
        assert_idle(engine)


def test_an_interrupt_waits_for_the_step(bank: Bank) -> None:
    """Check that an interrupt waits for the step, so that no rank is left in it: the step's requests end, the engine
    goes on."""
    config = engine_config(bank.target, bank.drafts["close"], k=3, tensor_parallel_size=2, distributed_timeout=2.0)
    with engine_on_threads(config) as engine:
        assert isinstance(engine.runner, LeadingRunner)
        own, ended = engine.runner.runner, []
        execute = own.execute

        def interrupted(slot: RingSlot, header: Header) -> None:
            signal.raise_signal(signal.SIGINT)
            execute(slot, header)
            ended.append(header.step_id)

        own.execute = interrupted  # type: ignore[method-assign]
        engine.add_request(request(0, bank.prompts[4], k=None, max_tokens=20, engine_k=3))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert ended == [0]
        assert not engine.requests
        own.execute = execute  # type: ignore[method-assign]
        run_greedy(engine, bank, [(5, None, 20, 1), (6, None, 20, 1)], 3)
