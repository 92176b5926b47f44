"""The CUDA pass of models with gated delta nets or short convolutions that is divided among ranks, with interpreted
kernels: logits, states, quantized weights, and the texts of engines with snapshots and MTP heads."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.cuda_engines import SMALL, generate, serve_by_cuda
from checkpoints import make_checkpoint
from gguf_files import write_gguf
from hf_reference import generate as continued
from hf_reference import load as load_reference
from kernels.cuda.tolerance import assert_near
from models.cuda_models import as_on_a_gpu
from models.harness import Feeder
from mtp_reference import add_head, fit
from specrs.backends.cuda.conv_states import ConvStates
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.drafters.head import HeadPasses
from specrs.backends.cuda.loader import QuantizedLoader
from specrs.backends.cuda.net_states import NetStates
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.ranks import LeadingRunner
from specrs.backends.ring import Header
from specrs.config import EngineConfig
from specrs.core import HEADER_FIELDS
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.loader import open_checkpoint
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.shards import Shard
from specrs.models.torch_loader import load_model
from specrs.parallel.ranks import Ranks
from specrs.sampling import SamplingParams
from torch import Tensor

from parallel.harness import engine_on_threads
from parallel.threads import on_ranks, one_kernel_at_a_time  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("one_kernel_at_a_time")

VOCAB, K, SLOT = 61, 3, 2
SHAPE: dict[str, Any] = {"vocab": VOCAB, "hidden": 32, "intermediate": 32, "kv_heads": 2, "group": 1, "head_dim": 16}
NET: dict[str, Any] = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
CONVS = {"layer_types": ["conv", "full_attention"]}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5": ("qwen3_5_text", {"linear_num_value_heads": 6}),
    "Qwen3.5, experts, one KV head": ("qwen3_5_moe_text", {"kv_heads": 1, "group": 2}),
    "Qwen3-Next": ("qwen3_next", {"mlp_only_layers": [0]}),
    "LFM2": ("lfm2", CONVS),
    "LFM2, experts": ("lfm2_moe", CONVS | {"num_dense_layers": 0, "conv_L_cache": 4}),
}


def feed(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Feed a prompt in two chunks with a snapshot in the first, drafts of which one is accepted, the text after them,
    and the text from the snapshot again. Return all logits, and the base states before and after the snapshot was
    restored."""
    draw = random.Random(0)
    ids = [draw.randrange(VOCAB) for _ in range(26)]
    feeder, states = Feeder(model, num_requests=2), None
    if isinstance(model, CudaDecoder):
        states = model.states
        assert states is not None
        for memory in states.memory:
            memory.fill_(torch.nan)
        plan_snapshot(states, length=6)
    found = [
        feeder.feed({0: [(ids[p], p) for p in range(9)]}, prompts=True, snapshots=((0, 6, SLOT),)),
        feeder.feed({0: [(ids[p], p) for p in range(9, 12)]}, prompts=True),
        feeder.feed({0: [(ids[12], 12), (ids[13], 13), (7, 14), (8, 15)]}),
        feeder.feed({0: [(ids[p], p) for p in range(14, 17)]}),
    ]
    bases = [torch.empty(0) if states is None else base_of(states)]
    (feeder.cache.states if states is None else states).restore(0, SLOT)
    found.append(feeder.feed({0: [(ids[p], p) for p in range(6, 26)]}, prompts=True))
    bases.append(torch.empty(0) if states is None else base_of(states))
    return torch.cat(found), *bases


def base_of(states: NetStates[Any]) -> Tensor:
    """Return a copy of the base states of row 0, `[layers, heads or channels, ..]`."""
    if isinstance(states, ConvStates):
        return states.inputs[:, 0, : states.kept_inputs.shape[2]].transpose(1, 2).clone()
    bases: Tensor = states.bases[:, 0]
    return bases.clone()


def plan_snapshot(states: NetStates[Any], length: int) -> None:
    """Let the next step write a snapshot of the first `length` positions of row 0 into `SLOT`."""
    fields = dict.fromkeys(HEADER_FIELDS, 0) | {"num_snapshots": 1}
    none, sections = torch.zeros(0, dtype=torch.int64), {"snapshot_row": 0, "snapshot_len": length}
    device = {name: torch.tensor([value]) for name, value in (sections | {"snapshot_slot": SLOT}).items()}
    device["header"] = torch.tensor(list(fields.values()))
    states.begin_step({"admit_row": none, "admit_snapshot": none}, device, Header(**fields))


def allocate(weights: Any, ranks: Ranks | None) -> CudaDecoder:
    return CudaDecoder.allocate(weights, max_rows=20, max_seqs=2, ranks=ranks, num_drafts=K, num_snapshots=3)


def check_parts(work: Callable[[Ranks], tuple[Tensor, Tensor, Tensor]], exact: Tensor, own: Tensor) -> None:
    """Check that all of two ranks have the same logits, near those of the whole model, and that each has its part
    of the states."""
    one, other = on_ranks(2, work)
    assert_near(one[0], exact, own, ulps=16)
    assert torch.equal(one[0], other[0])
    for first, second in zip(one[1:], other[1:], strict=True):
        assert not torch.equal(first, second)
        assert first.isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_states_are_those_of_the_whole_model(variant: str, tmp_path: Path) -> None:
    family, fields = VARIANTS[variant]
    kinds = {"layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    folder = make_checkpoint(tmp_path, family, seed=5, **(SHAPE | NET | kinds | fields))

    def load(dtype: torch.dtype = torch.float32, **place: Any) -> Any:
        return load_model(folder, dtype=dtype, **place)

    def work(ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
        made = feed(allocate(as_on_a_gpu(load(device=ranks)), ranks))
        whole = [ranks.gather(base) for base in made[1:]]
        for parts, expected in zip(whole, alone[1:], strict=True):
            torch.testing.assert_close(torch.cat(list(parts), 1), expected, rtol=1e-4, atol=1e-5)
        return made

    alone = feed(allocate(as_on_a_gpu(load()), None))
    check_parts(work, feed(load(torch.float64))[0], feed(load())[0])


@pytest.mark.parametrize(("kind", "value_heads"), [("F32", 6), ("Q8_0", 4)])
def test_gguf_files(kind: str, value_heads: int, tmp_path: Path) -> None:
    """Check files whose output projections have another order of value heads. Quantized parts stay quantized."""
    sizes: dict[str, Any] = {"hidden": 64, "intermediate": 64, "vocab": VOCAB, "kv_heads": 2, "group": 1}
    net = {"linear_key_head_dim": 8, "linear_value_head_dim": 32, "linear_num_value_heads": value_heads}
    source = make_checkpoint(tmp_path / "source", "qwen3_5_text", seed=5, head_dim=32, **sizes, **net)
    path = write_gguf(source, tmp_path / "model.gguf", kind)
    config, checkpoint = open_checkpoint(path, None, "auto")

    def work(ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
        place = torch.device("cpu"), Shard(ranks.rank, ranks.size)
        weights = QuantizedLoader(config, checkpoint, torch.float32, *place).load()
        for w in (weights.layers[0].qkv, weights.layers[0].o, weights.layers[1].o):
            assert isinstance(w, QuantizedWeight) == (kind == "Q8_0")
        return feed(allocate(weights, ranks))

    assert isinstance(checkpoint, QuantizedTensors)
    check_parts(work, feed(load_model(path, dtype="float64"))[0], feed(load_model(path, dtype="float32"))[0])


GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
_random = random.Random(3)
PROMPTS = [[_random.randrange(VOCAB) for _ in range(length)] for length in (3, 15)]
PROMPTS += [[*PROMPTS[1][:12], 4, 9]]
"""Prompts of which two have a common beginning."""
CASES: dict[str, dict[str, Any]] = {
    "earlier texts": {"method": "suffix"},
    "the head": {"method": "mtp", "draft_vocab_size": 40},
    "short convolutions": {"method": "suffix"},
    "the head in parts, experts": {"method": "mtp", "draft_tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with targets that have an MTP head, trained on the target's texts."""
    made = tmp_path_factory.mktemp("cuda_hybrids")
    kinds = {"layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    for name, family in (("target", "qwen3_5_text"), ("experts", "qwen3_5_moe_text")):
        sizes = SHAPE | NET | kinds | ({"shared_expert_intermediate_size": 20} if name == "experts" else {})
        add_head(make_checkpoint(made / name, family, seed=1, **sizes), seed=4)
        target = load_reference(made / name, torch.float32)
        fit(made / name, target, [prompt + continued(target, prompt, 8) for prompt in PROMPTS], steps=16)
    make_checkpoint(made / "short convolutions", "lfm2_moe", seed=1, layers=2, **(SHAPE | CONVS))
    return made


def config_of(folder: Path, case: str, **fields: Any) -> EngineConfig:
    own = {"num_speculative_tokens": K, "rejection_sample_method": "coupled"} | CASES[case]
    steps = {"max_steps_in_flight": 1 if own["method"] == "suffix" else 2}
    speculative = {"speculative_config": own}
    return EngineConfig(model=str(target_of(folder, case)), dtype="float32", **(SMALL | speculative | steps | fields))


def target_of(folder: Path, case: str) -> Path:
    return folder / (case if case == "short convolutions" else "experts" if "experts" in case else "target")


@cache
def plain(target: Path) -> list[list[int]]:
    """Return the texts of the CPU runner without drafts and prefix caching."""
    return texts(build_engine(EngineConfig(model=str(target), dtype="float32", enable_prefix_caching=False, **SMALL)))


def texts(engine: Engine) -> list[list[int]]:
    requests = generate(engine, [GREEDY, SAMPLED, GREEDY], 5, PROMPTS)
    assert all(request.error is None for request in requests)
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("case", CASES)
def test_texts_are_those_of_a_cpu(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the texts of engines on two ranks: with misses, then with hits, in a pool too small for all requests."""
    monkeypatch.setattr("specrs.backends.blueprint.SNAPSHOT_INTERVAL", 8)
    monkeypatch.setattr("specrs.backends.blueprint.DECODE_SNAPSHOT_INTERVAL", 4)
    expected = plain(target_of(folder, case))
    serve_by_cuda(monkeypatch)
    small = {"num_gpu_blocks_override": 9, "num_reserved_decode_tokens": 0, "enable_prefix_caching": True}
    with engine_on_threads(config_of(folder, case, tensor_parallel_size=2, enforce_eager=True, **small)) as engine:
        assert isinstance(engine.runner, LeadingRunner)
        runner = engine.runner.runner
        assert isinstance(runner, CudaRunner)
        assert isinstance(runner.ctx.target, CudaDecoder)
        assert runner.ctx.target.states is not None
        half = 16 if case == "short convolutions" else 2
        assert base_of(runner.ctx.target.states).shape[1] == half, "half of the value heads, or of the channels"
        if "head" in case:
            assert isinstance(runner.ctx.drafter, HeadPasses)
        assert texts(engine) == expected
        misses = engine.stats().state_cache
        assert texts(engine) == expected
        stats = engine.stats()
        assert misses is not None
        assert stats.state_cache is not None
        assert stats.state_cache.hits > misses.hits
        assert stats.accepted_tokens > 0
