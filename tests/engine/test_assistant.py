"""Engines that draft by a Gemma 4 assistant: the text is that without drafts, and drafts and counts are those of
transformers' own module."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from assistant_reference import Script, fit, load_target, make_assistant
from checkpoints import make_gemma4
from eagle3_reference import speculate
from gemma4_reference import float64
from hf_reference import Statistics, generate
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.config import EngineConfig
from specrs.drafters.assistant import config as assistant_config
from specrs.drafters.assistant.native import NativeAssistant
from specrs.drafters.head_check import HeadCheck
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.weights import load_weights
from specrs.errors import CheckpointError, InvalidConfigError, UnsupportedConfigError
from sweep import some

from engine.harness import poison, request, run
from engine.test_eagle3 import Drafts
from engine.test_sampling import TWO_TOKENS, check_two_token_draws, sampled

VOCAB, TOKENS = 61, 24
VARIANTS = ("gemma4", "gemma4, all of it")
_random = random.Random(5)
PROMPTS = [[_random.randrange(1, VOCAB) for _ in range(length)] for length in (1, 2, 3, 9, 14, 20, 31)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets, each with two assistants: a random one, and one trained on the target's texts, some of whose drafts the
    target accepts."""
    made = tmp_path_factory.mktemp("assistant")
    for variant in VARIANTS:
        # With a tied LM head the target would repeat its last token. Seed 0 has two tokens whose logits are 1e-5 apart.
        target = make_gemma4(made / variant, variant, eos_token_id=0, tie=False, seed=1)
        for kind in ("random", "fitted"):
            make_assistant(made / f"{variant}, {kind}", target, seed=4)
        known = [prompt + text for prompt, text in zip(PROMPTS, texts(target), strict=True)]
        fit(made / f"{variant}, fitted", load_target(target, torch.float32), known)
    return made


@cache
def texts(target: Path) -> list[list[int]]:
    """Return the tokens that transformers generates greedily after each of `PROMPTS`."""
    with float64():
        model = load_target(target)
        return [generate(model, prompt, TOKENS) for prompt in PROMPTS]


@cache
def script(folder: Path, variant: str, kind: str) -> tuple[Any, Script]:
    with float64():
        target = load_target(folder / variant)
        return target, Script(folder / f"{variant}, {kind}", target)


@cache
def weights(folder: Path, variant: str, kind: str, dtype: str, quantization: str | None, size: int | None) -> Any:
    return load_weights(config(folder, variant, kind, 1, dtype=dtype, quantization=quantization, size=size))


def config(
    folder: Path,
    variant: str,
    kind: str,
    k: int | str,
    *,
    method: str = "mtp",
    dtype: str = "float32",
    quantization: str | None = None,
    size: int | None = None,
    rule: str = "rejection",
    **fields: Any,
) -> EngineConfig:
    speculative = {"method": method, "num_speculative_tokens": k, "rejection_sample_method": rule}
    speculative |= {"model": str(folder / f"{variant}, {kind}"), "draft_vocab_size": size}
    if "ngram" in method:
        speculative |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    defaults: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 24, "block_size": 4}
    given = {"dtype": dtype, "quantization": quantization}
    return EngineConfig(model=str(folder / variant), speculative_config=speculative, **(defaults | given | fields))


def engine_of(folder: Path, variant: str, kind: str, k: int | str, **fields: Any) -> Engine:
    made = config(folder, variant, kind, k, **fields)
    size = made.speculative_config.draft_vocab_size  # type: ignore[union-attr]
    engine = build_engine(made, weights(folder, variant, kind, made.dtype, made.quantization, size))
    assert engine.runner.is_native
    return engine


def plain_config(folder: Path, variant: str, dtype: str = "float32", **fields: Any) -> EngineConfig:
    return replace(config(folder, variant, "random", 1, dtype=dtype, **fields), speculative_config=None)


def without_drafts(folder: Path, variant: str, **fields: Any) -> Engine:
    made = plain_config(folder, variant, **fields)
    return build_engine(made, load_weights(made))


def job_of(i: int, prompt: list[int], rule: str, k: int | None, engine_k: int) -> Any:
    if rule == "greedy":
        return request(i, prompt, k=k, max_tokens=TOKENS, engine_k=engine_k, ignore_eos=True)
    return sampled(i, prompt, 3, k, engine_k, temperature=0.9, max_tokens=TOKENS)


def jobs_of(engine: Engine, k: int, ks: list[int | None] | None = None, rule: str = "greedy") -> list[Any]:
    made = [job_of(i, prompt, rule, None if ks is None else ks[i], k) for i, prompt in enumerate(PROMPTS)]
    for job in made:
        engine.add_request(job)
    return made


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("kind", "k"), [("random", 4), ("fitted", 1), ("fitted", 16)])
def test_drafts_and_counts_are_the_scripts(
    folder: Path, variant: str, kind: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check drafts and counts of acceptance against transformers' module. Prompts are fed in several chunks, and
    several requests run at a time."""
    target, reference = script(folder, variant, kind)
    engine = engine_of(folder, variant, kind, k)
    poison(engine)
    drafts, statistics, per_position = Drafts(engine).watch(monkeypatch), Statistics(), [0] * k
    jobs = jobs_of(engine, k)
    run(engine)
    for job in jobs:
        with float64():
            said = speculate(target, reference, job.prompt_token_ids, TOKENS, k, [], statistics)  # type: ignore[arg-type]
        assert job.output_token_ids == said.tokens
        assert drafts.rounds[job.request_id] == [(0, entry.n, entry.drafts) for entry in said.rounds if entry.drafts]
        for position in range(k):
            per_position[position] += job.acceptance.accepted_per_position[position]
    stats = engine.stats()
    assert (stats.drafts, stats.draft_tokens) == (statistics.drafts, statistics.draft_tokens)
    assert (stats.accepted_tokens, per_position) == (statistics.accepted_tokens, statistics.per_position[:k])
    if kind == "fitted":
        assert stats.accepted_tokens > stats.drafts / 4
        assert k == 1 or per_position[1] > 0


def seen(folder: Path, k: int, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> dict[int, list[Any]]:
    """Return the drafts of each of `PROMPTS` by request id, as `Drafts.rounds`, in an engine with options `fields`."""
    engine = engine_of(folder, "gemma4", "fitted", k, **fields)
    drafts = Drafts(engine).watch(monkeypatch)
    jobs_of(engine, k)
    run(engine)
    return drafts.rounds


def test_drafts_depend_on_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that drafts are the same with any number of threads, chunks, blocks and requests at a time."""
    known = seen(folder, 3, monkeypatch)
    for fields in (
        {"threads": 2, "max_num_batched_tokens": 7},
        {"max_num_seqs": 1},
        {"block_size": 16, "enable_prefix_caching": False},
    ):
        assert seen(folder, 3, monkeypatch, **fields) == known


@cache
def plain(folder: Path, variant: str, dtype: str, quantization: str | None, rule: str) -> list[list[int]]:
    """Return the tokens that native code generates after each of `PROMPTS` without drafts, one request at a time."""
    made, found = plain_config(folder, variant, dtype, quantization=quantization), []
    loaded = load_weights(made)
    for i, prompt in enumerate(PROMPTS):
        engine = build_engine(made, loaded)
        found.append(job_of(i, prompt, rule, None, 0))
        engine.add_request(found[-1])
        run(engine)
    return [job.output_token_ids for job in found]


@settings(max_examples=25)
@given(
    st.sampled_from(VARIANTS),
    st.sampled_from(["random", "fitted"]),
    st.sampled_from(["mtp", "suffix,mtp", "ngram,mtp"]),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([None, "int8", "q8_0"]),
    st.sampled_from([None, None, 17]),
    st.sampled_from(["greedy", "coupled"]),
    st.integers(1, 16),
    st.sampled_from([3, 16, 64]),
    st.sampled_from([None, 20]),
    st.integers(1, 2),
    st.lists(st.sampled_from([None, 0, 1, 5]), min_size=len(PROMPTS), max_size=len(PROMPTS)),
)
def test_text_is_that_without_drafts(
    folder: Path,
    variant: str,
    kind: str,
    method: str,
    dtype: str,
    quantization: str | None,
    size: int | None,
    rule: str,
    k: int,
    budget: int,
    blocks: int | None,
    threads: int,
    ks: list[int | None],
) -> None:
    """Check that text equals that without drafts: with prompts in chunks, in batches, in a pool too small for all
    requests, and with requests of different K. Sampled texts use the `coupled` rule."""
    engine = engine_of(
        folder,
        variant,
        kind,
        k,
        method=method,
        dtype=dtype,
        quantization=quantization,
        size=size,
        rule="coupled" if rule == "coupled" else "rejection",
        max_num_batched_tokens=budget,
        num_gpu_blocks_override=blocks,
        threads=threads,
    )
    poison(engine)
    with pytest.MonkeyPatch.context() as monkeypatch:
        drafts = Drafts(engine).watch(monkeypatch)
        jobs = jobs_of(engine, k, [None if own is None else min(own, k) for own in ks], rule)
        run(engine)
    engine.scheduler.check_integrity()
    assert [job.output_token_ids for job in jobs] == plain(folder, variant, dtype, quantization, rule)
    if (method, dtype, quantization, size, rule) == ("mtp", "float32", None, None, "greedy"):
        with float64():
            drafts.check(*script(folder, variant, kind), jobs)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_a_cache_of_codes(folder: Path, kv_cache_dtype: str) -> None:
    """Check an FP8 KV cache, which target and assistant read: the text is that without drafts, and some drafts are
    accepted."""
    fields = {"kv_cache_dtype": kv_cache_dtype}
    made = config(folder, "gemma4", "fitted", 3, **fields)
    engine, other = build_engine(made, load_weights(made)), without_drafts(folder, "gemma4", **fields)
    found = []
    for one, k in ((engine, 3), (other, 0)):
        jobs = jobs_of(one, k)
        run(one)
        found.append([job.output_token_ids for job in jobs])
    assert found[0] == found[1]
    assert engine.stats().accepted_tokens > engine.stats().drafts / 10


@pytest.mark.parametrize("method", ["mtp", "suffix,mtp"])
def test_the_engine_chooses_k(folder: Path, method: str) -> None:
    engine = engine_of(folder, "gemma4", "fitted", "auto", method=method)
    jobs = jobs_of(engine, 7)
    run(engine)
    assert [job.output_token_ids for job in jobs] == plain(folder, "gemma4", "float32", None, "greedy")


def test_requests_choose_between_drafters(folder: Path) -> None:
    """Check that the assistant drafts, too, if prompt lookup comes before it in the list of methods."""
    engine = engine_of(folder, "gemma4", "fitted", 4, method="ngram,mtp")
    prompts = [prompt * 3 for prompt in PROMPTS[2:4]]
    for i, prompt in enumerate(prompts):
        engine.add_request(request(i, prompt, k=None, max_tokens=30, engine_k=4, ignore_eos=True))
    run(engine)
    assert engine.drafter.num_passes > 0


def asked(engine: Engine, prompts: list[list[int]], k: int) -> list[Any]:
    """Run greedy requests one after another. Return for each the length of its prefix hit in tokens, its output tokens
    and its log probabilities."""
    found = []
    for i, prompt in enumerate(prompts):
        job = request(i, prompt, k=None, max_tokens=9, engine_k=k, ignore_eos=True, logprobs=2)
        engine.add_request(job)
        run(engine)
        found.append((job.num_cached_tokens, job.output_token_ids, job.logprobs))
    return found


@settings(max_examples=10)
@given(
    st.sampled_from(VARIANTS),
    st.sampled_from(["mtp", "suffix,mtp"]),
    st.integers(1, 8),
    st.sampled_from([3, 16, 64]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(0, 2)), min_size=2, max_size=8),
)
def test_hits_with_drafts_are_those_without(
    folder: Path, variant: str, method: str, k: int, budget: int, drawn: list[tuple[int, int, int]]
) -> None:
    """Check that prefix hits are as long as in an engine without drafts, and that tokens and log probabilities have the
    same bits. Each prompt begins like another one, and goes on with tokens of its own."""
    texts_of = [random.Random(i).choices(range(1, VOCAB), k=40) for i in range(3)]
    prompts = [[*texts_of[which][:length], *[own + 1] * (3 * own)] for which, length, own in drawn]
    sizes = {"max_num_batched_tokens": budget}
    engine = engine_of(folder, variant, "fitted", k, method=method, **sizes)
    found = [asked(engine, prompts, k), asked(without_drafts(folder, variant, **sizes), prompts, 0)]
    engine.scheduler.check_integrity()
    assert found[0] == found[1]


def test_drafts_after_a_hit_are_the_scripts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a request whose prompt begins with cached blocks drafts from its first iteration on, with the whole
    context, as transformers' module does."""
    base = [random.Random(8).randrange(1, VOCAB) for _ in range(42)]
    prompts = [base, base, [*base[:32], 7, 8, 9]]
    engine = engine_of(folder, "gemma4", "fitted", 4, max_num_batched_tokens=512)
    poison(engine)
    drafts, jobs = Drafts(engine).watch(monkeypatch), []
    for i, prompt in enumerate(prompts):
        jobs.append(request(i, prompt, k=None, max_tokens=12, engine_k=4, ignore_eos=True))
        engine.add_request(jobs[-1])
        run(engine)
    with float64():
        drafts.check(*script(folder, "gemma4", "fitted"), jobs)  # type: ignore[arg-type]
    assert [job.num_cached_tokens for job in jobs] == [0, 40, 32]
    assert all(drafts.rounds[i] for i in range(3))


def test_a_disk_cache_keeps_the_targets_blocks(folder: Path, tmp_path: Path) -> None:
    """Check that blocks on disk serve engines with and without an assistant, because it has no KV."""
    fields = {"kv_cache_path": str(tmp_path / "kv")}
    prompts, found = [PROMPTS[-1]], []
    for k in (0, 3, 0):
        engine = engine_of(folder, "gemma4", "fitted", k, **fields) if k else without_drafts(folder, "gemma4", **fields)
        found.append(asked(engine, prompts, k))
        engine.close()
    assert [entry[0][1:] for entry in found] == [found[0][0][1:]] * 3
    assert [entry[0][0] for entry in found] == [0, 28, 28]


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target over 16 tokens with an assistant."""
    made = tmp_path_factory.mktemp("sixteen_ids")
    target = make_gemma4(made / "t", "gemma4", vocab=16, seed=5, initializer_range=0.3)
    make_assistant(made / "t, random", target, seed=3)
    return made


@pytest.mark.parametrize(("rule", "drafts"), some(3, ["rejection", "coupled"], [(1, None), (3, 9)]))
def test_two_token_draws_are_the_targets_own(sixteen: Path, rule: str, drafts: tuple[int, int | None]) -> None:
    k, size = drafts
    engine = engine_of(sixteen, "t", "random", k, size=size, rule=rule, **TWO_TOKENS)
    check_two_token_draws(engine, sixteen / "t", k, 8_000, least_acceptance=0.02)


@pytest.mark.parametrize("fault", ["layer", "state"])
def test_planted_faults_are_noticed(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that drafts change if the assistant attends another layer or reads the state before the final norm, and
    that the text stays the same."""
    variant = "gemma4, all of it"
    made = config(folder, variant, "fitted", 3)
    good = seen_of(build_engine(made, weights(folder, variant, "fitted", "float32", None, None)), monkeypatch)
    if fault == "layer":
        sources = {True: 0, False: 2}
        monkeypatch.setattr(assistant_config, "_source", lambda own, i, *rest: sources[own.windows[i] is not None])
    else:
        borrow = NativeAssistant._borrow

        def early(self: NativeAssistant) -> Any:
            fewer = replace(self.weights, target_layers=self.weights.target_layers - 1)
            return borrow(SimpleNamespace(weights=fewer))  # type: ignore[arg-type]

        monkeypatch.setattr(NativeAssistant, "_borrow", early)
    bad = seen_of(build_engine(made, load_weights(made)), monkeypatch)
    assert bad[0] != good[0]
    assert bad[1] == good[1] == plain(folder, variant, "float32", None, "greedy")


def seen_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[list[int]]]:
    """Return the drafts by request id, and the output tokens of each of `PROMPTS`."""
    drafts = Drafts(engine).watch(monkeypatch)
    jobs = jobs_of(engine, 3)
    run(engine)
    return drafts.rounds, [job.output_token_ids for job in jobs]


def test_a_draft_that_outgrows_its_context(folder: Path) -> None:
    """Check that a request goes on without drafts after `max_model_len` of the assistant."""
    made = config(folder, "gemma4", "fitted", 3)
    assert made.speculative_config is not None
    made = replace(made, speculative_config=replace(made.speculative_config, max_model_len=20))
    engine = build_engine(made, weights(folder, "gemma4", "fitted", "float32", None, None))
    jobs = jobs_of(engine, 3)
    run(engine)
    assert [job.output_token_ids for job in jobs] == plain(folder, "gemma4", "float32", None, "greedy")
    assert jobs[-1].acceptance.drafts == 0


def test_what_is_rejected(folder: Path) -> None:
    def made(variant: str = "gemma4", speculative: dict[str, Any] | None = None, **fields: Any) -> EngineConfig:
        given = {"method": "mtp", "num_speculative_tokens": 2, "model": str(folder / "gemma4, random")}
        return EngineConfig(
            **({"model": str(folder / variant)} | fields), speculative_config=given | (speculative or {})
        )

    for fields in ({"dtype": "float64"}, {"enforce_eager": True}):
        with pytest.raises(UnsupportedConfigError, match=r"method='mtp': with a model .* a target that torch computes"):
            load_weights(made(**fields))
    with pytest.raises(InvalidConfigError, match=r"model_impl='transformers'"):
        load_weights(made(model_impl="transformers"))
    with pytest.raises(
        InvalidConfigError, match=r"speculative_config\.model='.*random': must be None with method='mtp' and"
    ):
        load_weights(made(model=None))
    with pytest.raises(CheckpointError, match=r"architectures=.*allowed: \['Gemma4AssistantForCausalLM'\]"):
        load_weights(made(speculative={"model": str(folder / "gemma4")}))
    with pytest.raises(InvalidConfigError, match=r"method='draft_model': .*random is an assistant, .*; use 'mtp'"):
        load_weights(made(speculative={"method": "draft_model"}))
    with pytest.raises(InvalidConfigError, match=rf"draft_vocab_size=62: must be at most {VOCAB}"):
        load_weights(made(speculative={"draft_vocab_size": 62}))
    with pytest.raises(InvalidConfigError, match=r"names two drafters with a model of their own"):
        made(speculative={"method": "mtp,eagle3"})


def test_an_assistant_that_is_mostly_wrong_is_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    check = weights(folder, "gemma4", "random", "float32", None, 20).drafter.check("an assistant")
    assert isinstance(check, HeadCheck)
    counts = np.array([1] * 399 + [0] * 601)
    assert check.settled({"num_drafted": np.ones(1000), "num_accepted": counts}, 1000)
    assert "an assistant: the target accepted the first token of 39.9 %" in caplog.text
    assert "draft_vocab_size=20" in caplog.text
