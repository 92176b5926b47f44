"""The CUDA pass of models with gated delta nets or short convolutions, with interpreted kernels: logits, and the texts
of whole engines."""

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
from specrs.backends.cuda.delta_states import check_net
from specrs.backends.cuda.device import CUDA_DTYPES
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.model_source import ModelSource
from specrs.config import EngineConfig
from specrs.engine.request import Request
from specrs.errors import UnsupportedModelError
from specrs.models.loader import load_config
from specrs.models.short_conv import CONV, FULL
from specrs.sampling import SamplingParams
from sweep import sweep
from torch import Tensor

from backends.cuda_engines import (
    GREEDY,
    OWN_K,
    SETTINGS,
    Engines,
    K,
    TextSettings,
    drafted_config,
    generate,
    give_graphs,
    texts,
    texts_in,
)

VOCAB = 61
SHAPE: dict[str, Any] = {"hidden": 32, "intermediate": 32, "kv_heads": 1, "head_dim": 16, "vocab": VOCAB}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "lfm2": {"layers": 3, "layer_types": [CONV, FULL, CONV], "conv_L_cache": 4},
    "lfm2_moe": {"layers": 3, "layer_types": [CONV, FULL, CONV], "moe_intermediate_size": 32},
}
"""Families whose layers have states, with the fields of their small models."""
each_family = pytest.mark.parametrize("family", FAMILIES)
_random = random.Random(3)
# Repeated parts, whose continuations n-grams guess.
PROMPTS = [[_random.randrange(VOCAB) for _ in range(length)] * 3 for length in (1, 3, 5)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@cache
def paths(folder: Path, family: str) -> tuple[Path, Path]:
    # `load` writes other models of some of these names into the same folder.
    target = make_checkpoint(folder / f"{family} target", family, seed=1, **SHAPE, **FAMILIES[family])
    return target, make_checkpoint(folder / f"{family} draft", "qwen3", seed=2, layers=1, **SHAPE)


LONG = [PROMPTS[2][:15], [*PROMPTS[2][:15], 4, 4, 9], PROMPTS[2][:9] + PROMPTS[1], PROMPTS[1] + PROMPTS[2][:4]]
"""Prompts with common beginnings."""


@pytest.fixture(scope="module")
def engines(folder: Path) -> Engines:
    """Engines of a family, which are drafted for by n-grams, by a draft model or not at all."""

    def config(family: str, drafter: str | None, **fields: Any) -> EngineConfig:
        target, draft = paths(folder, family)
        return drafted_config(target, drafter, draft if drafter == "draft_model" else None, **fields)

    return Engines(config, PROMPTS, 7)


@cache
def long_texts(engines: Engines, family: str) -> list[list[int]]:
    """Return the texts of `LONG` by the CPU runner without drafts."""
    return [texts(generate(engines.engine(family, None, gpu=False), [GREEDY], 5, [prompt]))[0] for prompt in LONG]


@pytest.mark.parametrize("name", ["hybrid", "hybrid with experts", "qwen3_next", "lfm2", "lfm2_moe"])
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


KERNELS = {
    "hybrid": [
        "delta_states.delta_conv",
        "delta_states.delta_rule",
        "delta_states.gated_norm",
        "decoder.split_gates",
        "decoder.apply_gates",
    ],
    "lfm2": ["conv_states.short_conv", "conv_states.keep_conv_inputs"],
}
"""Kernels of layers with states, and of gated attention, by model."""


@pytest.mark.parametrize(("name", "kernel"), [(name, kernel) for name in KERNELS for kernel in KERNELS[name]])
def test_every_kernel_is_needed(folder: Path, name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that every kernel is needed: without it logits are NaN or wrong, because buffers and states begin with
    NaN."""
    model = load(folder, name, torch.float32)
    fed = [{0: span(0, 5)}, {0: span(5, 7)}]
    feeder = Feeder(on_device(model), block_size=8, max_len=LENGTH)
    expected = [feeder.feed(rows, prompts=True) for rows in fed]
    monkeypatch.setattr(f"specrs.backends.cuda.{kernel}", lambda *_: None)
    feeder = Feeder(on_device(model), block_size=8, max_len=LENGTH)
    found = [feeder.feed(rows, prompts=True) for rows in fed]
    assert not torch.allclose(found[1], expected[1])


def predicting(params: SamplingParams, own: list[int]) -> SamplingParams:
    """Return `params` with a prediction: drafts are taken from the text `own`, of which one token is wrong."""
    return params.replace(prediction=(*own[:3], (own[3] + 1) % VOCAB, *own[4:]))


@each_family
@sweep(6)
@given(
    st.sampled_from([None, "ngram", "draft_model"]),
    SETTINGS,
    OWN_K,
)
def test_texts_are_those_of_a_cpu_without_drafts(
    engines: Engines, family: str, drafter: str | None, settings: TextSettings, ks: list[int]
) -> None:
    """Check texts against a CPU without drafts, for every drafter, preemption, batch and chunk size; prompts run in
    verification passes or in passes of their own."""
    mine = engines.engine(family, drafter, **settings.fields)
    own, expected = [settings.params] * 3, engines.plain(family, settings.params)
    if drafter is not None:
        own = [settings.params.replace(num_speculative_tokens=k) for k in ks]
    if drafter == "ngram":
        own = [predicting(one, of) for one, of in zip(own, expected, strict=True)]
    assert texts_in(settings, mine, 7, PROMPTS, own) == expected


@each_family
def test_drafts_are_accepted_and_rows_are_used_again(engines: Engines, family: str) -> None:
    """Check that drafts are accepted, and that a request in a used row is not affected by the row's earlier request."""
    mine = engines.engine(family, "ngram", max_num_seqs=2)
    expected = engines.plain(family, GREEDY)
    for _ in range(2):
        assert texts(generate(mine, [predicting(GREEDY, own) for own in expected], 7, PROMPTS)) == expected
    stats = mine.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@each_family
def test_a_preempted_request_begins_anew(engines: Engines, family: str) -> None:
    """Check that a preempted request starts again. Two requests need more blocks than the pool has."""
    prompts, made = [PROMPTS[1], PROMPTS[1][::-1]], []
    for gpu in (True, False):
        own = engines.engine(family, None, gpu=gpu, num_gpu_blocks_override=8, num_reserved_decode_tokens=0)
        made.append(texts(generate(own, [GREEDY] * 2, 14, prompts)))
        assert own.scheduler.num_preemptions > 0
    assert made[0] == made[1]


@each_family
def test_prompts_in_verification_passes(engines: Engines, family: str) -> None:
    """Check requests that arrive one after the other, so that prompts run in verification passes."""
    mine = engines.engine(family, "draft_model")
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
    assert texts(requests)[::-1] == engines.plain(family, GREEDY)
    assert any(type(key).__name__ == "MergedShape" for key in graphs.replayed)


@each_family
def test_nan_in_a_state_ends_its_request_alone(engines: Engines, family: str) -> None:
    mine = engines.engine(family, None)
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
    for memory in ctx.target.states.memory:
        memory[:, rows[0] : rows[0] + 1] = torch.nan
    while mine.has_unfinished():
        mine.step()
    assert "not finite" in str(requests[1].error)
    for i in (0, 2):
        assert requests[i].output_token_ids == engines.plain(family, GREEDY)[i]


@each_family
@sweep(6)
@given(
    st.sampled_from([None, "ngram", "draft_model"]),
    st.lists(st.lists(st.integers(0, len(LONG) - 1), min_size=1, max_size=3), min_size=2, max_size=3),
    st.sampled_from([5, 12]),
    st.sampled_from([None, 1, 4]),
    st.booleans(),
)
def test_prefix_hits_have_the_texts_of_misses(
    engines: Engines,
    family: str,
    drafter: str | None,
    rounds: list[list[int]],
    budget: int,
    slots: int | None,
    graphs: bool,
) -> None:
    """Check that prefix hits give the texts of misses: prompts with common beginnings, repeatedly, with few and many
    snapshot slots. Snapshots are written often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specrs.backends.blueprint.SNAPSHOT_INTERVAL", 8)
        patch.setattr("specrs.backends.blueprint.DECODE_SNAPSHOT_INTERVAL", 4)
        row, _ = engines.weights(family, None).target.state_bytes
        mine = engines.engine(
            family,
            drafter,
            max_num_batched_tokens=budget,
            enable_prefix_caching=True,
            state_cache_memory_bytes=None if slots is None else slots * row,
        )
        if graphs:
            give_graphs(mine)
        for order in rounds:
            prompts = [LONG[i] for i in order]
            made = texts(generate(mine, [GREEDY] * len(order), 5, prompts))
            assert made == [long_texts(engines, family)[i] for i in order]
        mine.scheduler.check_integrity()


@each_family
def test_a_hit_begins_with_a_snapshot(engines: Engines, family: str) -> None:
    mine = engines.engine(family, "draft_model", enable_prefix_caching=True)
    for _ in range(2):
        assert texts(generate(mine, [GREEDY], 5, LONG[:1])) == long_texts(engines, family)[:1]
    stats = mine.stats()
    assert stats.state_cache is not None
    assert stats.state_cache.hits == 1
    assert stats.state_cache.stored > 0


def test_models_that_the_kernels_do_not_serve(folder: Path, engines: Engines) -> None:
    """Check that delta nets with too large heads are rejected."""
    assert ModelSource.of_target(engines.config("qwen3_5_text", None)).types(CUDA_DTYPES).dtype == "float32"
    net = load_config(paths(folder, "qwen3_5_text")[0]).delta
    assert net is not None
    for field, own in (("linear_key_head_dim", "key_dim"), ("linear_value_head_dim", "value_dim")):
        wide = replace(net, **{own: 136})  # type: ignore[arg-type]
        check_net(wide, torch.device("cpu"))
        with pytest.raises(UnsupportedModelError, match=rf"{field}=136: the GPU kernels serve at most 128"):
            check_net(wide, torch.device("cuda"))
