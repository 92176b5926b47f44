"""Native models and torch models as target and draft of each other: drafts change no text.

The core's passes and float64 have one text. Sums of torch in fewer bits depend on how many rows a pass has, so there
two tokens that are nearly tied may change places.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, perturb_checkpoint
from specrs.backends.weights import Weights
from specrs.engine.build import build_engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
from specrs.sampling import SamplingParams

from engine.harness import VOCAB, config, make_prompts, poison, run

KINDS: dict[str, dict[str, Any]] = {
    "native": {"dtype": "float32"},
    "native bf16": {"dtype": "bfloat16"},
    "float64": {"dtype": "float64"},
    "eager bf16": {"dtype": "bfloat16", "enforce_eager": True},
    "transformers": {"dtype": "float32", "model_impl": "transformers"},
}
ROUNDING = {"eager bf16": 0.03, "transformers": 1e-4}
"""How much the log probabilities of two tokens may differ if they change places, by kind of target; 0 for kinds not
named."""
PAIRS = [
    ("native", "float64"),
    ("native", "eager bf16"),
    ("native bf16", "transformers"),
    ("float64", "native"),
    ("float64", "transformers"),
    ("eager bf16", "native bf16"),
    ("eager bf16", "eager bf16"),
    ("transformers", "native"),
    ("transformers", "eager bf16"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft that is often right."""
    folder = tmp_path_factory.mktemp("mixed")
    target = make_checkpoint(folder / "target", "qwen3", seed=1, vocab=VOCAB)
    return target, perturb_checkpoint(target, folder / "draft", noise=0.03, seed=2)


@functools.cache
def loaded(target: Path, draft: Path, kind: str) -> Weights:
    return load_weights(config(target, draft, k=1, **KINDS[kind]))


def texts(folders: tuple[Path, Path], target: str, draft: str, k: int, temperature: float) -> tuple[list[Request], int]:
    """Run requests under the coupled rule. Return them, and the number of accepted drafts."""
    weights = replace(loaded(*folders, target), drafter=loaded(*folders, draft).drafter)
    fields: dict[str, Any] = {"max_num_batched_tokens": 24, "block_size": 8} | KINDS[target]
    engine = build_engine(config(*folders, k=3, rule="coupled", **fields), weights)
    assert engine.runner.is_native == target.startswith("native")
    poison(engine)
    jobs = []
    for i, prompt in enumerate(make_prompts()[2:9]):
        params = SamplingParams(
            temperature=temperature,
            max_tokens=24,
            ignore_eos=True,
            detokenize=False,
            logprobs=2,
            num_speculative_tokens=k,
        )
        jobs.append(Request(i, prompt, params, num_speculative_tokens=3, seed=i))
        engine.add_request(jobs[-1])
    run(engine)
    return jobs, engine.stats().accepted_tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_drafts_change_no_text(target: str, draft: str, temperature: float, folders: tuple[Path, Path]) -> None:
    with_drafts, accepted = texts(folders, target, draft, 3, temperature)
    without, none = texts(folders, target, draft, 0, temperature)
    changed = 0
    for one, other in zip(with_drafts, without, strict=True):
        ids, expected = one.output_token_ids, other.output_token_ids
        at = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=True)) if a != b), None)
        if at is None:
            continue
        changed += 1
        assert target in ROUNDING
        if temperature == 0.0:
            assert other.logprobs is not None
            first, second = other.logprobs[at].top_logprobs[:2]
            assert first - second < ROUNDING[target]
    assert changed < len(without) / 2
    assert accepted > none == 0


@pytest.mark.parametrize("target", ["float64", "transformers"])
def test_prompt_log_probabilities_are_those_of_native_passes(target: str, folders: tuple[Path, Path]) -> None:
    """Check prompt log probabilities against native passes, for prompts that share chunks, some without the option."""
    found = []
    for kind in (target, "native"):
        fields: dict[str, Any] = {"max_num_batched_tokens": 24, "block_size": 8} | KINDS[kind]
        engine = build_engine(config(*folders, k=3, **fields), loaded(*folders, kind))
        jobs = []
        for i, prompt in enumerate(make_prompts()[2:9]):
            params = SamplingParams(max_tokens=2, temperature=0.0, detokenize=False, prompt_logprobs=i % 3 or None)
            jobs.append(Request(i, prompt, params, num_speculative_tokens=3))
            engine.add_request(jobs[-1])
        run(engine)
        found.append([entry for job in jobs for entry in job.prompt_logprobs or ()])
    assert len(found[0]) > 100
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
