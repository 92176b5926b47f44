"""Engines over models that transformers computes (`generic`): their text is that of `generate`, as targets and as
drafts."""

import logging
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, perturb_checkpoint
from generic_checkpoints import ARCHITECTURES, make_generic
from hf_reference import generate, load
from hypothesis import given
from hypothesis import strategies as st
from specrs.config import EngineConfig
from specrs.engine.weights import load_weights
from specrs.errors import InvalidConfigError, UnsupportedConfigError, UnsupportedModelError
from specrs.models.generic import GenericModel
from specrs.models.native_decoder import NativeDecoder
from sweep import sweep

from engine.harness import (
    LONGEST,
    Bank,
    config,
    greedy_jobs,
    make_engine,
    make_prompts,
    poison,
    request,
    run,
    run_greedy,
)
from engine.test_equivalence import engine_settings

SWEPT = ["gemma2", "deepseek_v3"]
"""Architectures to test: one with windows and capped scores, one with experts and two sizes of heads."""


def bank_of(folder: Path, name: str, count: int = 9, longest: int = LONGEST) -> Bank:
    """Make a bank with `name` as target and, with noise, as draft; another architecture is a second draft."""
    target = make_generic(folder / "target", name, seed=1)
    drafts = {
        "close": perturb_checkpoint(target, folder / "close", noise=0.03, seed=2),
        "ours": make_checkpoint(folder / "ours", "qwen3", seed=3, kv_heads=1, head_dim=16, hidden=32, layers=1),
        "other": make_generic(folder / "other", "gpt2", seed=3),
    }
    model, prompts = load(target), make_prompts(count=count)[:count]
    return Bank(target, drafts, prompts, [generate(model, prompt, longest) for prompt in prompts], eos=[])


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bank]:
    return {name: bank_of(tmp_path_factory.mktemp(name), name) for name in SWEPT}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_text_is_that_of_generate(name: str, tmp_path: Path) -> None:
    """Check texts against `generate`: requests join one after the other, drafted by the same architecture and by a
    model that specrs has a decoder for."""
    bank = bank_of(tmp_path, name, count=5, longest=16)
    for draft, k in (("close", 3), ("ours", 2)):
        engine = make_engine(bank.target, bank.drafts[draft], k=k, block_size=8)
        jobs = [request(i, bank.prompts[i], k=None, max_tokens=16, engine_k=k, ignore_eos=True) for i in range(5)]
        for job in jobs:
            engine.add_request(job)
            engine.step()
        run(engine)
        assert [job.output_token_ids for job in jobs] == bank.continuations
        if draft == "close":
            assert engine.stats().accepted_tokens > 0


@pytest.mark.parametrize("name", SWEPT)
@sweep(6)
@given(data=st.data())
def test_greedy_text(name: str, data: st.DataObject, banks: dict[str, Bank]) -> None:
    """Check greedy text for any K, batch, blocks, chunks, prefixes and preemption."""
    bank, fields = banks[name], data.draw(engine_settings(), label="engine")
    k = data.draw(st.integers(0, 6), label="K")
    draft = data.draw(st.sampled_from(sorted(bank.drafts)), label="draft")
    engine = make_engine(bank.target, bank.drafts[draft], k=k, **fields)
    poison(engine)
    run_greedy(engine, bank, data.draw(greedy_jobs(bank, k), label="requests"), k)


def test_a_generic_draft_of_a_target_of_ours(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "qwen3", seed=1)
    draft = make_generic(tmp_path / "draft", "gpt2")
    prompts = make_prompts(count=7)
    engine = make_engine(target, draft, k=3)
    jobs = [request(i, prompt, k=None, max_tokens=12, engine_k=3, ignore_eos=True) for i, prompt in enumerate(prompts)]
    for job in jobs:
        engine.add_request(job)
    run(engine)
    model = load(target)
    assert [job.output_token_ids for job in jobs] == [generate(model, prompt, 12) for prompt in prompts]
    assert engine.stats().draft_tokens > 0


def test_auto_takes_transformers_for_what_specrs_does_not_know(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = make_generic(tmp_path / "unknown", "gpt2")
    known = make_checkpoint(tmp_path / "known", "qwen3")
    with caplog.at_level(logging.INFO, "specrs"):
        target = load_weights(config(unknown, None, k=0)).target
    assert isinstance(target, GenericModel)
    assert [r.message for r in caplog.records] == [
        f"{unknown}: specrs knows no GPT2LMHeadModel: transformers' modules compute it, with our attention"
    ]
    assert isinstance(load_weights(config(known, None, k=0, dtype="float32")).target, NativeDecoder)
    asked = load_weights(config(known, known, k=1, model_impl="transformers"))
    assert all(isinstance(model, GenericModel) for model in asked.models)
    assert len(asked.models) == 2
    with pytest.raises(UnsupportedModelError, match=r"architectures=\['GPT2LMHeadModel'\]: not implemented"):
        load_weights(config(unknown, None, k=0, model_impl="specrs"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quantization": "int8", "dtype": "float32"}, "quantization='int8': not implemented with model_impl"),
        ({"method": "eagle3"}, "speculative_config.method='eagle3': not implemented for a target"),
    ],
)
def test_what_a_generic_target_cannot(fields: dict[str, object], words: str, tmp_path: Path) -> None:
    unknown = make_generic(tmp_path / "unknown", "gpt2")
    with pytest.raises(UnsupportedConfigError, match=words):
        load_weights(config(unknown, unknown, k=1, **fields))


def test_model_impl_is_one_of_three() -> None:
    with pytest.raises(InvalidConfigError, match="model_impl='vllm'"):
        EngineConfig(model_impl="vllm")
