"""Every family that specrs has a decoder for: its text is that of transformers, for any drafts and settings."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import FAMILIES, make_checkpoint, perturb_checkpoint
from hf_reference import generate, generate_all, load
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends import blueprint
from specrs.backends.blueprint import Blueprint
from specrs.core import CachedDrafter
from specrs.engine.weights import load_weights
from sweep import sweep

from engine.harness import (
    LONGEST,
    VOCAB,
    Bank,
    config,
    greedy_jobs,
    make_engine,
    make_prompts,
    native_bank,
    poison,
    run,
    run_greedy,
    submit,
)
from engine.test_equivalence import engine_settings

SWEPT = sorted(set(FAMILIES) - {"qwen3", "llama", "qwen2", "mistral"})
"""Families that this file tests. Other families have test files of their own."""


def make_bank(folder: Path, family: str) -> Bank:
    """Write a target of the family, a draft of the same family, and drafts of Qwen3's architecture."""
    shape = {"vocab": VOCAB, "hidden": 48, "intermediate": 40, "kv_heads": 2, "head_dim": 12, "layers": 2}
    target = make_checkpoint(folder / "target", family, seed=1, **shape)
    drafts = {
        "close": perturb_checkpoint(target, folder / "close", noise=0.05, seed=2),
        "plain": make_checkpoint(folder / "plain", "qwen3", seed=3, vocab=VOCAB, kv_heads=1, hidden=32, layers=1),
    }
    model, prompts = load(target), make_prompts()[:9]
    return Bank(target, drafts, prompts, generate_all(model, prompts, LONGEST), eos=[])


@pytest.fixture(scope="module")
def bank_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Bank]:
    """Return a function that makes the bank of a family and dtype when it is first asked for."""
    made: dict[tuple[str, str], Bank] = {}

    def bank(family: str, dtype: str) -> Bank:
        if (family, dtype) not in made:
            exact = dtype == "float64"
            made[family, dtype] = (
                make_bank(tmp_path_factory.mktemp(family), family)
                if exact
                else native_bank(bank(family, "float64"), dtype)
            )
        return made[family, dtype]

    return bank


@sweep(36)
@given(data=st.data())
def test_greedy_text(data: st.DataObject, bank_of: Callable[[str, str], Bank]) -> None:
    """Check greedy text for any K, batch, blocks, chunks, prefixes and preemption: in float64 that of transformers, in
    native passes that of K = 0."""
    family = data.draw(st.sampled_from(SWEPT), label="family")
    dtype = data.draw(st.sampled_from(["float64", "float32", "bfloat16"]))
    bank, fields = bank_of(family, dtype), data.draw(engine_settings(), label="engine")
    k = data.draw(st.integers(0, 6), label="K")
    draft = data.draw(st.sampled_from(sorted(bank.drafts)), label="draft")
    engine = make_engine(bank.target, bank.drafts[draft], k=k, dtype=dtype, **fields)
    poison(engine)
    run_greedy(engine, bank, data.draw(greedy_jobs(bank, k), label="requests"), k)


@pytest.mark.parametrize("family", SWEPT)
def test_a_family_drafts_and_is_drafted_for(family: str, bank_of: Callable[[str, str], Bank]) -> None:
    """Check each family as target and as draft, in float64: the text is transformers', and drafts close to the target
    are accepted."""
    bank = bank_of(family, "float64")
    engine = make_engine(bank.target, bank.drafts["close"], k=3)
    requests = submit(engine, bank, [(i, 3, 24, 1) for i in range(len(bank.prompts))], 3, ignore_eos=True)
    run(engine)
    assert [job.output_token_ids for job in requests] == [text[:24] for text in bank.continuations]
    assert engine.stats().accepted_tokens > 0
    # As the draft of a plain target.
    plain = replace(bank, target=bank.drafts["plain"])
    model = load(plain.target)
    engine = make_engine(plain.target, bank.target, k=2)
    (job,) = submit(engine, plain, [(4, 2, 12, 0)], 2, ignore_eos=True)
    run(engine)
    assert job.output_token_ids == generate(model, plain.prompts[4], 12)
    assert engine.stats().draft_tokens > 0


@pytest.mark.parametrize("family", SWEPT)
def test_native_text_is_transformers_own(family: str, bank_of: Callable[[str, str], Bank]) -> None:
    """Check native texts in float32 against transformers. Rounding could change only tokens whose logits differ by less
    than 1e-4, which no text of these has."""
    assert bank_of(family, "float32").continuations == bank_of(family, "float64").continuations


def test_costs_count_experts_that_a_row_is_sent_to(bank_of: Callable[[str, str], Bank]) -> None:
    """Check that costs count only experts that a row is sent to: a draft's share of the token budget is that of the
    weights that a token reads."""
    bank = bank_of("qwen3_moe", "float64")
    made = config(bank.target, bank.drafts["plain"], k=2)
    weights = load_weights(made)
    sizes = {name: p.numel() for name, p in load(bank.target).named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert weights.target.num_parameters == sum(sizes.values()) - experts * 3 / 5
    declared = Blueprint(made, weights)._declared(None)[-1]
    assert weights.drafter is not None
    assert isinstance(declared, CachedDrafter)
    assert declared.cost_ratio == pytest.approx(weights.drafter.model.num_parameters / weights.target.num_parameters)


def test_chunks_deep_in_a_context_cost_what_the_model_takes(
    bank_of: Callable[[str, str], Bank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the scheduler knows by how much attention makes a chunk slower that is deep in a context."""
    asked: list[float] = []
    monkeypatch.setattr(blueprint, "Scheduler", lambda **settings: asked.append(settings["attention_cost_ratio"]))
    made = [config(bank_of(family, "float64").target, None, k=0) for family in ("gemma3_text", "qwen3_moe")]
    weights = [load_weights(each) for each in made]
    for each, loaded in zip(made, weights, strict=True):
        Blueprint(each, loaded).scheduler(1)
    assert asked == [1.5 * loaded.target.attention_ratio for loaded in weights]
    assert asked[0] != asked[1]
