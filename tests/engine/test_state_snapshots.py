"""Prefix hits of targets with delta nets or short convolutions: they have the bits of a miss, with and without
drafts."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from hf_reference import generate, load
from hybrid_reference import float64
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from specrs import LLM, SamplingParams
from specrs.core import BlockStored, KVEventBatch
from specrs.models.torch_loader import load_model
from sweep import sweep

VOCAB = 61
SHAPE: dict[str, Any] = {
    "vocab": VOCAB,
    "hidden": 64,
    "intermediate": 96,
    "head_dim": 32,
    "kv_heads": 1,
    "eos_token_id": 0,
    "max_position_embeddings": 8192,
}
KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
CONVS = ["conv", "conv", "full_attention", "conv"]
FAMILIES = {"qwen3_5_text": KINDS, "lfm2": CONVS, "lfm2_moe": CONVS}
"""Kinds of layers of the targets, by family."""
TOKENS = 14
_random = random.Random(4)
# Repeated parts, whose continuations n-grams guess. Each long prompt begins like another one.
PARTS = [[_random.randrange(1, VOCAB) for _ in range(length)] * 3 for length in (2, 4, 7)]
PROMPTS = [PARTS[2], PARTS[2] + PARTS[0], PARTS[2] + PARTS[1], PARTS[1] + PARTS[2], PARTS[1] + PARTS[0], PARTS[2][:13]]
DRAFTERS: list[dict[str, Any] | None] = [
    None,
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    {"method": "suffix", "num_speculative_tokens": 5},
    {"method": "draft_model", "num_speculative_tokens": 2},
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a target of each family, and a draft model."""
    made = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in made.items():
        make_checkpoint(folder / "target", family, layer_types=FAMILIES[family], layers=len(KINDS), **SHAPE)
        make_checkpoint(folder / "draft", "qwen3", **SHAPE)
    return made


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    """Folder with a target that has delta nets."""
    return folders["qwen3_5_text"]


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrs.backends.blueprint.SNAPSHOT_INTERVAL", 8)
    monkeypatch.setattr("specrs.backends.blueprint.DECODE_SNAPSHOT_INTERVAL", 4)


def engine(folder: Path, drafter: dict[str, Any] | None, **options: Any) -> LLM:
    if drafter is not None:
        model = {"model": str(folder / "draft")} if drafter["method"] == "draft_model" else {}
        options |= {"speculative_config": drafter | model}
    return LLM(model=str(folder / "target"), max_model_len=64, block_size=4, threads=1, **options)


def texts(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@cache
def references(target: Path) -> list[list[int]]:
    with float64():
        model = load(target)
        return [generate(model, prompt, TOKENS) for prompt in PROMPTS]


def followed(texts_before: list[list[int]]) -> list[list[int]]:
    """Return prompts that continue the texts."""
    return [prompt + text + [3, 5] for prompt, text in zip(PROMPTS, texts_before, strict=True)]


ORDERS = st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=8)


@settings(max_examples=18)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from(DRAFTERS),
    st.lists(ORDERS, min_size=1, max_size=3),
    st.sampled_from([3, 16, 64]),
    st.sampled_from([None, 16]),
    st.sampled_from([None, 1, 3]),
    st.integers(1, 2),
)
def test_hits_have_transformers_text(
    folders: dict[str, Path],
    family: str,
    drafter: dict[str, Any] | None,
    rounds: list[list[int]],
    budget: int,
    blocks: int | None,
    slots: int | None,
    depth: int,
) -> None:
    """Check texts of prefix hits against transformers, by torch in float64: in chunks and batches, in a pool too small
    for all requests, with few snapshot slots."""
    folder = folders[family]
    with float64():
        llm = engine(
            folder,
            drafter,
            dtype="float64",
            max_num_batched_tokens=budget,
            max_steps_in_flight=depth if drafter is None or drafter["method"] == "draft_model" else 1,
            **sizes(folder, blocks, slots),
        )
        for order in rounds:
            found = texts(llm, [PROMPTS[i] for i in order])
            assert found == [references(folder / "target")[i] for i in order]
        llm.engine.scheduler.check_integrity()


def sizes(folder: Path, blocks: int | None, slots: int | None) -> dict[str, Any]:
    """Options for a pool of `blocks` KV blocks and `slots` snapshots; None: the defaults."""
    found: dict[str, Any] = {} if blocks is None else {"num_gpu_blocks_override": blocks}
    if slots is not None:
        found["state_cache_memory_bytes"] = slots * state_bytes(folder)
    return found


@cache
def state_bytes(folder: Path) -> int:
    return load_model(folder / "target", dtype="float64").state_bytes[0]


@cache
def plain(folder: Path, dtype: str, quantization: str | None) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids that native passes generate without drafts and prefix caching, one request at a time: for
    `PROMPTS`, and for prompts that continue these texts."""
    options = {"dtype": dtype, "quantization": quantization, "max_num_seqs": 1, "enable_prefix_caching": False}
    llm = engine(folder, None, **options)
    first = texts(llm, PROMPTS)
    return first, texts(llm, followed(first))


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from(DRAFTERS),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([None, "int4"]),
    st.lists(ORDERS, min_size=2, max_size=3),
    st.sampled_from([3, 16, 64]),
    st.sampled_from([None, 24]),
    st.sampled_from([None, 1, 3]),
)
def test_native_hits_have_the_bits_of_misses(
    folders: dict[str, Path],
    family: str,
    drafter: dict[str, Any] | None,
    dtype: str,
    quantization: str | None,
    rounds: list[list[int]],
    budget: int,
    blocks: int | None,
    slots: int | None,
) -> None:
    """Check that native hits have the bits of misses, for any drafts, preemption, eviction and batch; also if a prompt
    continues an earlier answer."""
    folder = folders[family]
    first, second = plain(folder, dtype, quantization)
    llm = engine(
        folder,
        drafter,
        dtype=dtype,
        quantization=quantization,
        max_num_batched_tokens=budget,
        **sizes(folder, blocks, slots),
    )
    for order in rounds:
        assert texts(llm, [PROMPTS[i] for i in order]) == [first[i] for i in order]
        assert texts(llm, [followed(first)[i] for i in order]) == [second[i] for i in order]
    llm.engine.scheduler.check_integrity()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a target in which token 0, which no prompt has and no text gets, has an embedding of NaN."""
    made = tmp_path_factory.mktemp("broken")
    path = make_checkpoint(made / "target", "qwen3_5_text", layer_types=KINDS, layers=len(KINDS), tie=False, **SHAPE)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][0] = torch.nan
    tensors["lm_head.weight"][0] = 0.0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return made


@sweep(18)
@given(
    st.sampled_from(DRAFTERS[:2]),
    ORDERS,
    st.lists(st.tuples(st.integers(0, len(PROMPTS) - 1), st.none() | st.integers(0, 12)), min_size=1, max_size=8),
    st.sampled_from([3, 16, 64]),
    st.sampled_from([None, 3]),
)
def test_states_of_nan_reach_no_other_request(
    broken: Path,
    drafter: dict[str, Any] | None,
    order: list[int],
    mixed: list[tuple[int, int | None]],
    budget: int,
    slots: int | None,
) -> None:
    """Check that requests whose states become NaN change no other text: neither of requests next to them, nor of hits
    after them. They leave NaN in rows of states, and in slots of snapshots that no request can find."""
    expected, _ = plain(broken, "float32", None)
    llm = engine(broken, drafter, dtype="float32", max_num_batched_tokens=budget, **sizes(broken, None, slots))
    healthy: list[tuple[int, int | None]] = [(i, None) for i in order]
    for asked in (healthy, mixed, healthy):
        prompts = [list(PROMPTS[i]) for i, _ in asked]
        for prompt, (_, place) in zip(prompts, asked, strict=True):
            if place is not None:
                prompt[place] = 0
        for (i, place), output in zip(asked, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            found = output.outputs[0]
            assert found.token_ids == ([] if place is not None else expected[i])
            assert found.finish_reason == ("length" if place is None else "error")
    llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: "none" if drafter is None else drafter["method"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_computes_no_more_than_the_last_block(
    family: str, folders: dict[str, Path], drafter: dict[str, Any] | None, dtype: str
) -> None:
    """Check that a hit recomputes at most the last block, with and without drafts."""
    folder = folders[family]
    llm = engine(folder, drafter, dtype=dtype)
    prompt = PROMPTS[2] + PROMPTS[3]  # 66 tokens do not fit
    prompt = prompt[:50]
    texts(llm, [prompt])
    before = llm.engine.stats()
    texts(llm, [prompt])
    after = llm.engine.stats()
    assert after.num_cached_tokens - before.num_cached_tokens == 48
    assert after.state_cache is not None
    assert before.state_cache is not None
    assert after.state_cache.hits - before.state_cache.hits == 1
    assert after.state_cache.num_bytes == after.state_cache.num_cached * state_bytes(folder)


@pytest.mark.parametrize("drafter", DRAFTERS[:2], ids=["none", "ngram"])
def test_a_hit_on_a_long_prompt_computes_at_most_a_block(
    folder: Path, drafter: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a hit on a long prompt recomputes at most a block, with the engine's default places of snapshots; also
    for a prompt that differs after 3,000 tokens."""
    monkeypatch.undo()
    speculative = {} if drafter is None else {"speculative_config": drafter}
    llm = LLM(model=str(folder / "target"), max_model_len=4200, threads=1, **speculative)
    prompt = [_random.randrange(1, VOCAB) for _ in range(4000)]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)

    def cached(prompt: list[int]) -> int:
        before = llm.engine.stats().num_cached_tokens
        texts(llm, [prompt], params)
        return llm.engine.stats().num_cached_tokens - before

    assert [cached(prompt) for _ in range(2)] == [0, 3984]
    other = prompt[:3000] + prompt[:500]
    assert [cached(other), cached(other[:3100] + [7] * 9)] == [2048, 2992]


def test_events_name_snapshots(folder: Path) -> None:
    llm = engine(folder, None, kv_events_config={"enable_kv_cache_events": True, "publisher": "null"})
    batches: list[KVEventBatch] = []
    llm.engine.publish = batches.append
    texts(llm, [PROMPTS[2]])
    stored = [event for batch in batches for event in batch.events() if isinstance(event, BlockStored)]
    kv = [hash for event in stored if not event.is_snapshot for hash in event.block_hashes]
    snapshots = [hash for event in stored if event.is_snapshot for hash in event.block_hashes]
    assert len(snapshots) == llm.engine.scheduler.state_cache_stats()["stored"]
    assert set(snapshots) <= set(kv)


def test_completions_of_a_prompt_share_its_snapshot(folder: Path) -> None:
    llm = engine(folder, None)
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True, detokenize=False)
    several = llm.generate({"prompt_token_ids": PROMPTS[3]}, params, use_tqdm=False)[0].outputs
    alone = engine(folder, None, enable_prefix_caching=False)
    same = alone.generate({"prompt_token_ids": PROMPTS[3]}, params, use_tqdm=False)[0].outputs
    assert [output.token_ids for output in several] == [output.token_ids for output in same]
    stats = llm.engine.stats()
    assert stats.state_cache is not None
    assert (stats.num_cached_tokens, stats.state_cache.hits) == (2 * 32, 2)


def test_requests_with_logprobs_penalties_and_priorities_hit(folder: Path) -> None:
    llm = engine(folder, DRAFTERS[1])
    alone = engine(folder, None, enable_prefix_caching=False)
    params = [
        SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, detokenize=False, **more)
        for more in ({"logprobs": 2}, {"presence_penalty": 1.5}, {"prompt_logprobs": 1}, {"min_tokens": 4})
    ]
    for _ in range(2):
        for one in params:
            assert texts(llm, [PROMPTS[1]], one) == texts(alone, [PROMPTS[1]], one)
    stats = llm.engine.stats()
    assert stats.num_cached_tokens == 5 * ((len(PROMPTS[1]) - 1) // 4 * 4)
