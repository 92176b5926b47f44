"""Engines of Gemma 4's text model: transformers' text with any drafts, chunks and preemption, and errors that name the
field."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_gemma4, perturb_checkpoint
from gemma4_reference import float64
from hf_reference import generate, load
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs import LLM, SamplingParams
from specrs.errors import UnsupportedConfigError

VOCAB = 61
TOKENS = 14
_random = random.Random(3)
# Repeated parts, whose continuations n-grams guess; longer than the window of 8.
PROMPTS = [[_random.randrange(1, VOCAB) for _ in range(length)] * 3 for length in (1, 2, 4, 7, 11)]
DRAFTERS: list[dict[str, Any] | None] = [
    None,
    {"method": "suffix", "num_speculative_tokens": 5},
    {"method": "draft_model", "model": "twin", "num_speculative_tokens": 3},
    {"method": "draft_model", "model": "qwen3", "num_speculative_tokens": 2},
]
VARIANTS = ("gemma4", "gemma4, all of it", "gemma4, experts", "gemma4, experts and embeddings")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gemma4")
    for variant in VARIANTS:
        # With a tied LM head a random model repeats its last token, whatever its layers compute.
        make_gemma4(made / variant, variant, tie=False)
    perturb_checkpoint(made / "gemma4", made / "twin", noise=0.05)
    make_checkpoint(made / "qwen3", "qwen3", vocab=VOCAB, hidden=64, intermediate=96, head_dim=32, kv_heads=1)
    return made


@cache
def references(target: Path) -> list[list[int]]:
    with float64():
        model = load(target)
        found = [generate(model, prompt, TOKENS) for prompt in PROMPTS]
    assert all(len(set(text)) > TOKENS // 2 for text in found), "texts repeat tokens, so mistakes would not show"
    return found


def speculative(folder: Path, drafter: dict[str, Any] | None) -> dict[str, Any]:
    if drafter is None:
        return {}
    model = {"model": str(folder / drafter["model"])} if "model" in drafter else {}
    return {"speculative_config": drafter | model}


GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)


def texts(target: Path, prompts: list[list[int]], params: SamplingParams, **options: Any) -> list[list[int]]:
    llm = LLM(model=str(target), **options)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@settings(max_examples=20)
@given(
    st.sampled_from(VARIANTS),
    st.sampled_from(DRAFTERS),
    st.integers(1, len(PROMPTS)),
    st.sampled_from([3, 16, 64]),
    st.sampled_from([None, 12]),
    st.integers(1, 2),
)
def test_the_text_of_transformers(
    folder: Path, variant: str, drafter: dict[str, Any] | None, count: int, budget: int, blocks: int | None, depth: int
) -> None:
    """Check texts against transformers, by torch in float64: in chunks, in batches, in a pool too small for all
    requests."""
    with float64():
        found = texts(
            folder / variant,
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
    assert found == references(folder / variant)[:count]


@cache
def plain(target: Path, dtype: str, quantization: str | None, sampled: bool) -> list[list[int]]:
    """Return the token ids that native passes generate without drafts, one request at a time."""
    params = SAMPLED if sampled else GREEDY
    return texts(target, PROMPTS, params, dtype=dtype, quantization=quantization, max_num_seqs=1, threads=1)


SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=TOKENS, ignore_eos=True, detokenize=False)


@settings(max_examples=24)
@given(
    st.sampled_from(VARIANTS),
    st.sampled_from(DRAFTERS),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([None, "int4", "q8_0"]),
    st.booleans(),
    st.sampled_from([3, 16, 64]),
    st.sampled_from([None, 12]),
    st.integers(1, 2),
)
def test_native_text_is_that_without_drafts(
    folder: Path,
    variant: str,
    drafter: dict[str, Any] | None,
    dtype: str,
    quantization: str | None,
    sampled: bool,
    budget: int,
    blocks: int | None,
    threads: int,
) -> None:
    """Check that native text equals that without drafts, for any drafts, preemption, batch and number of threads.
    Sampled texts use coupled draws."""
    rule = {"rejection_sample_method": "coupled"} if sampled and drafter is not None else {}
    found = texts(
        folder / variant,
        PROMPTS,
        SAMPLED if sampled else GREEDY,
        dtype=dtype,
        quantization=quantization,
        max_model_len=48,
        block_size=4,
        max_num_batched_tokens=budget,
        num_gpu_blocks_override=blocks,
        threads=threads,
        **speculative(folder, None if drafter is None else drafter | rule),
    )
    assert found == plain(folder / variant, dtype, quantization, sampled)


@pytest.mark.parametrize("variant", VARIANTS)
def test_native_text_is_transformers(folder: Path, variant: str) -> None:
    assert texts(folder / variant, PROMPTS, GREEDY) == references(folder / variant)


def test_a_shared_beginning_is_computed_once(folder: Path) -> None:
    """Check that a common beginning is computed once, with a prefix cache and layers that read other layers' keys and
    values."""
    target = folder / "gemma4"
    with float64():
        llm = LLM(model=str(target), dtype="float64", max_model_len=48, block_size=4)
        prompt = {"prompt_token_ids": PROMPTS[4]}
        first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == references(target)[4]
    assert second.metrics.num_cached_tokens == 32


def test_several_ranks_are_not_implemented(folder: Path) -> None:
    with pytest.raises(UnsupportedConfigError, match="tensor_parallel_size=2: not implemented for a model"):
        LLM(model=str(folder / "gemma4"), tensor_parallel_size=2)
