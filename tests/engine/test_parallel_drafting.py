"""Parallel drafting (PARD): drafts and counts equal a plain script's, text equals that without drafts; wrong input."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import edit_json, make_checkpoint
from hf_reference import Statistics, count_parallel_acceptance
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.ring import Header, RingSlot
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.drafters.parallel import LoadedParallel
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.weights import load_weights
from specrs.errors import InvalidConfigError
from sweep import sweep

from engine.harness import LONGEST, Bank, config, greedy_jobs, native_bank, poison, request, run, submit
from engine.parallel_draft import MASK, loaded, with_parallel_draft
from engine.test_equivalence import engine_settings
from engine.test_sampling import SAMPLED, TWO_TOKENS, check_two_token_draws, sampled, vanilla_text, with_rule

DTYPES = ["float64", "float32"]
"""Dtypes: torch computes in float64, native passes in float32."""
WEIGHTS: dict[tuple[str, str], Weights] = {}


@pytest.fixture(scope="session")
def banks(qwen_bank: Bank, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bank]:
    """Banks by dtype."""
    bank = with_parallel_draft(qwen_bank, tmp_path_factory.mktemp("parallel"))
    return {"float64": bank, "float32": native_bank(bank, "float32")}


def parallel(target: Path, draft: Path, k: int, dtype: str, **fields: object) -> EngineConfig:
    """Return the configuration of an engine that drafts in parallel."""
    speculative = {"model": str(draft), "num_speculative_tokens": k, "parallel_drafting": True}
    return replace(config(target, draft, k=k, dtype=dtype, **fields), speculative_config=speculative)


def make_engine(bank: Bank, k: int, **fields: object) -> Engine:
    """Make an engine with the target and the parallel draft model of `bank`, on weights that are loaded once."""
    made = parallel(bank.target, bank.drafts["parallel"], k, bank.dtype, **fields)
    key = (str(bank.target), bank.dtype)
    if key not in WEIGHTS:
        WEIGHTS[key] = load_weights(made)
    engine = build_engine(made, WEIGHTS[key])
    assert isinstance(engine.weights.drafter, LoadedParallel)
    assert engine.weights.drafter.mask_token_id == MASK
    assert engine.runner.is_native == (bank.dtype == "float32")
    return engine


@pytest.mark.parametrize("dtype", DTYPES)
@sweep(40)
@given(data=st.data())
def test_greedy_text(dtype: str, data: st.DataObject, banks: dict[str, Bank]) -> None:
    bank = banks[dtype]
    fields = data.draw(engine_settings(), label="engine")
    engine_k = data.draw(st.integers(1, 8), label="engine K")
    engine = make_engine(bank, engine_k, **fields)
    poison(engine)
    jobs = data.draw(greedy_jobs(bank, engine_k), label="requests")
    requests = submit(engine, bank, jobs, engine_k)
    run(engine)
    for job, (prompt, _, max_tokens, _) in zip(requests, jobs, strict=True):
        assert job.output_token_ids == bank.expected(prompt, max_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_drafts_and_counts_are_those_of_a_plain_script(dtype: str, k: int, banks: dict[str, Bank]) -> None:
    bank = banks[dtype]
    target, draft = loaded(bank.target), loaded(bank.drafts["parallel"])
    engine, statistics, short = make_engine(bank, k), Statistics(), 0
    seen: list[tuple[int, list[int]]] = []

    def watch(slot: RingSlot, header: Header, ms: float) -> None:
        """Record the drafts of a step, except those overwritten by the token after the accepted ones."""
        drafted, accepted, emitted = (
            int(slot.results_arrays[name][0]) for name in ("num_drafted", "num_accepted", "num_emitted")
        )
        if drafted:
            row = int(slot.record_arrays["seq_row"][0])
            n = int(engine.runner.state.num_tokens[row]) - emitted
            tokens = engine.runner.state.tokens[row, n : n + drafted].tolist()
            seen.append((accepted if emitted > accepted else drafted, tokens))

    for i, prompt in enumerate(bank.prompts[:5]):
        text, expected = count_parallel_acceptance(target, draft, MASK, prompt, LONGEST, k, bank.eos, statistics)
        short += len(prompt) + 1 > k + 1
        seen.clear()
        engine.watch = watch
        job = request(i, prompt, k=None, max_tokens=LONGEST, engine_k=k)
        engine.add_request(job)
        run(engine)
        assert job.output_token_ids == text
        assert len(seen) == len(expected)
        for (rejected, drafts), theirs in zip(seen, expected, strict=True):
            assert drafts[:rejected] + drafts[rejected + 1 :] == theirs[:rejected] + theirs[rejected + 1 :]
    stats = engine.stats()
    assert stats.drafts == statistics.drafts
    assert stats.draft_tokens == statistics.draft_tokens
    assert stats.accepted_tokens == statistics.accepted_tokens
    assert stats.accepted_per_position == statistics.per_position
    # One pass an iteration that drafts, and at most one for a prompt that the first pass does not cover.
    assert 0 <= stats.draft_passes - stats.drafts <= short
    assert statistics.per_position[min(k, 5) - 1] > 0, "drafts from masks must stand now and then"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [1, 2])
def test_coupled_text_is_that_without_drafts(dtype: str, depth: int, banks: dict[str, Bank]) -> None:
    bank = banks[dtype]
    engine = with_rule(make_engine(bank, 4, max_steps_in_flight=depth, num_gpu_blocks_override=10), "coupled")
    poison(engine)
    jobs = [sampled(i, bank.prompts[i], i, 1 + i % 4, 4, **SAMPLED[i % len(SAMPLED)]) for i in range(12)]
    for job in jobs:
        engine.add_request(job)
    run(engine)
    for i, job in enumerate(jobs):
        prompt = tuple(bank.prompts[i])
        assert job.output_token_ids == vanilla_text(bank.target, prompt, i % len(SAMPLED), i, i % 3 == 0, dtype)
    assert engine.stats().accepted_tokens > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_rejection_draws_are_the_targets_own(dtype: str, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", seed=1, vocab=16, initializer_range=0.1, with_tokenizer=False)
    draft = shutil.copytree(
        make_checkpoint(tmp_path / "plain", seed=2, vocab=16, initializer_range=0.1, with_tokenizer=False),
        tmp_path / "draft",
    )
    edit_json(draft / "config.json", mask_token_id=15)
    engine = with_rule(build_engine(parallel(target, draft, 3, dtype, **TWO_TOKENS)), "rejection")
    check_two_token_draws(engine, target, 3, 6_000 if dtype == "float32" else 3_000)


def test_wrong_input(banks: dict[str, Bank], tmp_path: Path) -> None:
    bank = banks["float64"]
    with pytest.raises(InvalidConfigError, match=r"speculative_config\.model=.*no mask token.*mask_token_id"):
        load_weights(parallel(bank.target, bank.drafts["small"], 2, "float64"))
    broken = make_checkpoint(tmp_path / "broken", vocab=211)
    edit_json(broken / "config.json", pard_token=211)
    with pytest.raises(InvalidConfigError, match=r"pard_token=211: must be an id from 0 to vocab_size - 1 = 210"):
        load_weights(parallel(bank.target, broken, 2, "float64"))
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "parallel_drafting": True}
    with pytest.raises(InvalidConfigError, match=r"parallel_drafting=True: not allowed with method='ngram'"):
        replace(config(bank.target, None, k=0), speculative_config=speculative)
    speculative |= {"method": "draft_model", "parallel_drafting": 1}
    with pytest.raises(InvalidConfigError, match=r"speculative_config\.parallel_drafting=1"):
        replace(config(bank.target, None, k=0), speculative_config=speculative)
