"""Gemma 4's assistants on the CUDA runner, with interpreted kernels: drafts, counts, and the texts of whole engines."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from assistant_reference import Script, fit, load_target, make_assistant
from checkpoints import make_gemma4
from eagle3_reference import Round, speculate
from hf_reference import Statistics
from hf_reference import generate as continued
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cuda.assistant import CudaAssistant
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.drafters.assistant import LoadedAssistant
from specrs.drafters.assistant.files import open_assistant
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.weights import load_weights
from specrs.models.torch_decoder import TorchDecoder
from specrs.sampling import SamplingParams
from sweep import sweep
from torch import Tensor

from backends.cuda_engines import (
    CUDA,
    GREEDY,
    OWN_K,
    SAMPLED,
    SETTINGS,
    K,
    TextSettings,
    engine_config,
    generate,
    make_engine,
    texts,
    texts_in,
)

from .test_cuda_drafters import rounds_of
from .test_cuda_runner import assert_same_counts

VOCAB, TOKENS = 61, 8
SHARING, OWN = "gemma4", "gemma4, keys are values"
"""A target whose last layers read other layers' keys, and one whose layers all have keys."""
KINDS = ["sliding_attention", "full_attention"]
_random = random.Random(3)
PROMPTS = [[_random.randrange(1, VOCAB) for _ in range(length)] for length in (1, 9, 15)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets with windows of 8, each with an assistant trained on its texts."""
    made = tmp_path_factory.mktemp("cuda_assistant")
    shape: dict[str, Any] = {"hidden": 32, "intermediate": 32, "head_dim": 8, "global_head_dim": 16, "vocab": VOCAB}
    for variant, fields in ((SHARING, {"num_kv_shared_layers": 2}), (OWN, {"num_kv_shared_layers": 0})):
        path = make_gemma4(
            made / variant, variant, layers=4, layer_types=KINDS * 2, tie=False, seed=1, **shape, **fields
        )
        make_assistant(made / f"{variant}, fitted", path, seed=4, kinds=KINDS, hidden=24, intermediate=24)
        target = load_target(path, torch.float32)
        fit(made / f"{variant}, fitted", target, [prompt + continued(target, prompt, 12) for prompt in PROMPTS], 16)
    return made


def config_of(folder: Path, variant: str, k: int, *, size: int | None = None, **fields: Any) -> EngineConfig:
    speculative = {"method": fields.pop("method", "mtp"), "num_speculative_tokens": k, "draft_vocab_size": size}
    speculative |= {"model": str(folder / f"{variant}, fitted"), "max_model_len": fields.pop("draft_len", None)}
    return engine_config(folder / variant, speculative if k else None, **({"enforce_eager": False} | fields))


@cache
def weights(folder: Path, variant: str, size: int | None) -> Weights:
    """Return the models as the CUDA backend loads them."""
    target = load_weights(config_of(folder, variant, 0, enforce_eager=True)).target
    assert isinstance(target, TorchDecoder)
    files = open_assistant(str(folder / f"{variant}, fitted"), target, revision=None, size=size, counts=None)
    return Weights(target, LoadedAssistant(CUDA.load_head(files, target, None)))


@cache
def on_cpu(folder: Path, variant: str, drafts: bool) -> Weights:
    return load_weights(config_of(folder, variant, K if drafts else 0))


def engine_of(folder: Path, variant: str, k: int, *, size: int | None = None, **fields: Any) -> Engine:
    """Return an engine on the CUDA runner."""
    made = make_engine(config_of(folder, variant, k, size=size, **fields), weights(folder, variant, size))
    drafter = made.runner.ctx.drafter  # type: ignore[attr-defined]
    assert isinstance(drafter.model, CudaAssistant)
    return made


@cache
def plain(folder: Path, params: SamplingParams) -> list[list[int]]:
    """Return the texts of the CPU runner without drafts."""
    engine = build_engine(config_of(folder, SHARING, 0), on_cpu(folder, SHARING, drafts=False))
    return texts(generate(engine, [params] * 3, TOKENS, PROMPTS))


@pytest.mark.parametrize(("variant", "k", "size"), [(SHARING, 1, 40), (OWN, K, None)])
def test_drafts_and_counts_are_the_scripts(folder: Path, variant: str, k: int, size: int | None) -> None:
    """Check every iteration against transformers' module: the target's state that the first pass reads, the drafts, and
    how many were accepted. A prompt has two chunks, and is then a prefix hit."""
    target = load_target(folder / variant, torch.float32)
    script, statistics, per_position = Script(folder / f"{variant}, fitted", target), Statistics(), [0] * k
    score, hits, drafted_on = script.model.lm_head.forward, list[int](), False
    script.model.lm_head.forward = lambda x: score(x).index_fill(-1, torch.arange(size or VOCAB, VOCAB), -torch.inf)
    engine = engine_of(folder, variant, k, size=size, max_steps_in_flight=1, enable_prefix_caching=True)
    for prompt in (PROMPTS[2], PROMPTS[2], [*PROMPTS[2][:12], 7, 8]):
        rounds, states = list[Round](), list[Tensor]()
        watch = rounds_of(engine, rounds)

        def watch_both(slot: Any, header: Any, ms: float, watch: Any = watch, states: list[Tensor] = states) -> None:
            watch(slot, header, ms)
            states.extend(engine.runner.ctx.buffers.first_states[: header.num_decode].clone())  # type: ignore[attr-defined]

        engine.watch = watch_both
        (request,) = generate(engine, [GREEDY], TOKENS, [prompt])
        said = speculate(target, script, prompt, TOKENS, k, [], statistics)  # type: ignore[arg-type]
        assert request.output_token_ids == said.tokens
        assert rounds == said.rounds
        known = target(torch.tensor([prompt + said.tokens]), output_hidden_states=True).hidden_states[-1][0]
        for one, state in zip(rounds, states, strict=True):
            if one.drafts:
                torch.testing.assert_close(state, known[one.n - 2], rtol=1e-4, atol=1e-4)
        hits.append(request.num_cached_tokens)
        drafted_on |= any(one.accepted == k and after.drafts for one, after in pairwise(rounds))
        for i, count in enumerate(request.acceptance.accepted_per_position[:k]):
            per_position[i] += count
    assert hits == [0, 12, 12]
    assert drafted_on or k > 1, "no drafts after an iteration whose drafts were all accepted"
    assert engine.stats().accepted_tokens == statistics.accepted_tokens
    assert per_position == statistics.per_position[:k]
    assert 0 < statistics.accepted_tokens < engine.stats().draft_tokens


def test_same_tokens_as_on_a_cpu(folder: Path) -> None:
    """Check that the CPU's assistant has the same drafts accepted by the rule `rejection`."""
    theirs = build_engine(config_of(folder, SHARING, K), on_cpu(folder, SHARING, drafts=True))
    mine, params = engine_of(folder, SHARING, K), [SAMPLED, GREEDY, SAMPLED.replace(temperature=1.3)]
    for ours, reference in zip(*(generate(engine, params, 8, PROMPTS) for engine in (mine, theirs)), strict=True):
        assert ours.error is None
        assert ours.output_token_ids == reference.output_token_ids
        assert ours.acceptance.histogram == reference.acceptance.histogram
    # Native code feeds prompts and verifies in one pass.
    assert_same_counts(replace(mine.stats(), target_passes=theirs.stats().target_passes), theirs.stats())
    assert mine.stats().drafts > 3


@sweep(4)
@given(
    st.sampled_from(["mtp", "suffix,mtp"]),
    st.integers(1, K),
    SETTINGS,
    st.sampled_from([None, 20]),
    OWN_K,
)
def test_texts_are_those_of_a_cpu_without_drafts(
    folder: Path, method: str, k: int, settings: TextSettings, size: int | None, ks: list[int]
) -> None:
    """Check texts for every K, preemption, batch, chunk size and vocabulary."""
    mine = engine_of(folder, SHARING, k, size=size, method=method, **settings.fields)
    own = [settings.params.replace(num_speculative_tokens=min(k, one)) for one in ks]
    assert texts_in(settings, mine, TOKENS, PROMPTS, own) == plain(folder, settings.params)


def test_a_preempted_request_and_a_short_context(folder: Path) -> None:
    """Check that a preempted request drafts on, and that one which outgrows the assistant's context goes on without
    drafts."""
    fields = {"num_gpu_blocks_override": 8, "num_reserved_decode_tokens": 0, "draft_len": 12}
    theirs = build_engine(config_of(folder, SHARING, K, **fields), on_cpu(folder, SHARING, drafts=True))
    mine, prompts = engine_of(folder, SHARING, K, **fields), [PROMPTS[1]] * 2
    for ours, reference in zip(*(generate(e, [GREEDY] * 2, 10, prompts) for e in (mine, theirs)), strict=True):
        assert ours.output_token_ids[:TOKENS] == plain(folder, GREEDY)[1]
        assert ours.output_token_ids == reference.output_token_ids
        assert ours.acceptance.histogram == reference.acceptance.histogram
    assert mine.scheduler.num_preemptions > 0
    # After 10 of 19 tokens only the positions 10 to 12 are drafted.
    assert 0 < mine.stats().accepted_tokens <= mine.stats().draft_tokens <= 2 * (3 + 2 + 1)
