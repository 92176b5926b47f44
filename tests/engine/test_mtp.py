"""MTP heads in engines: the text is that without drafts, and drafts and counts are those of transformers' `MtpModel`,
called by hand."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from eagle3_reference import speculate
from hf_reference import Statistics, generate, load
from hybrid_reference import float64
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_reference import Script, add_head, fit
from specrs.config import EngineConfig
from specrs.drafters.head_check import HeadCheck
from specrs.drafters.mtp.weights import MtpFacts
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.weights import load_weights
from specrs.errors import InvalidConfigError, UnsupportedConfigError
from sweep import some

from engine.harness import poison, request, run
from engine.reference_runner import on_reference
from engine.test_eagle3 import Drafts
from engine.test_sampling import TWO_TOKENS, check_two_token_draws, sampled

VOCAB, TOKENS = 61, 24
SHAPE = {"vocab": VOCAB, "hidden": 64, "intermediate": 96, "head_dim": 32, "kv_heads": 1, "eos_token_id": 0}
KINDS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_random = random.Random(5)
PROMPTS = [[_random.randrange(1, VOCAB) for _ in range(length)] for length in (1, 2, 3, 9, 14, 20, 31)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with targets that have an MTP head. The head is random, or trained on the target's texts so that some of
    its drafts are accepted."""
    made = tmp_path_factory.mktemp("mtp")
    make_checkpoint(made / "plain", "qwen3_5_text", layer_types=KINDS, layers=len(KINDS), seed=2, **SHAPE)
    for name in ("random", "fitted"):
        add_head(Path(shutil.copytree(made / "plain", made / name)), seed=4)
    known = [prompt + text for prompt, text in zip(PROMPTS, texts(made), strict=True)]
    fit(made / "fitted", load(made / "fitted", torch.float32), known)
    return made


@cache
def texts(folder: Path) -> list[list[int]]:
    """Return the text of transformers after each prompt."""
    with float64():
        model = load(folder / "plain")
        return [generate(model, prompt, TOKENS) for prompt in PROMPTS]


@cache
def script(path: Path) -> tuple[Any, Script]:
    with float64():
        target = load(path)
        return target, Script(target)


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """Make all computations in float64 checkpoints run in float64 throughout."""
    with float64():
        yield


@cache
def weights(path: Path, dtype: str, eager: bool, quantization: str | None, size: int | None) -> Any:
    return load_weights(config(path, 1, dtype=dtype, eager=eager, quantization=quantization, size=size))


def config(
    path: Path,
    k: int | str,
    *,
    method: str = "mtp",
    dtype: str = "float64",
    eager: bool = False,
    quantization: str | None = None,
    size: int | None = None,
    rule: str = "rejection",
    **fields: Any,
) -> EngineConfig:
    speculative = {"method": method, "num_speculative_tokens": k, "rejection_sample_method": rule}
    speculative |= {"draft_vocab_size": size}
    if "ngram" in method:
        speculative |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    defaults: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 24, "block_size": 4}
    given = {"dtype": dtype, "enforce_eager": eager, "quantization": quantization}
    return EngineConfig(model=str(path), speculative_config=speculative, **(defaults | given | fields))


def engine_of(path: Path, k: int | str, **fields: Any) -> Engine:
    made = config(path, k, **fields)
    size = made.speculative_config.draft_vocab_size  # type: ignore[union-attr]
    return build_engine(made, weights(path, made.dtype, made.enforce_eager, made.quantization, size))


def jobs_of(engine: Engine, k: int, ks: list[int | None] | None = None, **fields: Any) -> list[Any]:
    made = []
    for i, prompt in enumerate(PROMPTS):
        own = None if ks is None else ks[i]
        made.append(request(i, prompt, k=own, max_tokens=TOKENS, engine_k=k, ignore_eos=True, **fields))
        engine.add_request(made[-1])
    return made


@pytest.mark.parametrize(("head", "k"), [("random", 4), ("fitted", 1), ("fitted", 16)])
def test_drafts_and_counts_are_the_scripts(folder: Path, head: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check drafts and counts against the script: prompts in several chunks, several requests at a time."""
    target, reference = script(folder / head)
    engine = engine_of(folder / head, k)
    poison(engine)
    drafts, statistics, per_position = Drafts(engine).watch(monkeypatch), Statistics(), [0] * k
    jobs = jobs_of(engine, k)
    run(engine)
    for job in jobs:
        said = speculate(target, reference, job.prompt_token_ids, TOKENS, k, [], statistics)
        assert job.output_token_ids == said.tokens
        assert drafts.rounds[job.request_id] == [(0, entry.n, entry.drafts) for entry in said.rounds if entry.drafts]
        for position in range(k):
            per_position[position] += job.acceptance.accepted_per_position[position]
    stats = engine.stats()
    assert (stats.drafts, stats.draft_tokens) == (statistics.drafts, statistics.draft_tokens)
    assert (stats.accepted_tokens, per_position) == (statistics.accepted_tokens, statistics.per_position[:k])
    if head == "fitted":
        assert per_position[0] > 0.4 * stats.drafts
        assert k == 1 or per_position[1] > 0


def seen(
    path: Path, k: int, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> dict[int, list[tuple[int, int, list[int]]]]:
    """Return the drafts of an engine for every prompt."""
    engine = engine_of(path, k, **fields)
    drafts = Drafts(engine).watch(monkeypatch)
    jobs_of(engine, k)
    run(engine)
    return drafts.rounds


def test_native_drafts_are_those_of_torch_and_of_the_reference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that native drafts are those of torch in float32 and of the reference's iteration, with any number of
    threads and other chunks."""
    path = folder / "fitted"
    known = seen(path, 3, monkeypatch)
    assert seen(path, 3, monkeypatch, dtype="float32", eager=True) == known
    for threads in (1, 2):
        assert seen(path, 3, monkeypatch, dtype="float32", threads=threads, max_num_batched_tokens=7) == known
    engines = [engine_of(path, 3), engine_of(path, 3)]
    on_reference(engines[1])
    outputs = []
    for engine in engines:
        jobs = jobs_of(engine, 3)
        run(engine)
        outputs.append([(job.output_token_ids, job.acceptance.accepted_per_position) for job in jobs])
    assert outputs[0] == outputs[1]


def test_the_state_before_the_final_norm_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the tests notice a head that reads the state before the final norm: its drafts differ from the
    script's."""
    known = seen(folder / "fitted", 3, monkeypatch)
    monkeypatch.setattr(MtpFacts, "aux_layer_ids", property(lambda self: (self.weights.target_layers,)))
    assert seen(folder / "fitted", 3, monkeypatch) != known


@settings(max_examples=15)
@given(
    st.sampled_from(["random", "fitted"]),
    st.sampled_from(["mtp", "suffix,mtp", "ngram,mtp"]),
    st.integers(1, 16),
    st.sampled_from([3, 16, 64]),
    st.sampled_from([None, 20]),
    st.integers(1, 2),
    st.lists(st.sampled_from([None, 0, 1, 5]), min_size=len(PROMPTS), max_size=len(PROMPTS)),
)
def test_the_text_of_transformers(
    folder: Path, head: str, method: str, k: int, budget: int, blocks: int | None, depth: int, ks: list[int | None]
) -> None:
    """Check texts against transformers, by torch in float64: in chunks, in batches, in a pool too small for all
    requests."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = engine_of(
            folder / head,
            k,
            method=method,
            max_num_batched_tokens=budget,
            num_gpu_blocks_override=blocks,
            max_steps_in_flight=depth if method == "mtp" else 1,
        )
        poison(engine)
        drafts = Drafts(engine).watch(monkeypatch)
        jobs = jobs_of(engine, k, [None if own is None else min(own, k) for own in ks])
        run(engine)
        assert [job.output_token_ids for job in jobs] == texts(folder)
        if method == "mtp":
            drafts.check(*script(folder / head), jobs)  # type: ignore[arg-type]


@cache
def plain(folder: Path, dtype: str, quantization: str | None, rule: str) -> list[list[int]]:
    """Return the token ids that native passes generate without drafts, one request at a time."""
    found = []
    made = replace(config(folder / "random", 1, dtype=dtype, quantization=quantization), speculative_config=None)
    loaded = load_weights(made)
    for i, prompt in enumerate(PROMPTS):
        engine = build_engine(made, loaded)
        found.append(job_of(i, prompt, rule, None, 0))
        engine.add_request(found[-1])
        run(engine)
    return [job.output_token_ids for job in found]


def job_of(i: int, prompt: list[int], rule: str, k: int | None, engine_k: int) -> Any:
    if rule == "greedy":
        return request(i, prompt, k=k, max_tokens=TOKENS, engine_k=engine_k, ignore_eos=True)
    return sampled(i, prompt, 3, k, engine_k, temperature=0.9, max_tokens=TOKENS)


@settings(max_examples=25)
@given(
    st.sampled_from(["random", "fitted"]),
    st.sampled_from(["mtp", "suffix,mtp"]),
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
def test_native_text_is_that_without_drafts(
    folder: Path,
    head: str,
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
    """Check that native text equals that without drafts, for any drafts, preemption and batch. Sampled texts use
    coupled draws."""
    engine = engine_of(
        folder / head,
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
    assert engine.runner.is_native
    poison(engine)
    jobs = []
    for i, (prompt, own) in enumerate(zip(PROMPTS, ks, strict=True)):
        jobs.append(job_of(i, prompt, rule, None if own is None else min(own, k), k))
        engine.add_request(jobs[-1])
    run(engine)
    assert [job.output_token_ids for job in jobs] == plain(folder, dtype, quantization, rule)


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target over 16 tokens with an MTP head."""
    shape = {"vocab": 16, "hidden": 32, "kv_heads": 1, "head_dim": 16, "initializer_range": 0.4}
    return add_head(make_checkpoint(tmp_path_factory.mktemp("sixteen_ids") / "t", "qwen3_5_text", seed=5, **shape))


@pytest.mark.parametrize(
    ("rule", "heads", "dtype"), some(3, ["rejection", "coupled"], [(1, None), (3, 9)], ["float64", "float32"])
)
def test_two_token_draws_are_the_targets_own(
    sixteen: Path, rule: str, heads: tuple[int, int | None], dtype: str
) -> None:
    k, size = heads
    engine = engine_of(sixteen, k, dtype=dtype, size=size, rule=rule, **TWO_TOKENS)
    check_two_token_draws(engine, sixteen, k, 8_000 if dtype == "float32" else 1_500, least_acceptance=0.02)


def test_the_engine_chooses_k(folder: Path) -> None:
    engine = engine_of(folder / "fitted", "auto", dtype="float32")
    jobs = jobs_of(engine, 7)
    run(engine)
    assert [job.output_token_ids for job in jobs] == texts(folder)


def test_fewer_ids_are_drafted(folder: Path, tmp_path: Path) -> None:
    """Check an MTP head that drafts only some ids of the vocabulary: the first 10, or the 10 most frequent ones by a
    file of counts."""
    (tmp_path / "counts.json").write_text(json.dumps({str(i): 1 for i in range(VOCAB - 10, VOCAB)}))
    for counts, allowed in ((None, range(10)), (str(tmp_path / "counts.json"), range(VOCAB - 10, VOCAB))):
        made = config(folder / "random", 3, size=10, dtype="float32")
        assert made.speculative_config is not None
        made = replace(made, speculative_config=replace(made.speculative_config, draft_vocab_counts=counts))
        engine = build_engine(made, load_weights(made))
        with pytest.MonkeyPatch.context() as monkeypatch:
            drafts = Drafts(engine).watch(monkeypatch)
            jobs = jobs_of(engine, 3)
            run(engine)
        drafted = {token for rounds in drafts.rounds.values() for _, _, said in rounds for token in said}
        assert drafted <= set(allowed)
        assert [job.output_token_ids for job in jobs] == texts(folder)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_prefix_hit_is_kept_whole(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a prefix hit ends at a snapshot of states and is kept whole. The head keeps its context for a prompt
    that was seen before, and starts anew where a prompt parts at the end of the hit."""
    assert MtpFacts.keeps_hits
    draw = random.Random(8)
    base = [draw.randrange(1, VOCAB) for _ in range(42)]
    asked = [base, base, [*base[:32], 7, 8, 9], [*base[:32], 9, 9, 9]]
    target, reference = script(folder / "fitted")
    engine = engine_of(folder / "fitted", 4, dtype=dtype, max_num_batched_tokens=512)
    if dtype == "float64":
        poison(engine)
    drafts, jobs = Drafts(engine).watch(monkeypatch), []
    for i, prompt in enumerate(asked):
        jobs.append(request(i, prompt, k=None, max_tokens=12, engine_k=4, ignore_eos=True))
        engine.add_request(jobs[-1])
        run(engine)
    drafts.check(target, reference, jobs)
    # The third one leaves a snapshot where it differs from the others.
    assert [job.num_cached_tokens for job in jobs] == [0, 40, 0, 32]
    assert [drafts.starts(job.request_id) for job in jobs] == [{0}, {0}, {0}, {32}]


def asked(engine: Engine, prompts: list[list[int]], k: int) -> list[Any]:
    """Run greedy requests one after another, and return the hit, tokens and log probabilities of each."""
    found = []
    for i, prompt in enumerate(prompts):
        job = request(i, prompt, k=None, max_tokens=9, engine_k=k, ignore_eos=True, logprobs=2)
        engine.add_request(job)
        run(engine)
        found.append((job.num_cached_tokens, job.output_token_ids, job.logprobs))
    return found


def without_drafts(path: Path, **fields: Any) -> Engine:
    made = replace(config(path, 1, dtype="float32", **fields), speculative_config=None)
    return build_engine(made, weights(path, "float32", False, None, None))


@settings(max_examples=15)
@given(
    st.sampled_from(["random", "fitted"]),
    st.sampled_from(["mtp", "suffix,mtp"]),
    st.integers(1, 8),
    st.sampled_from([3, 16, 64]),
    st.sampled_from([1, 3, 100]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(0, 2)), min_size=2, max_size=8),
)
def test_hits_with_drafts_are_those_without(
    folder: Path, head: str, method: str, k: int, budget: int, slots: int, drawn: list[tuple[int, int, int]]
) -> None:
    """Check that prefix hits are as long as those of an engine without drafts if no snapshot is evicted, and that
    logits have the bits of such an engine with and without hits. Each prompt has the beginning of another one and then
    a token of its own."""
    texts_of = [random.Random(i).choices(range(1, VOCAB), k=40) for i in range(3)]
    prompts = [[*texts_of[which][:length], *[own + 1] * (3 * own)] for which, length, own in drawn]
    path, found = folder / head, []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("specrs.backends.blueprint.SNAPSHOT_INTERVAL", 8)
        monkeypatch.setattr("specrs.backends.blueprint.DECODE_SNAPSHOT_INTERVAL", 4)
        row = weights(path, "float32", False, None, None).target.state_bytes[0]
        sizes = {"max_num_batched_tokens": budget, "state_cache_memory_bytes": slots * row}
        for engine in (engine_of(path, k, method=method, dtype="float32", **sizes), without_drafts(path, **sizes)):
            found.append(asked(engine, prompts, 0 if engine.drafter is None else k))
            engine.scheduler.check_integrity()
    hits = [[entry[0] for entry in entries] for entries in found]
    # Slots for snapshots are taken in the step that may pass their place. With drafts this is an earlier one, so that
    # other snapshots are evicted.
    assert hits[0] == hits[1] or slots < 100
    missed = asked(without_drafts(path, enable_prefix_caching=False), prompts, 0)
    for entries in found:
        assert [entry[1:] for entry in entries] == [entry[1:] for entry in missed]


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next"])
def test_a_target_with_experts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a target whose MTP head has experts, too. Its drafts by torch and by native passes equal those of a plain
    script, and logits have the bits of an engine without drafts."""
    path = add_head(make_checkpoint(tmp_path / "target", family, layer_types=KINDS, layers=len(KINDS), **SHAPE), seed=4)
    model = load(path)
    known = [generate(model, prompt, TOKENS) for prompt in PROMPTS]
    fit(path, load(path, torch.float32), [prompt + text for prompt, text in zip(PROMPTS, known, strict=True)])
    target, reference = script(path)
    for dtype, k in (("float64", 3), ("float32", 1), ("float32", 5)):
        engine = engine_of(path, k, dtype=dtype)
        assert engine.runner.is_native == (dtype == "float32")
        drafts = Drafts(engine).watch(monkeypatch)
        jobs = jobs_of(engine, k)
        run(engine)
        assert [job.output_token_ids for job in jobs] == known
        drafts.check(target, reference, jobs)
        stats = engine.stats()
        assert stats.accepted_tokens > stats.drafts / 4
    prompts = [PROMPTS[-1] + text for text in known]
    hits = [
        asked(engine, prompts * 2, k)
        for engine, k in ((engine_of(path, 3, dtype="float32"), 3), (without_drafts(path), 0))
    ]
    assert hits[0] == hits[1]
    assert all(entry[0] > 0 for entry in hits[0][len(prompts) :])


def test_the_head_of_the_target_is_the_default(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def method(name: str, speculative: dict[str, Any]) -> str:
        made = EngineConfig(model=str(folder / name), speculative_config={"num_speculative_tokens": 2} | speculative)
        assert made.speculative_config is not None
        return made.speculative_config.method

    with caplog.at_level(logging.INFO, "specrs"):
        assert method("random", {}) == "mtp"
    assert "speculative_config.method is 'mtp': no draft model is named, and it has an MTP head" in caplog.text
    assert method("random", {"method": "suffix,draft_model"}) == "suffix,mtp"
    assert method("random", {"method": "suffix"}) == "suffix"
    assert method("random", {"model": "a draft"}) == "draft_model"
    with pytest.raises(
        InvalidConfigError, match=r"speculative_config\.model=None: must be a folder or hub id of a draft"
    ):
        method("plain", {})


def test_what_is_rejected(folder: Path) -> None:
    def made(extra: dict[str, Any], **fields: Any) -> EngineConfig:
        speculative = {"method": "mtp", "num_speculative_tokens": 2} | extra
        return EngineConfig(**({"model": str(folder / "random")} | fields), speculative_config=speculative)

    for extra, message in (
        ({"draft_vocab_counts": "a.json"}, r"draft_vocab_counts='a\.json': needs draft_vocab_size"),
        ({"draft_vocab_size": 0}, r"draft_vocab_size=0"),
        ({"revision": "main"}, r"speculative_config\.revision='main': must be None without a model"),
        ({"method": "suffix", "draft_vocab_size": 8}, r"draft_vocab_size=8: not allowed with method='suffix'"),
        ({"method": "mtp,eagle3"}, r"names two drafters with a model of their own"),
        ({"num_speculative_tokens": 17}, r"num_speculative_tokens=17"),
    ):
        with pytest.raises(InvalidConfigError, match=message):
            made(extra)
    with pytest.raises(UnsupportedConfigError, match=r"load_format='dummy': not implemented with .*method='mtp'"):
        made({}, load_format="dummy")
    with pytest.raises(InvalidConfigError, match=r"method='mtp': .*plain has no tensors mtp\.\*"):
        load_weights(made({}, model=str(folder / "plain")))
    with pytest.raises(
        InvalidConfigError, match=r"speculative_config\.model='a draft': must be None with method='mtp'"
    ):
        load_weights(made({"model": "a draft"}))
    with pytest.raises(InvalidConfigError, match=rf"draft_vocab_size=62: must be at most {VOCAB}"):
        load_weights(made({"draft_vocab_size": 62}))
    with pytest.raises(InvalidConfigError, match=r"model_impl='transformers'"):
        load_weights(made({}, model_impl="transformers"))


@pytest.mark.parametrize("size", [None, 20])
@pytest.mark.parametrize(("accepted", "warns"), [(399, True), (400, False)])
def test_a_head_that_is_mostly_wrong_is_reported(
    folder: Path, size: int | None, accepted: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = weights(folder / "random", "float32", False, None, size).drafter
    check = drafter.check("a target")
    assert isinstance(check, HeadCheck)
    counts = np.array([1] * accepted + [0] * (1000 - accepted))
    assert not check.settled({"num_drafted": np.ones(1000), "num_accepted": counts}, 999)
    assert check.settled({"num_drafted": np.ones(1), "num_accepted": counts[:1] * 0}, 1)
    assert ("a target: the target accepted the first token of 39.9 %" in caplog.text) == warns
    assert ("draft_vocab_size=20" in caplog.text) == (warns and size == 20)
