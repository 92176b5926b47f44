"""The CUDA pass of models with gated delta nets, with interpreted kernels: logits, and the texts of whole engines."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from models.cuda_models import LENGTH, compare, load, on_device, span
from models.harness import Feeder
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.device import CUDA_DTYPES
from specrs.backends.cuda.net_states import check_net
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.model_source import ModelSource
from specrs.config import EngineConfig
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
from specrs.errors import UnsupportedModelError
from specrs.models.loader import load_config
from specrs.sampling import SamplingParams
from sweep import sweep
from torch import Tensor

from backends.cuda_engines import (
    GREEDY,
    OWN_K,
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

VOCAB = 61
SHAPE: dict[str, Any] = {"hidden": 32, "intermediate": 32, "kv_heads": 1, "head_dim": 16, "vocab": VOCAB}
NET: dict[str, Any] = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_random = random.Random(3)
# Repeated parts, whose continuations n-grams guess.
PROMPTS = [[_random.randrange(VOCAB) for _ in range(length)] * 3 for length in (1, 3, 5)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@cache
def paths(folder: Path) -> tuple[Path, Path]:
    target = make_checkpoint(folder / "target", "qwen3_5_text", seed=1, **SHAPE, **NET)
    return target, make_checkpoint(folder / "draft", "qwen3", seed=2, layers=1, **SHAPE)


LONG = [PROMPTS[2][:15], [*PROMPTS[2][:15], 4, 4, 9], PROMPTS[2][:9] + PROMPTS[1], PROMPTS[1] + PROMPTS[2][:4]]
"""Prompts with common beginnings."""


@cache
def long_texts(folder: Path) -> list[list[int]]:
    """Return the texts of `LONG` by the CPU runner without drafts."""
    return [texts(generate(engine(folder, None, gpu=False), [GREEDY], 5, [prompt]))[0] for prompt in LONG]


@pytest.mark.parametrize("name", ["hybrid", "hybrid with experts", "qwen3_next"])
def test_prompt_chunks(folder: Path, name: str) -> None:
    """Check prompts: more than 64 rows at once next to another request's chunk, then verification, then single rows."""

    def run(feeder: Feeder) -> list[Tensor]:
        return [
            feeder.feed({0: span(0, 71), 1: span(0, 12)}, prompts=True),
            feeder.feed({0: span(71, LENGTH), 1: span(12, 13)}, prompts=True),
            feeder.feed({1: span(13, 17), 0: span(LENGTH, LENGTH + 3)}),
            feeder.feed({0: span(LENGTH + 1, LENGTH + 2), 1: span(17, 18)}),
        ]

    compare(folder, name, run)


@pytest.mark.parametrize("kernel", ["delta_conv", "delta_rule", "gated_norm", "split_gates", "apply_gates"])
def test_every_kernel_is_needed(folder: Path, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that every kernel is needed: without it logits are NaN or wrong, because buffers and states begin with
    NaN."""
    model = load(folder, "hybrid", torch.float32)
    fed = [{0: span(0, 5)}, {0: span(5, 7)}]
    feeder = Feeder(on_device(model), block_size=8, max_len=LENGTH)
    expected = [feeder.feed(rows, prompts=True) for rows in fed]
    module = "decoder" if "gates" in kernel else "net_states"
    monkeypatch.setattr(f"specrs.backends.cuda.{module}.{kernel}", lambda *_: None)
    feeder = Feeder(on_device(model), block_size=8, max_len=LENGTH)
    found = [feeder.feed(rows, prompts=True) for rows in fed]
    assert not torch.allclose(found[1], expected[1])


@cache
def weights(folder: Path, drafter: str | None) -> Any:
    return load_weights(config_of(folder, drafter))


def config_of(folder: Path, drafter: str | None, **fields: Any) -> EngineConfig:
    target, draft = paths(folder)
    speculative: dict[str, Any] | None = None if drafter is None else {"method": drafter}
    if drafter == "draft_model":
        speculative = {"method": drafter, "model": str(draft)}
    return engine_config(target, speculative, **fields)


def engine(folder: Path, drafter: str | None, *, gpu: bool, **fields: Any) -> Engine:
    return make_engine(config_of(folder, drafter, **fields), weights(folder, drafter), gpu=gpu)


@cache
def plain(folder: Path, params: tuple[SamplingParams, ...], num_tokens: int) -> list[list[int]]:
    """Return the texts of the CPU runner without drafts."""
    return texts(generate(engine(folder, None, gpu=False), list(params), num_tokens, PROMPTS))


def predicting(params: SamplingParams, own: list[int]) -> SamplingParams:
    """Return `params` with a prediction: drafts are taken from the text `own`, of which one token is wrong."""
    return params.replace(prediction=(*own[:3], (own[3] + 1) % VOCAB, *own[4:]))


@sweep(6)
@given(
    st.sampled_from([None, "ngram", "draft_model"]),
    SETTINGS,
    OWN_K,
)
def test_texts_are_those_of_a_cpu_without_drafts(
    folder: Path, drafter: str | None, settings: TextSettings, ks: list[int]
) -> None:
    """Check texts against a CPU without drafts, for every drafter, preemption, batch and chunk size; prompts run in
    verification passes or in passes of their own."""
    mine = engine(folder, drafter, gpu=True, **settings.fields)
    own, expected = [settings.params] * 3, plain(folder, (settings.params,) * 3, 7)
    if drafter is not None:
        own = [settings.params.replace(num_speculative_tokens=k) for k in ks]
    if drafter == "ngram":
        own = [predicting(one, of) for one, of in zip(own, expected, strict=True)]
    assert texts_in(settings, mine, 7, PROMPTS, own) == expected


def test_drafts_are_accepted_and_rows_are_used_again(folder: Path) -> None:
    """Check that drafts are accepted, and that a request in a used row is not affected by the row's earlier request."""
    mine = engine(folder, "ngram", gpu=True, max_num_seqs=2)
    expected = plain(folder, (GREEDY,) * 3, 7)
    for _ in range(2):
        assert texts(generate(mine, [predicting(GREEDY, own) for own in expected], 7, PROMPTS)) == expected
    stats = mine.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_a_preempted_request_begins_anew(folder: Path) -> None:
    """Check that a preempted request starts again. Two requests need more blocks than the pool has."""
    prompts, made = [PROMPTS[1], PROMPTS[1][::-1]], []
    for gpu in (True, False):
        own = engine(folder, None, gpu=gpu, num_gpu_blocks_override=8, num_reserved_decode_tokens=0)
        made.append(texts(generate(own, [GREEDY] * 2, 14, prompts)))
        assert own.scheduler.num_preemptions > 0
    assert made[0] == made[1]


def test_prompts_in_verification_passes(folder: Path) -> None:
    """Check requests that arrive one after the other, so that prompts run in verification passes."""
    mine = engine(folder, "draft_model", gpu=True)
    graphs = give_graphs(mine)
    requests = []
    for i, prompt in enumerate(PROMPTS[::-1]):
        params = GREEDY.replace(max_tokens=7, ignore_eos=True)
        requests.append(Request(i, prompt, params, num_speculative_tokens=K, seed=i))
        mine.add_request(requests[-1])
        for _ in range(3):
            mine.step()
    while mine.has_unfinished():
        mine.step()
    assert texts(requests)[::-1] == plain(folder, (GREEDY,) * 3, 7)
    assert any(type(key).__name__ == "MergedShape" for key in graphs.replayed)


def test_nan_in_a_state_ends_its_request_alone(folder: Path) -> None:
    mine = engine(folder, None, gpu=True)
    requests = [
        Request(i, prompt, GREEDY.replace(max_tokens=7, ignore_eos=True), seed=i) for i, prompt in enumerate(PROMPTS)
    ]
    for request in requests:
        mine.add_request(request)
    while any(len(request.output_token_ids) < 2 for request in requests):
        mine.step()
    assert isinstance(mine.runner, CudaRunner)
    ctx = mine.runner.ctx
    assert isinstance(ctx.target, CudaDecoder)
    assert ctx.target.states is not None
    rows = [row for row in range(3) if ctx.state.tokens[row, : len(PROMPTS[1])].tolist() == PROMPTS[1]]
    ctx.target.states.bases[:, rows[0]] = torch.nan
    while mine.has_unfinished():
        mine.step()
    assert "not finite" in str(requests[1].error)
    for i in (0, 2):
        assert requests[i].output_token_ids == plain(folder, (GREEDY,) * 3, 7)[i]


@sweep(6)
@given(
    st.sampled_from([None, "ngram", "draft_model"]),
    st.lists(st.lists(st.integers(0, len(LONG) - 1), min_size=1, max_size=3), min_size=2, max_size=3),
    st.sampled_from([5, 12]),
    st.sampled_from([None, 1, 4]),
    st.booleans(),
)
def test_prefix_hits_have_the_texts_of_misses(
    folder: Path, drafter: str | None, rounds: list[list[int]], budget: int, slots: int | None, graphs: bool
) -> None:
    """Check that prefix hits give the texts of misses: prompts with common beginnings, repeatedly, with few and many
    snapshot slots. Snapshots are written often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specrs.backends.blueprint.SNAPSHOT_INTERVAL", 8)
        patch.setattr("specrs.backends.blueprint.DECODE_SNAPSHOT_INTERVAL", 4)
        row, _ = weights(folder, None).target.state_bytes
        mine = engine(
            folder,
            drafter,
            gpu=True,
            max_num_batched_tokens=budget,
            enable_prefix_caching=True,
            state_cache_memory_bytes=None if slots is None else slots * row,
        )
        if graphs:
            give_graphs(mine)
        for order in rounds:
            prompts = [LONG[i] for i in order]
            made = texts(generate(mine, [GREEDY] * len(order), 5, prompts))
            assert made == [long_texts(folder)[i] for i in order]
        mine.scheduler.check_integrity()


def test_a_hit_begins_with_a_snapshot(folder: Path) -> None:
    mine = engine(folder, "draft_model", gpu=True, enable_prefix_caching=True)
    for _ in range(2):
        assert texts(generate(mine, [GREEDY], 5, LONG[:1])) == long_texts(folder)[:1]
    stats = mine.stats()
    assert stats.state_cache is not None
    assert stats.state_cache.hits == 1
    assert stats.state_cache.stored > 0


def test_models_that_the_kernels_do_not_serve(folder: Path, tmp_path: Path) -> None:
    """Check that models with features that the kernels lack are rejected: short convolutions, RoPE of neighbouring
    features, and delta nets with too large heads."""
    conv = make_checkpoint(tmp_path / "lfm2", "lfm2")
    source = ModelSource.of_target(EngineConfig(model=str(conv), dtype="float32"))
    with pytest.raises(UnsupportedModelError, match="on a GPU, a model without short convolutions"):
        source.types(CUDA_DTYPES)
    for experts in (None, []):
        turned = make_checkpoint(tmp_path / f"llama4 {experts}", "llama4_text", moe_layers=experts)
        source = ModelSource.of_target(EngineConfig(model=str(turned), dtype="float32"))
        with pytest.raises(UnsupportedModelError, match="on a GPU, a model whose RoPE rotates halves of a head"):
            source.types(CUDA_DTYPES)
    assert ModelSource.of_target(config_of(folder, None)).types(CUDA_DTYPES).dtype == "float32"
    net = load_config(paths(folder)[0]).delta
    assert net is not None
    for field, own in (("linear_key_head_dim", "key_dim"), ("linear_value_head_dim", "value_dim")):
        wide = replace(net, **{own: 136})  # type: ignore[arg-type]
        check_net(wide, torch.device("cpu"))
        with pytest.raises(UnsupportedModelError, match=rf"{field}=136: the GPU kernels serve at most 128"):
            check_net(wide, torch.device("cuda"))
