"""MTP heads on the CUDA runner, with interpreted kernels: drafts, the texts of whole engines, and what is rejected."""

from __future__ import annotations

import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from eagle3_reference import Round, speculate
from hf_reference import Statistics, load
from hf_reference import generate as continued
from hypothesis import given
from hypothesis import strategies as st
from mtp_reference import Script, add_head, fit
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.mtp import CudaMtpHead
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.engine.engine import Engine
from specrs.engine.weights import load_weights
from specrs.sampling import SamplingParams
from sweep import sweep

from backends.cuda_engines import (
    GREEDY,
    OWN_K,
    SAMPLED,
    SETTINGS,
    K,
    TextSettings,
    engine_config,
    generate,
    give_graphs,
    make_engine,
    texts,
    texts_in,
)

from .test_cuda_drafters import rounds_of
from .test_cuda_runner import assert_same_counts

VOCAB = 61
SHAPE: dict[str, Any] = {"hidden": 32, "intermediate": 32, "kv_heads": 1, "head_dim": 16, "vocab": VOCAB, "layers": 2}
NET: dict[str, Any] = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
KINDS = ["linear_attention", "full_attention"]
_random = random.Random(3)
PROMPTS = [[_random.randrange(VOCAB) for _ in range(length)] for length in (3, 9, 15)]
LONG = [PROMPTS[2], [*PROMPTS[2][:12], 4, 4, 9], PROMPTS[2][:9] + PROMPTS[1]]
"""Prompts with common beginnings."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with targets that have an MTP head, random or trained on the target's texts."""
    made = tmp_path_factory.mktemp("cuda_mtp")
    make_checkpoint(made / "random", "qwen3_5_text", seed=1, layer_types=KINDS, **SHAPE, **NET)
    add_head(made / "random", seed=4)
    shutil.copytree(made / "random", made / "fitted")
    target = load(made / "random", torch.float32)
    fit(made / "fitted", target, [prompt + continued(target, prompt, 12) for prompt in PROMPTS], steps=16)
    return made


def config_of(path: Path, k: int, *, size: int | None = None, method: str = "mtp", **fields: Any) -> EngineConfig:
    speculative = {"method": method, "num_speculative_tokens": k, "draft_vocab_size": size}
    return engine_config(path, speculative if k else None, **fields)


@cache
def weights(path: Path, size: int | None = None, *, drafts: bool = True) -> Weights:
    return load_weights(config_of(path, K if drafts else 0, size=size))


def engine_of(path: Path, k: int, *, gpu: bool = True, size: int | None = None, **fields: Any) -> Engine:
    made = make_engine(config_of(path, k, size=size, **fields), weights(path, size, drafts=k > 0), gpu=gpu)
    runner = made.runner
    if isinstance(runner, CudaRunner):
        target, drafter = runner.ctx.target, runner.ctx.drafter
        assert isinstance(target, CudaDecoder)
        assert target.states is not None
        assert target.workspace.entries.numel() == 0
        assert drafter is not None
        assert isinstance(drafter.model, CudaMtpHead)  # type: ignore[attr-defined]
    return made


@cache
def plain(folder: Path, params: SamplingParams, num_tokens: int, long: bool = False) -> list[list[int]]:
    """Return the texts of the CPU runner without drafts."""
    made = engine_of(folder / "random", 0, gpu=False)
    prompts = LONG if long else PROMPTS
    return texts(generate(made, [params] * len(prompts), num_tokens, prompts))


@pytest.mark.parametrize("size", [None, 40])
def test_drafts_and_counts_are_the_scripts(folder: Path, size: int | None) -> None:
    """Check every iteration against transformers' `MtpModel`: drafts, and how many were accepted. The prompt has two
    chunks."""
    target = load(folder / "fitted", torch.float32)
    script, statistics, rounds = Script(target), Statistics(), list[Round]()
    script.target_ids = script.target_ids[:size]
    engine = engine_of(folder / "fitted", K, size=size, max_steps_in_flight=1)
    engine.watch = rounds_of(engine, rounds)
    (request,) = generate(engine, [GREEDY], 12, PROMPTS[2:])
    said = speculate(target, script, PROMPTS[2], 12, K, [], statistics)
    assert request.output_token_ids == said.tokens
    assert rounds == said.rounds
    stats = engine.stats()
    assert stats.accepted_tokens == statistics.accepted_tokens
    assert list(request.acceptance.accepted_per_position) == statistics.per_position[:K]
    assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_a_head_with_experts(tmp_path: Path) -> None:
    """Check a target whose layers have a shared expert and others, and its head, which has them too: the drafts are
    those of transformers' `MtpModel`, and the text is that of the CPU without drafts, greedy and sampled."""
    experts = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
    sizes = SHAPE | NET | experts
    path = add_head(make_checkpoint(tmp_path / "target", "qwen3_5_moe_text", seed=1, layer_types=KINDS, **sizes))
    target = load(path, torch.float32)
    fit(path, target, [prompt + continued(target, prompt, 12) for prompt in PROMPTS], steps=16)
    statistics, rounds = Statistics(), list[Round]()
    engine = engine_of(path, K, max_steps_in_flight=1)
    engine.watch = rounds_of(engine, rounds)
    (request,) = generate(engine, [GREEDY], 12, PROMPTS[2:])
    said = speculate(target, Script(target), PROMPTS[2], 12, K, [], statistics)
    assert request.output_token_ids == said.tokens
    assert rounds == said.rounds
    assert 0 < engine.stats().accepted_tokens < engine.stats().draft_tokens
    params = [SAMPLED, GREEDY, SAMPLED]
    expected = texts(generate(engine_of(path, 0, gpu=False), params, 6, PROMPTS))
    mine = engine_of(path, K, rule="coupled", num_gpu_blocks_override=8, num_reserved_decode_tokens=0)
    assert texts(generate(mine, params, 6, PROMPTS)) == expected


def test_same_tokens_as_on_a_cpu(folder: Path) -> None:
    """Check that both runners accept the same drafts by the rule `rejection`."""
    mine, theirs = (engine_of(folder / "fitted", K, gpu=gpu) for gpu in (True, False))
    params = [SAMPLED, GREEDY, SAMPLED.replace(temperature=1.3)]
    for ours, reference in zip(*(generate(engine, params, 8, PROMPTS) for engine in (mine, theirs)), strict=True):
        assert ours.error is None
        assert ours.output_token_ids == reference.output_token_ids
        assert ours.acceptance.histogram == reference.acceptance.histogram
    assert_same_counts(mine.stats(), theirs.stats())
    assert mine.stats().drafts > 3


@sweep(4)
@given(
    st.sampled_from(["random", "fitted"]),
    st.sampled_from(["mtp", "suffix,mtp"]),
    st.integers(1, K),
    SETTINGS,
    st.sampled_from([None, 20]),
    OWN_K,
)
def test_texts_are_those_of_a_cpu_without_drafts(
    folder: Path, head: str, method: str, k: int, settings: TextSettings, size: int | None, ks: list[int]
) -> None:
    """Check texts against a CPU without drafts, for every K, preemption, batch, chunk size and vocabulary."""
    mine = engine_of(folder / head, k, size=size, method=method, **settings.fields)
    own = [settings.params.replace(num_speculative_tokens=min(k, one)) for one in ks]
    assert texts_in(settings, mine, 7, PROMPTS, own) == plain(folder, settings.params, 7)


def test_a_preempted_request_begins_anew(folder: Path) -> None:
    mine = engine_of(folder / "fitted", K, num_gpu_blocks_override=8, num_reserved_decode_tokens=0)
    assert texts(generate(mine, [GREEDY] * 3, 12, PROMPTS)) == plain(folder, GREEDY, 12)
    stats = mine.stats()
    assert mine.scheduler.num_preemptions > 0
    assert stats.accepted_tokens > 0


@sweep(3)
@given(
    st.integers(1, K),
    st.lists(st.lists(st.integers(0, len(LONG) - 1), min_size=1, max_size=3), min_size=2, max_size=3),
    st.sampled_from([5, 12]),
    st.booleans(),
)
def test_prefix_hits_have_the_texts_of_misses(
    folder: Path, k: int, rounds: list[list[int]], budget: int, graphs: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specrs.backends.blueprint.SNAPSHOT_INTERVAL", 8)
        patch.setattr("specrs.backends.blueprint.DECODE_SNAPSHOT_INTERVAL", 4)
        mine = engine_of(folder / "fitted", k, max_num_batched_tokens=budget, enable_prefix_caching=True)
        if graphs:
            give_graphs(mine)
        for order in rounds:
            made = texts(generate(mine, [GREEDY] * len(order), 5, [LONG[i] for i in order]))
            assert made == [plain(folder, GREEDY, 5, True)[i] for i in order]
        mine.scheduler.check_integrity()


def test_a_hit_keeps_the_heads_context(folder: Path) -> None:
    """Check drafts after prefix hits against the script. A prompt that was seen before keeps the head's whole context;
    where a prompt parts at the end of a hit, the head starts anew there."""
    target = load(folder / "fitted", torch.float32)
    script, hits, starts = Script(target), [], []
    engine = engine_of(folder / "fitted", K, enable_prefix_caching=True, max_steps_in_flight=1)
    for prompt in (PROMPTS[2][:13], PROMPTS[2][:13], [*PROMPTS[2][:12], 7, 8]):
        rounds = list[Round]()
        engine.watch = rounds_of(engine, rounds)
        (request,) = generate(engine, [GREEDY], 9, [prompt])
        hits.append(request.num_cached_tokens)
        starts.append(set())
        for start in {0, request.num_cached_tokens}:
            said = speculate(target, script, prompt, 9, K, [], Statistics(), start)
            assert request.output_token_ids == said.tokens
            if rounds == said.rounds:
                starts[-1].add(start)
    assert hits == [0, 12, 12]
    assert starts == [{0}, {0}, {12}]
