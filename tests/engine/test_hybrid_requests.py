"""Random requests to engines whose target has delta nets and an MTP head. Each text is that of the request alone
without drafts, to the bit. `SPECRS_SWEEP=1000` runs 10,000 requests."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.cuda_engines import Engines
from checkpoints import make_checkpoint
from hf_reference import generate_all, load
from hypothesis import given
from hypothesis import strategies as st
from mtp_reference import add_head, fit
from specrs.config import EngineConfig
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.sampling import SamplingParams
from sweep import sweep

from engine.harness import run

VOCAB, TOKENS, MOST_DRAFTS = 61, 20, 6
KINDS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
SHAPE = {"vocab": VOCAB, "hidden": 64, "intermediate": 96, "head_dim": 32, "kv_heads": 1, "eos_token_id": 0}
BEGINNINGS = [random.Random(i).choices(range(1, VOCAB), k=30) for i in range(3)]
LENGTHS = [2, 6, 11, 18, 24, 30]
"""Prompts are the first tokens of one of the beginnings, of one of these lengths, and some tokens of their own."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with an MTP head that is trained on its texts, so that some drafts are accepted and some are not."""
    path = tmp_path_factory.mktemp("hybrid") / "target"
    make_checkpoint(path, "qwen3_5_text", layer_types=KINDS, layers=len(KINDS), seed=2, **SHAPE)
    model = load(path, torch.float32)
    prompts = [text[:length] for text in BEGINNINGS for length in LENGTHS]
    known = [text + more for text, more in zip(prompts, generate_all(model, prompts, TOKENS), strict=True)]
    fit(add_head(path, seed=4), model, known, steps=35)
    return path


@pytest.fixture(scope="module")
def engines(target: Path) -> Engines:
    """Engines by dtype, quantization, method and the number of ids that it drafts. They draft at most `k` tokens."""

    def config(
        dtype: str, quantization: str | None, method: str | None, size: int | None, *, k: int = 1, **fields: Any
    ) -> EngineConfig:
        speculative = None if method is None else {"method": method, "num_speculative_tokens": k}
        if speculative is not None:
            speculative["rejection_sample_method"] = "coupled"
            speculative |= {"draft_vocab_size": size} if "mtp" in str(method) else {"prompt_lookup_min": 1}
        sizes: dict[str, Any] = {"max_model_len": 64, "block_size": 4} | fields
        return EngineConfig(
            model=str(target), dtype=dtype, quantization=quantization, speculative_config=speculative, **sizes
        )

    return Engines(config)


@cache
def plain(engines: Engines, dtype: str, quantization: str | None) -> Engine:
    """Return an engine without drafts and prefix cache, of one thread."""
    fields = {"max_num_seqs": 1, "threads": 1, "enable_prefix_caching": False}
    return engines.engine(dtype, quantization, None, None, gpu=False, **fields)


def params_of(sampled: bool, seed: int, **fields: Any) -> SamplingParams:
    drawn: dict[str, Any] = {"temperature": 0.2, "seed": seed} if sampled else {"temperature": 0.0}
    return SamplingParams(**drawn, **fields, ignore_eos=True, detokenize=False)


@cache
def expected(
    engines: Engines, dtype: str, quantization: str | None, prompt: tuple[int, ...], sampled: bool, seed: int
) -> list[int]:
    """Return the text of the request alone without drafts, by the engine `plain`."""
    job = Request(0, list(prompt), params_of(sampled, seed, max_tokens=TOKENS), num_speculative_tokens=0)
    engine = plain(engines, dtype, quantization)
    engine.add_request(job)
    run(engine)
    return job.output_token_ids


REQUESTS = st.tuples(
    st.integers(0, len(BEGINNINGS) - 1),
    st.sampled_from(LENGTHS),  # number of tokens of the beginning
    st.one_of(st.just([]), st.lists(st.integers(1, VOCAB - 1), max_size=8)),  # tokens of its own
    st.one_of(st.none(), st.integers(0, MOST_DRAFTS)),  # its K
    st.sampled_from([1, 7, TOKENS, TOKENS]),  # its maximum number of tokens
    st.integers(-1, 1),  # its priority
    st.booleans(),  # sampled
    st.integers(0, 5),  # steps before the next request arrives
)


@sweep(30)
@given(
    st.sampled_from(["mtp", "mtp", "suffix,mtp", "ngram"]),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([None, "int8", "q8_0", "q4_k"]),
    st.sampled_from([None, None, 17]),
    st.integers(1, MOST_DRAFTS),
    st.sampled_from([3, 16, 64]),
    st.sampled_from([None, 17]),
    st.sampled_from([1, 3, 100]),
    st.sampled_from([2, 8]),
    st.integers(1, 2),
    st.lists(REQUESTS, min_size=10, max_size=10),
)
def test_texts_are_those_of_requests_alone(
    engines: Engines,
    method: str,
    dtype: str,
    quantization: str | None,
    size: int | None,
    k: int,
    budget: int,
    blocks: int | None,
    snapshots: int,
    seqs: int,
    threads: int,
    drawn: list[tuple[int, int, list[int], int | None, int, int, bool, int]],
) -> None:
    """Check texts of requests that arrive while others run: each has its own K, priority and sampling, prompts come in
    chunks and hit the prefix cache, and a pool too small for all requests preempts some."""
    names = (dtype, quantization, method, size if "mtp" in method else None)
    row = engines.weights(*names).target.state_bytes[0]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("specrs.backends.blueprint.SNAPSHOT_INTERVAL", 8)
        monkeypatch.setattr("specrs.backends.blueprint.DECODE_SNAPSHOT_INTERVAL", 4)
        fields = {"max_num_seqs": seqs, "max_num_batched_tokens": budget, "threads": threads}
        fields["num_reserved_decode_tokens"] = 0  # a full pool preempts
        fields |= {"num_gpu_blocks_override": blocks, "state_cache_memory_bytes": snapshots * row}
        engine = engines.engine(*names, gpu=False, k=k, **fields)
    jobs = []
    for i, (which, length, own, its_k, most, priority, sampled, steps) in enumerate(drawn):
        params = params_of(sampled, i, max_tokens=most, num_speculative_tokens=None if its_k is None else min(its_k, k))
        job = Request(i, BEGINNINGS[which][:length] + own, params, num_speculative_tokens=k, priority=priority)
        engine.add_request(job)
        jobs.append((job, sampled))
        for _ in range(steps):
            engine.step()
    run(engine)
    for i, (job, sampled) in enumerate(jobs):
        text = expected(engines, dtype, quantization, tuple(job.prompt_token_ids), sampled, i)
        assert job.output_token_ids == text[: job.params.max_tokens]
