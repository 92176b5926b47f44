"""The CUDA pass of Gemma 4, with interpreted kernels: logits, and the texts of whole engines."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_gemma4, perturb_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from kernels.cuda.tolerance import assert_near
from models.cuda_models import LENGTH, Poisoned, compare, load, on_device, outputs, span
from models.harness import Feeder
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.loader import QuantizedLoader
from specrs.config import EngineConfig
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.loader import open_checkpoint
from specrs.models.quantization.at_load import IntegersAtLoad
from specrs.models.torch_loader import load_model
from sweep import sweep
from torch import Tensor

from backends.cuda_engines import (
    GREEDY,
    SETTINGS,
    Engines,
    TextSettings,
    drafted_config,
    generate,
    texts,
    texts_in,
)

EXPERTS = "gemma4, experts and embeddings"
VOCAB = 61
_random = random.Random(3)
# Repeated parts, whose continuations n-grams guess; longer than the window of 8.
PROMPTS = [[_random.randrange(1, VOCAB) for _ in range(length)] * 3 for length in (1, 3, 5)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemma4")


@pytest.mark.parametrize("name", ["gemma4", "gemma4, all of it", "gemma4, experts"])
def test_prompts_and_verification(folder: Path, name: str) -> None:
    """Check prompts: more than 64 rows at once next to another request's chunk, then verification with masked rows,
    then single rows."""

    def run(feeder: Feeder) -> list[Tensor]:
        return [
            feeder.feed({0: span(0, 71), 1: span(0, 12)}),
            feeder.feed({0: span(71, LENGTH), 1: span(12, 13)}),
            feeder.feed({1: [*span(13, 16), (0, -1)], 0: span(LENGTH, LENGTH + 3)})[[0, 1, 2, 4, 5, 6]],
            feeder.feed({0: span(LENGTH + 1, LENGTH + 2), 1: span(16, 17)}),
        ]

    compare(folder, name, run, ulps=64)


@pytest.mark.parametrize(
    "kernel", ["decoder.layer_embeddings", "stream.gate_embedding", "attention.qk_norm_rope", "products.softcap"]
)
def test_every_kernel_is_needed(folder: Path, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folder, "gemma4, all of it", torch.float32)
    found = []
    for _ in range(2):
        feeder = Feeder(on_device(model), block_size=8, max_len=LENGTH)
        found.append(feeder.feed({0: span(0, 5)}))
        monkeypatch.setattr(f"specrs.backends.cuda.{kernel}", lambda *_: None)
    assert not torch.allclose(*found)


def test_the_argmax_is_that_of_capped_logits(folder: Path) -> None:
    """Check that argmaxes with and without logits are those of capped logits, for few rows and for many, where the cap
    makes ties of large logits."""
    model = on_device(load(folder, "gemma4", torch.float32))
    for rows in (3, 70):
        hidden = 4000 * torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        logits = model.compute_logits(hidden)
        assert int((logits == logits.amax(1, keepdim=True)).sum()) > rows, "no ties"
        for kept in (None, torch.full_like(logits, torch.nan)):
            model.poison()
            ids, top = torch.full((rows,), -1), torch.full((rows,), torch.nan)
            model.compute_argmax(hidden, ids, top, None, kept)
            assert torch.equal(ids, logits.argmax(1))
            assert torch.equal(top, logits.amax(1))
            if kept is not None:
                torch.testing.assert_close(kept, logits)


@cache
def paths(folder: Path) -> dict[str, Path]:
    """Return the folders of small targets with all parts of Gemma 4, without experts and with them, and of two
    drafts."""
    shape: dict[str, Any] = {"hidden": 32, "intermediate": 32, "vocab": VOCAB}
    kinds = ["sliding_attention", "full_attention"] * 2
    made = {"target": folder / "small", "twin": folder / "twin", "qwen3": folder / "qwen3"}
    make_gemma4(made["target"], "gemma4, all of it", layers=4, layer_types=kinds, head_dim=8, tie=False, **shape)
    made["experts"] = make_gemma4(
        folder / "small with experts", EXPERTS, layers=4, layer_types=kinds, num_kv_shared_layers=2, head_dim=8, **shape
    )
    perturb_checkpoint(made["target"], made["twin"], noise=0.1)
    make_checkpoint(made["qwen3"], "qwen3", layers=1, kv_heads=1, head_dim=16, **shape)
    return made


@pytest.fixture(scope="module")
def engines(folder: Path) -> Engines:
    """Engines of a target, which are drafted for by n-grams, by the draft model `twin` or `qwen3`, or not at all."""

    def config(target: str, drafter: str | None, **fields: Any) -> EngineConfig:
        made = paths(folder)
        draft = None if drafter is None else made.get(drafter)
        method = drafter if draft is None else "draft_model"
        return drafted_config(made[target], method, draft, **({"enable_prefix_caching": True} | fields))

    return Engines(config, PROMPTS)


@sweep(5)
@given(
    st.sampled_from(["target", "experts"]),
    st.sampled_from([None, "ngram", "twin", "qwen3"]),
    SETTINGS,
)
def test_texts_are_those_of_a_cpu_without_drafts(
    engines: Engines, target: str, drafter: str | None, settings: TextSettings
) -> None:
    """Check texts against a CPU without drafts, for every drafter, preemption, batch and chunk size; prompts run in
    verification passes or in passes of their own."""
    mine = engines.engine(target, drafter, **settings.fields)
    assert texts_in(settings, mine, 5, PROMPTS) == engines.plain(target, settings.params)


def test_drafts_are_accepted(engines: Engines) -> None:
    mine = engines.engine("target", "twin")
    assert texts(generate(mine, [GREEDY] * len(PROMPTS), 5, PROMPTS)) == engines.plain("target", GREEDY)
    stats = mine.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_quantized_weights(folder: Path) -> None:
    """Check a pass over weights in INT8, experts included, against their numbers in float64."""
    load(folder, EXPERTS, torch.float32)
    path = folder / EXPERTS.replace(" ", "_")
    config, checkpoint = open_checkpoint(path, None, "auto")
    weights = QuantizedLoader(config, IntegersAtLoad(checkpoint, "int8"), torch.float32, torch.device("cpu")).load()
    experts = weights.layers[-1].experts
    assert experts is not None
    assert experts.stacked_quantized is not None
    assert all(isinstance(w, QuantizedWeight) for layer in weights.layers for w in (layer.qkv, layer.o, layer.gate_up))
    made = CudaDecoder.allocate(weights, max_rows=16, max_seqs=4)

    def run(feeder: Feeder) -> list[Tensor]:
        return [feeder.feed({0: span(0, rows), 1: span(0, 1)}) for rows in (2, 12)]

    exact, plain = (
        outputs(load_model(path, dtype=dtype, quantization="int8"), run) for dtype in ("float64", "float32")
    )
    assert_near(outputs(Poisoned(made.weights, made.workspace), run), exact, plain, ulps=64)
