"""The CUDA pass of Llama 4, with interpreted kernels: the texts of whole engines, and quantized weights."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import hf_reference
import pytest
import torch
from checkpoints import make_checkpoint, perturb_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from kernels.cuda.tolerance import assert_near
from models.cuda_models import Poisoned, outputs, span
from models.harness import Feeder
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.device import CUDA_DTYPES
from specrs.backends.cuda.loader import QuantizedLoader
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.model_source import ModelSource
from specrs.config import EngineConfig
from specrs.integrations import transformers
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.loader import open_checkpoint
from specrs.models.quantization.at_load import IntegersAtLoad
from specrs.models.torch_loader import load_model
from sweep import sweep
from torch import Tensor

from backends.cuda_engines import (
    GREEDY,
    SETTINGS,
    SMALL,
    Engines,
    TextSettings,
    drafted_config,
    generate,
    serve_by_cuda,
    texts,
    texts_in,
)

VOCAB = 61
# Chunks of 9 positions, and queries that grow from position 6 on. The second layer has no RoPE.
SHAPE: dict[str, Any] = {"hidden": 32, "intermediate": 32, "kv_heads": 1, "head_dim": 16, "vocab": VOCAB}
TARGETS: dict[str, dict[str, Any]] = {"experts": {}, "dense": {"moe_layers": []}}
_random = random.Random(5)
PROMPTS = [[_random.randrange(VOCAB) for _ in range(length)] * 3 for length in (1, 3, 6)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama4")


@cache
def paths(folder: Path, target: str) -> tuple[Path, Path]:
    made = make_checkpoint(folder / target, "llama4_text", seed=1, **SHAPE, **TARGETS[target])
    return made, perturb_checkpoint(made, folder / f"{target} draft", noise=0.3, seed=2)


@pytest.fixture(scope="module")
def engines(folder: Path) -> Engines:
    """Engines of a target, which are drafted for by n-grams, by a noisy copy or not at all."""

    def config(target: str, drafter: str | None, **fields: Any) -> EngineConfig:
        model, draft = paths(folder, target)
        return drafted_config(model, drafter, draft if drafter == "draft_model" else None, **fields)

    return Engines(config, PROMPTS, 9)


@pytest.mark.parametrize("target", TARGETS)
@sweep(6)
@given(st.sampled_from(["draft_model", "ngram", None]), SETTINGS, st.booleans())
def test_texts_are_those_of_a_cpu_without_drafts(
    engines: Engines, target: str, drafter: str | None, settings: TextSettings, hits: bool
) -> None:
    """Check texts against a CPU without drafts, for every drafter, preemption, prefix hits, batch and chunk size.
    Blocks of old chunks are freed, and what memory holds begins as NaN."""
    # Layers with chunks and the others have blocks of their own.
    fields = settings.fields | {"num_gpu_blocks_override": 2 * settings.blocks, "enable_prefix_caching": hits}
    mine = engines.engine(target, drafter, **fields)
    for _ in range(1 + hits):
        assert texts_in(settings, mine, 9, PROMPTS) == engines.plain(target, settings.params)


def test_drafts_are_accepted(engines: Engines) -> None:
    mine = engines.engine("experts", "draft_model")
    assert texts(generate(mine, [GREEDY] * len(PROMPTS), 9, PROMPTS)) == engines.plain("experts", GREEDY)
    stats = mine.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize("drafts", [False, True])
def test_the_text_of_transformers(folder: Path, drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that `custom_generate` of a model without experts gives transformers' own text."""
    serve_by_cuda(monkeypatch)
    monkeypatch.setattr(transformers, "EngineConfig", lambda **fields: EngineConfig(**SMALL | fields))
    model, draft = (hf_reference.load(path, torch.float32) for path in paths(folder, "dense"))
    common: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    common["input_ids"] = torch.tensor([PROMPTS[2][:12]])
    common["attention_mask"] = torch.ones_like(common["input_ids"])
    extra = {"draft_model": draft, "num_speculative_tokens": 2} if drafts else {}
    found = model.generate(**common, custom_generate=transformers.generate, **extra)
    (own,) = transformers._engines[model].values()
    assert isinstance(own.runner, CudaRunner)
    assert found.equal(model.generate(**common))


def test_quantized_weights(tmp_path: Path) -> None:
    """Check a pass over weights in INT8, experts included, against their numbers in float64."""
    path = make_checkpoint(tmp_path, "llama4_text", vocab=83, hidden=64, intermediate=64, kv_heads=2, head_dim=16)
    config, checkpoint = open_checkpoint(path, None, "auto")
    made = QuantizedLoader(config, IntegersAtLoad(checkpoint, "int8"), torch.float32, torch.device("cpu")).load()
    assert all(isinstance(layer.qkv, QuantizedWeight) for layer in made.layers)
    assert isinstance(made.layers[0].down, QuantizedWeight)
    experts = made.layers[1].experts
    assert experts is not None
    assert experts.stacked_quantized is not None
    assert experts.shared is not None
    assert isinstance(experts.shared.down, QuantizedWeight)
    decoder = CudaDecoder.allocate(made, max_rows=16, max_seqs=4)

    def run(feeder: Feeder) -> list[Tensor]:
        return [feeder.feed({0: span(0, rows), 1: span(0, 1)}) for rows in (2, 12)]

    exact, own = (outputs(load_model(path, dtype=dtype, quantization="int8"), run) for dtype in ("float64", "float32"))
    assert_near(outputs(Poisoned(decoder.weights, decoder.workspace), run), exact, own, ulps=64)


def test_the_types_of_a_gpu(engines: Engines) -> None:
    for target in TARGETS:
        assert ModelSource.of_target(engines.config(target, None)).types(CUDA_DTYPES).dtype == "float32"
