"""LoRA adapters of models with gated delta nets or short convolutions: texts of the merged models on every runner, with
snapshots of states; files with other orders of heads; and modules that are rejected."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.cuda_engines import SMALL, generate, give_graphs, serve_by_cuda
from checkpoints import make_checkpoint
from gguf_files import write_gguf
from models.harness import Feeder
from safetensors.torch import load_file, save_file
from specrs import LoRARequest
from specrs.backends.cpu.weights import load_native
from specrs.backends.cuda.runner import CudaRunner
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.errors import UnsupportedModelError
from specrs.models.lora_loader import load_lora
from specrs.models.torch_loader import load_model
from specrs.sampling import SamplingParams

from .adapters import Spec, leaves_of, merge, write_adapter

VOCAB = 61
SIZES: dict[str, Any] = {"hidden": 32, "intermediate": 32, "kv_heads": 1, "head_dim": 16, "vocab": VOCAB}
NET: dict[str, Any] = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
FAMILIES: dict[str, tuple[dict[str, Any], set[str], tuple[str, ...]]] = {
    "qwen3_5_text": (
        NET,
        {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"},
        ("q_proj", "o_proj", "up_proj", "down_proj"),
    ),
    "lfm2": (
        {"layers": 3, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-3},
        {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2", "w3"},
        ("q_proj", "in_proj", "w1", "w2"),
    ),
}
"""Fields of a family's config.json, modules that adapters may change, and modules of the second adapter."""
GREEDY = SamplingParams(temperature=0.0)
_random = random.Random(3)
PROMPT = [_random.randrange(VOCAB) for _ in range(13)]
PROMPTS = [PROMPT, PROMPT, [*PROMPT[:9], 4, 4]]
"""Prompts with a common beginning."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a model and two adapters, of all modules and of some."""
    made, (fields, modules, some) = tmp_path_factory.mktemp("hybrids"), FAMILIES[request.param]
    base = make_checkpoint(made / "0", request.param, seed=1, **SIZES, **fields)
    leaves = tuple(leaves_of(base))
    assert modules <= {*leaves}
    for i, spec in enumerate((Spec(leaves, rank=6), Spec(some)), 1):
        merge(base, write_adapter(made / f"adapter {i}", base, spec, seed=i), made / str(i))
    return made


def engine_of(path: Path, **fields: Any) -> Engine:
    return build_engine(EngineConfig(model=str(path), dtype="float32", **(SMALL | fields)))


@cache
def merged(folder: Path, i: int) -> list[list[int]]:
    """Return the texts of the base model (0), or of the model with adapter `i` merged into its weights."""
    made = generate(engine_of(folder / str(i), enable_prefix_caching=False), [GREEDY] * 3, 6, PROMPTS)
    return [request.output_token_ids for request in made]


@pytest.mark.parametrize("runner", ["native", "torch", "CUDA"])
def test_texts_are_the_merged_models(runner: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check requests of both adapters and of the base model next to each other: drafts, misses, and hits, which begin
    with snapshots of the request's own adapter."""
    monkeypatch.setattr("specrs.backends.blueprint.SNAPSHOT_INTERVAL", 8)
    monkeypatch.setattr("specrs.backends.blueprint.DECODE_SNAPSHOT_INTERVAL", 4)
    texts = [merged(folder, i) for i in range(3)]
    assert len({str(own) for own in texts}) == 3
    if runner == "CUDA":
        serve_by_cuda(monkeypatch)
    speculative = {"method": "suffix", "num_speculative_tokens": 3}
    fields = {"enable_lora": True, "max_loras": 2, "enable_prefix_caching": True, "max_steps_in_flight": 1}
    eager = runner != "native"
    engine = engine_of(folder / "0", enforce_eager=eager, speculative_config=speculative, **fields)
    assert isinstance(engine.runner, CudaRunner) == (runner == "CUDA")
    if runner == "CUDA":
        give_graphs(engine)
    assert engine.loras is not None
    given = [LoRARequest(f"adapter {i}", i, str(folder / f"adapter {i}")) for i in (1, 2)]
    loras = [None, *(engine.loras.load(request) for request in given)]
    hits = []
    for which in ([0, 1, 2], [1, 2, 0]):
        made = generate(engine, [GREEDY] * 3, 6, PROMPTS, [loras[i] for i in which])
        assert [one.output_token_ids for one in made] == [texts[i][j] for j, i in enumerate(which)]
        stats = engine.stats()
        assert stats.state_cache is not None
        hits.append(stats.state_cache.hits)
    assert hits[0] == 0 < hits[1]
    assert stats.accepted_tokens > 0


@pytest.mark.parametrize("native", [False, True])
def test_adapters_of_gguf_files(native: bool, tmp_path: Path) -> None:
    """Check a file whose output projections read value heads in another order than an adapter's."""
    net = {"linear_num_value_heads": 6, "linear_value_head_dim": 32}
    source = make_checkpoint(tmp_path / "source", "qwen3_5_text", seed=5, vocab=400, **net)
    path = write_adapter(tmp_path / "adapter", source, Spec(tuple(leaves_of(source))))
    whole = merge(source, path, tmp_path / "merged")
    file = write_gguf(source, tmp_path / "model.gguf", "F32")
    text = {0: [(7 * p % 400, p) for p in range(9)]}
    expected = Feeder(load_model(whole, dtype="float64")).feed(text, prompts=True)
    base = load_native(file, dtype="float32") if native else load_model(file, dtype="float64")
    feeder = Feeder(base)
    feeder.adapters = {0: load_lora(path, base, name="a", lora_int_id=1, max_lora_rank=8)}
    found = feeder.feed(text, prompts=True).double()
    # Gates are rounded in files.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_an_adapter_of_a_shared_expert_is_rejected(tmp_path: Path) -> None:
    """Check that a shared expert's projection is not taken for that of an MLP."""
    base = make_checkpoint(tmp_path / "base", "qwen3_5_moe_text", seed=1, **SIZES, **NET)
    path = write_adapter(tmp_path / "adapter", base, Spec(("q_proj",)), target_modules=["q_proj", "gate_proj"])
    module, file = "mlp.shared_expert.gate_proj", path / "adapter_model.safetensors"
    tensors = {name.replace("self_attn.q_proj", module): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    with pytest.raises(UnsupportedModelError, match=rf"{module}.lora_A.weight: not implemented; allowed: "):
        load_lora(path, load_model(base, dtype="float32"), name="a", lora_int_id=1, max_lora_rank=8)
