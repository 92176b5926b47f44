"""Draft models that draft a part of the vocabulary (`draft_vocab_size`): which ids, how many drafts are accepted, and
that the text stays the target's."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import edit_json, make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from specrs import token_counts
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
from specrs.errors import CheckpointError, InvalidConfigError, UnsupportedConfigError, short
from specrs.models.decoder_weights import DecoderFacts
from sweep import some, sweep

from engine.harness import LONGEST, VOCAB, Bank, config, poison, request, run
from engine.test_sampling import SAMPLED, TWO_TOKENS, check_two_token_draws, sampled, vanilla_text


def settings(target: Path, draft: Path, k: int, dtype: str, own: dict[str, Any], **fields: Any) -> EngineConfig:
    speculative = {"model": str(draft), "num_speculative_tokens": k} | own
    return replace(config(target, draft, k=k, dtype=dtype, **fields), speculative_config=speculative)


def make_engine(bank: Bank, draft: Path, k: int, own: dict[str, Any], **fields: Any) -> Engine:
    made = settings(bank.target, draft, k, bank.dtype, own, **fields)
    return build_engine(made, load_weights(made))


@pytest.fixture(scope="session")
def counts(qwen_bank: Bank, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Counts of the ids in every second text of the target."""
    outputs = [SimpleNamespace(outputs=[SimpleNamespace(token_ids=text)]) for text in qwen_bank.continuations[::2]]
    file = tmp_path_factory.mktemp("counts") / "counts.json"
    file.write_text(json.dumps(token_counts(outputs)))  # type: ignore[arg-type]
    return file


def most_frequent(bank: Bank, size: int) -> set[int]:
    found = np.bincount(np.concatenate(bank.continuations[::2]), minlength=VOCAB)
    return set(sorted(range(VOCAB), key=lambda token: (-found[token], token))[:size])


def expected_counts(text: list[int], k: int, ids: set[int]) -> tuple[int, int]:
    """Numbers of drafts and of accepted tokens where the draft is the target itself: it drafts what comes next, if that
    is one of its ids."""
    drafts, accepted, done = 0, 0, 1
    while done < len(text):
        k_r = min(k, len(text) - done - 1)
        m = next((j for j in range(k_r) if text[done + j] not in ids), k_r)
        drafts, accepted, done = drafts + (k_r > 0), accepted + m, done + m + 1
    return drafts, accepted


@pytest.mark.parametrize("family", ["qwen_bank", "native_qwen_bank", "native_llama_bank"])
@pytest.mark.parametrize("chosen", ["first", "most frequent"])
def test_the_target_itself_drafts_what_comes_next_if_it_may(
    family: str, chosen: str, counts: Path, qwen_bank: Bank, request: pytest.FixtureRequest
) -> None:
    """Check a draft model that is the target itself, but drafts only some ids. Its drafts are accepted until the
    target's next token is not among these ids."""
    bank, k, size = request.getfixturevalue(family), 4, 60
    by_count = {"draft_vocab_counts": str(counts)} if chosen == "most frequent" else {}
    ids = most_frequent(qwen_bank, size) if by_count else set(range(size))
    engine = make_engine(bank, bank.target, k, {"draft_vocab_size": size} | by_count)
    poison(engine)
    assert engine.runner.is_native == (bank.dtype != "float64")
    total = 0
    for i in range(0, len(bank.prompts), 3):
        job, before = job_of(i, bank, k), engine.stats()
        engine.add_request(job)
        run(engine)
        assert job.output_token_ids == bank.continuations[i]
        after = engine.stats()
        counted = after.drafts - before.drafts, after.accepted_tokens - before.accepted_tokens
        assert counted == expected_counts(bank.continuations[i], k, ids)
        total += counted[1]
    assert total > 10


def job_of(i: int, bank: Bank, k: int) -> Request:
    return request(i, bank.prompts[i], k=None, max_tokens=LONGEST, engine_k=k, ignore_eos=True)


@sweep(20)
@given(data=st.data())
def test_text_is_that_without_drafts(
    data: st.DataObject, native_qwen_bank: Bank, native_llama_bank: Bank, counts: Path
) -> None:
    """Check greedy text under both rules and sampled text under `coupled` against text without drafts, for any drafts,
    chunks and batches."""
    bank = data.draw(st.sampled_from([native_qwen_bank, native_llama_bank]), label="bank")
    rule = data.draw(st.sampled_from(["rejection", "coupled"]), label="rule")
    k = data.draw(st.integers(1, 8), label="K")
    own = {
        "draft_vocab_size": data.draw(st.sampled_from([1, 30, VOCAB - 1, VOCAB]), label="size"),
        "draft_vocab_counts": data.draw(st.sampled_from([None, str(counts)]), label="counts"),
        "quantization": data.draw(st.sampled_from([None, "int8"]), label="quantization"),
        "rejection_sample_method": rule,
    }
    engine = make_engine(
        bank,
        bank.drafts[data.draw(st.sampled_from(["close", "small", "equal"]), label="draft")],
        k,
        own,
        max_num_batched_tokens=data.draw(st.sampled_from([7, 64]), label="budget"),
        max_steps_in_flight=data.draw(st.sampled_from([1, 2]), label="depth"),
        num_gpu_blocks_override=data.draw(st.sampled_from([8, 20, 64]), label="blocks"),
    )
    assert engine.runner.is_native
    poison(engine)
    jobs = []
    for i in range(8):
        which = 0 if rule == "rejection" else i % len(SAMPLED)
        params = {"temperature": 0.0} if rule == "rejection" else SAMPLED[which]
        job = sampled(i, bank.prompts[i], i, None, k, **(params | {"ignore_eos": rule == "rejection"}))
        if rule == "rejection":
            job = job_of(i, bank, k)
        jobs.append((job, which))
        engine.add_request(job)
    run(engine)
    for i, (job, which) in enumerate(jobs):
        expected = bank.continuations[i]
        if rule == "coupled":
            expected = vanilla_text(bank.target, tuple(bank.prompts[i]), which, i, i % 3 == 0, bank.dtype)
        assert job.output_token_ids == expected


@pytest.mark.parametrize(("rule", "dtype"), some(3, ["rejection", "coupled"], ["float64", "float32"]))
def test_two_token_draws_are_the_targets_own(rule: str, dtype: str, tmp_path: Path) -> None:
    """Check that pairs of drawn tokens have the target's distribution, with a draft model that drafts nine of sixteen
    ids."""
    shape = {"vocab": 16, "hidden": 32, "layers": 1, "kv_heads": 1, "head_dim": 16, "initializer_range": 0.4}
    target = make_checkpoint(tmp_path / "target", seed=5, **shape)
    draft = make_checkpoint(tmp_path / "draft", seed=6, **shape)
    (tmp_path / "counts.json").write_text(json.dumps({str(i): 1 for i in range(3, 12)}))
    own = {"draft_vocab_size": 9, "draft_vocab_counts": str(tmp_path / "counts.json"), "rejection_sample_method": rule}
    made = settings(target, draft, 3, dtype, own, **TWO_TOKENS)
    draws = 8_000 if dtype == "float32" else 3_000
    check_two_token_draws(build_engine(made, load_weights(made)), target, 3, draws, least_acceptance=0.02)


def test_synthetic_rates_come_out(native_qwen_bank: Bank) -> None:
    bank, rates = native_qwen_bank, (0.8, 0.4)
    own = {
        "draft_vocab_size": 9,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }
    with pytest.warns(UserWarning, match="for timing only"):
        engine = make_engine(bank, bank.drafts["close"], 2, own)
    for i in range(len(bank.prompts)):
        engine.add_request(job_of(i, bank, 2))
    run(engine)
    stats = engine.stats()
    for rate, share in zip(rates, stats.per_position, strict=True):
        assert abs(share - rate) < 4.5 * (rate * (1 - rate) / stats.drafts) ** 0.5


@pytest.mark.parametrize("draft_vocab", [VOCAB - 2, VOCAB + 13])
def test_vocabularies_padded_differently(native_qwen_bank: Bank, draft_vocab: int, tmp_path: Path) -> None:
    """Check a draft with fewer or more ids than the target. A `draft_vocab_size` of all ids that both have changes no
    acceptance, because the draft is still fed every id; one more is rejected."""
    bank, known = native_qwen_bank, min(draft_vocab, VOCAB)
    draft = make_checkpoint(tmp_path, seed=9, vocab=draft_vocab, hidden=32, layers=1, kv_heads=1, head_dim=16)
    engine = make_engine(bank, draft, 3, {"draft_vocab_size": known})
    whole = make_engine(bank, draft, 3, {})
    few = make_engine(bank, draft, 3, {"draft_vocab_size": 7})
    seen = []
    for each in (engine, whole, few):
        jobs = [job_of(i, bank, 3) for i in range(8)]
        for job in jobs:
            each.add_request(job)
        run(each)
        assert [job.output_token_ids for job in jobs] == bank.continuations[:8]
        seen.append([job.acceptance.histogram for job in jobs])
    assert seen[0] == seen[1] != seen[2]
    with pytest.raises(InvalidConfigError, match=rf"draft_vocab_size={known + 1}: must be at most {known}, the number"):
        make_engine(bank, draft, 3, {"draft_vocab_size": known + 1})


def test_a_draft_of_fewer_ids_costs_less(qwen_bank: Bank, native_qwen_bank: Bank) -> None:
    for bank in (qwen_bank, native_qwen_bank):
        made = settings(bank.target, bank.target, 2, bank.dtype, {"draft_vocab_size": 11})
        loaded = load_weights(made)
        target, draft = (model for model in loaded.models)
        assert isinstance(draft, DecoderFacts)
        assert target.num_parameters - draft.num_parameters == (VOCAB - 11) * draft.hidden_size
        assert target.target_ids is None
        assert draft.target_ids.tolist() == list(range(11))


def test_what_is_rejected(qwen_bank: Bank, tmp_path: Path) -> None:
    def made(own: dict[str, Any], **fields: Any) -> EngineConfig:
        return settings(qwen_bank.target, qwen_bank.drafts["close"], 2, "float32", own, **fields)

    for own, message in (
        ({"draft_vocab_counts": "a.json"}, r"draft_vocab_counts='a\.json': needs draft_vocab_size"),
        ({"draft_vocab_size": 8, "method": "eagle3"}, r"draft_vocab_size=8: not allowed with method='eagle3'; allowed"),
        (
            {"draft_vocab_size": 8, "parallel_drafting": True},
            "draft_vocab_size=8: not implemented with parallel_drafting",
        ),
        (
            {"draft_vocab_size": 8, "use_heterogeneous_vocab": True},
            "draft_vocab_size=8: not implemented with use_heterogeneous_vocab=True; leave draft_vocab_size out",
        ),
    ):
        with pytest.raises(InvalidConfigError, match=message):
            made(own)
    with pytest.raises(UnsupportedConfigError, match=r"speculative_config\.draft_vocab_size=8.*draft_tensor_parallel"):
        made({"draft_vocab_size": 8, "draft_tensor_parallel_size": 2}, tensor_parallel_size=2)
    file = tmp_path / "counts.json"
    for content, message in (
        (None, "there is no such file"),
        ("[3]", f"{file}: must hold a JSON object, found [3]"),
        ('{"x": 1}', "'x' must be a token id from 0 to 210"),
        ('{"211": 1}', "'211' must be a token id from 0 to 210"),
        ('{"3": -1}', "3: -1 must be a number of at least 0"),
        ('{"3": true}', "3: True must be a number of at least 0"),
    ):
        if content is not None:
            file.write_text(content)
        with pytest.raises(CheckpointError) as error:
            load_weights(made({"draft_vocab_size": 8, "draft_vocab_counts": str(file)}))
        remedy = "write a JSON file with the count of each of the target's token ids, as specrs.token_counts makes it"
        assert str(error.value) == f"speculative_config.draft_vocab_counts={short(str(file))}: {message}; {remedy}"


def test_a_draft_of_transformers_modules(qwen_bank: Bank, tmp_path: Path) -> None:
    draft = make_checkpoint(tmp_path / "draft", seed=9, vocab=VOCAB, hidden=32, layers=1, kv_heads=1, head_dim=16)
    edit_json(draft / "config.json", architectures=["StableLmForCausalLM"])
    made = settings(qwen_bank.target, draft, 2, "float32", {"draft_vocab_size": 8}, model_impl="transformers")
    with pytest.raises(
        UnsupportedConfigError, match=r"draft_vocab_size=8: not implemented for a draft that runs through"
    ):
        load_weights(made)
