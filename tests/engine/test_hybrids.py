"""Engines whose target has delta nets or short convolutions: transformers' text at any K, chunking and preemption, and
errors that name the field."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from hf_reference import generate, load
from hybrid_reference import float64
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs import LLM, SamplingParams
from specrs.errors import InvalidConfigError, UnsupportedModelError
from specrs.models.torch_loader import load_model
from specrs.sampling import derive_seed

VOCAB = 61
SHAPE = {"vocab": VOCAB, "hidden": 64, "intermediate": 96, "head_dim": 32, "kv_heads": 1, "eos_token_id": 0}
KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
CONVS = ["conv", "conv", "full_attention", "conv"]
FAMILIES = {"qwen3_5_text": KINDS, "lfm2": CONVS, "lfm2_moe": CONVS}
"""Kinds of layers of the targets, by family."""
TOKENS = 14
_random = random.Random(3)
# Repeated parts, whose continuations n-grams guess.
PROMPTS = [[_random.randrange(1, VOCAB) for _ in range(length)] * 3 for length in (1, 2, 4, 7, 11)]
DRAFTERS: list[dict[str, Any] | None] = [
    None,
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    {"method": "suffix", "num_speculative_tokens": 5},
    {"method": "draft_model", "num_speculative_tokens": 2},
]


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


@cache
def references(target: Path) -> list[list[int]]:
    with float64():
        model = load(target)
        return [generate(model, prompt, TOKENS) for prompt in PROMPTS]


def speculative(folder: Path, drafter: dict[str, Any] | None) -> dict[str, Any]:
    if drafter is None:
        return {}
    model = {"model": str(folder / "draft")} if drafter["method"] == "draft_model" else {}
    return {"speculative_config": drafter | model}


def texts(
    folder: Path, prompts: list[list[int]], params: SamplingParams | list[SamplingParams], **options: Any
) -> list[list[int]]:
    llm = LLM(model=str(folder / "target"), **options)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)


@settings(max_examples=16)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from(DRAFTERS),
    st.integers(1, len(PROMPTS)),
    st.sampled_from([3, 16, 64]),
    st.sampled_from([None, 12]),
    st.integers(1, 2),
)
def test_the_text_of_transformers(
    folders: dict[str, Path],
    family: str,
    drafter: dict[str, Any] | None,
    count: int,
    budget: int,
    blocks: int | None,
    depth: int,
) -> None:
    """Check texts against transformers, by torch in float64: in chunks, in batches, in a pool too small for all
    requests."""
    folder = folders[family]
    with float64():
        found = texts(
            folder,
            PROMPTS[:count],
            GREEDY,
            dtype="float64",
            max_model_len=48,
            block_size=4,
            max_num_batched_tokens=budget,
            num_gpu_blocks_override=blocks,
            max_steps_in_flight=depth if drafter is None or drafter["method"] == "draft_model" else 1,
            **speculative(folder, drafter),
        )
    assert found == references(folder / "target")[:count]


SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=TOKENS, ignore_eos=True, detokenize=False)


@cache
def plain(folder: Path, dtype: str, quantization: str | None, sampled: bool) -> list[list[int]]:
    """Return the token ids that native passes generate without drafts, one request at a time."""
    options = {"dtype": dtype, "quantization": quantization, "max_num_seqs": 1, "threads": 1}
    return texts(folder, PROMPTS, SAMPLED if sampled else GREEDY, **options)


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from(DRAFTERS),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([None, "int4", "q8_0"]),
    st.booleans(),
    st.sampled_from([3, 16, 64]),
    st.sampled_from([None, 12]),
    st.integers(1, 2),
    st.lists(st.sampled_from([None, 0, 1, 2]), min_size=len(PROMPTS), max_size=len(PROMPTS)),
)
def test_native_text_is_that_without_drafts(
    folders: dict[str, Path],
    family: str,
    drafter: dict[str, Any] | None,
    dtype: str,
    quantization: str | None,
    sampled: bool,
    budget: int,
    blocks: int | None,
    threads: int,
    ks: list[int | None],
) -> None:
    """Check that native text equals that without drafts, for any drafts, preemption, batch and number of threads.
    Sampled texts use coupled draws."""
    folder = folders[family]
    rule = {"rejection_sample_method": "coupled"} if sampled and drafter is not None else {}
    params = SAMPLED if sampled else GREEDY
    found = texts(
        folder,
        PROMPTS,
        [replace(params, num_speculative_tokens=None if drafter is None else k) for k in ks],
        dtype=dtype,
        quantization=quantization,
        max_model_len=48,
        block_size=4,
        max_num_batched_tokens=budget,
        num_gpu_blocks_override=blocks,
        threads=threads,
        **speculative(folder, None if drafter is None else drafter | rule),
    )
    assert found == plain(folder, dtype, quantization, sampled)


@pytest.mark.parametrize("family", FAMILIES)
def test_native_text_is_transformers(family: str, folders: dict[str, Path]) -> None:
    folder = folders[family]
    assert texts(folder, PROMPTS, GREEDY) == references(folder / "target")


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next"])
def test_native_text_of_experts_is_transformers(family: str, tmp_path: Path) -> None:
    """Check native texts of hybrids with experts against transformers, with and without drafts."""
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    target = make_checkpoint(tmp_path / "target", family, layer_types=KINDS, layers=len(KINDS), **SHAPE, **sizes)
    for drafter in DRAFTERS[:3]:
        assert texts(tmp_path, PROMPTS, GREEDY, **speculative(tmp_path, drafter)) == references(target)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_completions_of_a_prompt(family: str, folders: dict[str, Path]) -> None:
    """Check that each of several completions of a prompt has states of its own: its text is that of a request alone
    with its seed."""
    llm = LLM(model=str(folders[family] / "target"), max_model_len=64)
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True, detokenize=False)
    several = llm.generate({"prompt_token_ids": PROMPTS[3]}, params, use_tqdm=False)[0].outputs
    assert len({tuple(output.token_ids) for output in several}) == 3
    for output, seed in zip(several, (5, derive_seed(5, 1), derive_seed(5, 2)), strict=True):
        one = replace(params, n=1, seed=seed)
        alone = llm.generate({"prompt_token_ids": PROMPTS[3]}, one, use_tqdm=False)[0].outputs[0]
        assert output.token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("lfm2", {"model_impl": "transformers"}, "layer_types has 'conv'"),
        ("qwen3_5_text", {"model_impl": "transformers"}, "recurrent layers"),
    ],
)
def test_combinations_that_are_not_implemented(
    family: str, options: dict[str, Any], message: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        LLM(model=str(folders[family] / "target"), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_model_with_states_is_rejected(family: str, folders: dict[str, Path]) -> None:
    folder = folders[family]
    speculative_config = {"model": str(folder / "target"), "num_speculative_tokens": 2}
    with pytest.raises(UnsupportedModelError, match="as a draft model, a model whose layers have no states"):
        LLM(model=str(folder / "draft"), speculative_config=speculative_config)


def test_the_default_number_of_requests_is_lowered_to_what_fits(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, draft = load_model(folder / "target", dtype="float64").state_bytes
    assert row == 3 * 4 * (4 * 16 * 16 + 3 * (2 * 2 * 16 + 4 * 16))
    assert draft == 3 * 4 * (2 * 2 * 16 + 4 * 16 + 2 * 16 + 4 * 16 + 4)
    for module in ("backend", "kv_memory"):
        monkeypatch.setattr(f"specrs.backends.cpu.{module}.host_memory", lambda: 40 * row)
    small = {"model": str(folder / "target"), "dtype": "float64", "max_model_len": 32, "num_gpu_blocks_override": 2}
    with caplog.at_level(logging.INFO, "specrs"):
        assert LLM(**small).engine.config.max_num_seqs == 10
    assert f"max_num_seqs is lowered from 256 to 10: a request has {row} bytes of states" in caplog.text
    with pytest.raises(InvalidConfigError, match=r"max_num_seqs=41: each request has .* allowed: at most 40"):
        LLM(**small, max_num_seqs=41)
    with pytest.raises(InvalidConfigError, match=r"max_num_seqs=256: each request has .* allowed: at most 40"):
        LLM(**small, max_num_seqs=256)


def test_states_snapshots_and_kv_share_the_memory(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, _ = load_model(folder / "target", dtype="float64").state_bytes
    for module in ("backend", "kv_memory"):
        monkeypatch.setattr(f"specrs.backends.cpu.{module}.host_memory", lambda: 40 * row)
    base = {"model": str(folder / "target"), "dtype": "float64", "max_model_len": 32, "block_size": 4}
    config = LLM(**base).engine.config
    assert (config.max_num_seqs, config.state_cache_memory_bytes, config.enable_prefix_caching) == (10, 6 * row, True)
    assert LLM(**base, max_num_seqs=1).engine.config.state_cache_memory_bytes == 4 * row
    chosen = LLM(**base, max_num_seqs=20, state_cache_memory_bytes=12 * row + 5)
    assert chosen.engine.config.state_cache_memory_bytes == 12 * row
    # What 32 of 40 rows' bytes leave: a block has K and V of one layer and one head of 32 float64 numbers.
    assert chosen.engine.scheduler.num_blocks == 8 * row // (2 * 32 * 8 * 4)
    for options, message in (
        ({"max_num_seqs": 29, "state_cache_memory_bytes": 12 * row}, "max_num_seqs=29.*allowed: at most 28"),
        ({"state_cache_memory_bytes": row - 1}, f"state_cache_memory_bytes={row - 1}.*at least {row}"),
        ({"state_cache_memory_bytes": row, "enable_prefix_caching": False}, "set enable_prefix_caching=True"),
        ({"max_num_seqs": 40, "enable_prefix_caching": True}, "enable_prefix_caching=True: a snapshot of .* bytes"),
        ({"max_num_seqs": 40, "enable_prefix_caching": False}, "states leave of the memory"),
        ({"max_num_seqs": 20, "kv_cache_memory_bytes": 20 * row}, "kv_cache_memory_bytes"),
    ):
        with pytest.raises(InvalidConfigError, match=message):
            LLM(**base, **options)
    with caplog.at_level(logging.WARNING, "specrs"):
        few = LLM(**base, max_num_seqs=38, num_gpu_blocks_override=8).engine
    assert few.config.state_cache_memory_bytes == row
    with pytest.raises(InvalidConfigError, match="no layer of this model has a state; leave it out"):
        LLM(model=str(folder / "draft"), state_cache_memory_bytes=1 << 20)
