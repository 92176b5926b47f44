"""LoRA adapters of Gemma 4, whose layers differ in head size, share keys and values, or have experts next to an MLP:
rows and texts of the merged models on every runner, and modules that are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backends.cuda_engines import GREEDY, SMALL, K, generate, give_graphs, serve_by_cuda
from checkpoints import GEMMA4, make_gemma4
from models.cuda_models import LENGTH
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

from .adapters import PREFIX, Spec, merge, write_adapter
from .test_cuda import with_slots

LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VOCAB = 61
# Repeated parts, from which n-grams are drafted; the first is longer than the window of 8.
PROMPTS = [[5, 9, 2, 33] * 3, [7, 1] * 3, [60, 3, 8] * 2]
RUNNERS = {
    "torch": ("float64", 1e-9),
    "native": ("float32", 5e-5),
    "native, bf16": ("bfloat16", 0.3),
    "CUDA": ("float32", 5e-5),
}
NOT_SERVED = ("per_layer_input_gate", "per_layer_projection", "router.proj", "experts.gate_up_proj")


def make(folder: Path, variant: str, **fields: Any) -> tuple[Path, list[Path]]:
    """Write a model and two adapters, one of all modules that adapters may change, one of some."""
    base = make_gemma4(folder / "0", variant, tie=False, **fields)
    specs = [Spec(LEAVES, rank=9), Spec(("k_proj", "o_proj", "up_proj"), rank=2)]
    return base, [write_adapter(folder / f"adapter {i}", base, spec, seed=i) for i, spec in enumerate(specs, 1)]


CASES = [(runner, variant) for runner in RUNNERS for variant in GEMMA4]
# The interpreter takes a second for each.
CASES.remove(("CUDA", "gemma4, keys are values"))
CASES.remove(("CUDA", "gemma4, experts"))


@pytest.mark.parametrize(("runner", "variant"), CASES)
def test_rows_are_their_adapters(runner: str, variant: str, tmp_path: Path) -> None:
    """Check rows of two adapters and the base model, in passes of many rows and of few. Natively, heads of some layers
    are wider than a piece of other products."""
    dtype, tolerance = RUNNERS[runner]
    base, folders = make(tmp_path, variant, global_head_dim=80 if "native" in runner else 32)
    model: Any = load_native(base, dtype=dtype) if "native" in runner else load_model(base, dtype=dtype)
    adapters = [
        load_lora(path, model, name=str(i), lora_int_id=i, max_lora_rank=9) for i, path in enumerate(folders, 1)
    ]
    merged = [base, *(merge(base, path, tmp_path / f"merged {path.name}") for path in folders)]
    models, which, lengths = [load_model(path, dtype="float64") for path in merged], [1, 0, 2, 1], [5, 1, 3, 1]
    if runner == "CUDA":
        model = with_slots(model, adapters, [i - 1 for i in which])
    feeder = Feeder(model, num_requests=4, max_len=LENGTH)
    feeder.adapters = {} if runner == "CUDA" else {b: adapters[i - 1] for b, i in enumerate(which) if i}
    ends = [62, 2, 4, 1]
    spans = [{b: [((7 * b + 13 * p) % VOCAB, p) for p in range(end)] for b, end in enumerate(ends)}]
    spans += [{b: [((3 * b + 5 * p) % VOCAB, p) for p in range(ends[b], ends[b] + n)] for b, n in enumerate(lengths)}]
    found = [feeder.feed(own, prompts=i == 0).double() for i, own in enumerate(spans)]
    for b, i in enumerate(which):
        text = spans[0][b] + spans[1][b]
        own = [logits.split(list(map(len, span.values())))[b] for logits, span in zip(found, spans, strict=True)]
        expected = [Feeder(one, max_len=LENGTH).feed({0: text}, prompts=True) for one in models]
        off = [float((torch.cat(own) - logits).norm() / logits.norm()) for logits in expected]
        assert off[i] < tolerance, off
        assert min(off[:i] + off[i + 1 :]) > max(0.01, 2 * off[i]), off


def engine_of(path: Path, **fields: Any) -> Engine:
    return build_engine(EngineConfig(model=str(path), dtype="float32", **(SMALL | fields)))


@pytest.mark.parametrize("runner", ["native", "CUDA"])
def test_text_is_the_merged_models(runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check texts with drafts, of both adapters and the base model next to each other, by graphs on the CUDA runner."""
    base, folders = make(tmp_path, "gemma4, all of it")
    merged = [base, *(merge(base, path, tmp_path / f"merged {path.name}") for path in folders)]
    texts = [[one.output_token_ids for one in generate(engine_of(path), [GREEDY] * 3, 5, PROMPTS)] for path in merged]
    assert len({str(own) for own in texts}) == 3
    if runner == "CUDA":
        serve_by_cuda(monkeypatch)
    speculative = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    fields = {"enable_lora": True, "max_loras": 2, "max_steps_in_flight": 1, "enforce_eager": runner == "CUDA"}
    engine = engine_of(base, speculative_config=speculative, **fields)
    assert isinstance(engine.runner, CudaRunner) == (runner == "CUDA")
    if runner == "CUDA":
        give_graphs(engine)
    assert engine.loras is not None
    given = [LoRARequest(f"adapter {i}", i, str(path)) for i, path in enumerate(folders, 1)]
    loras = [None, *map(engine.loras.load, given)]
    which = [2, 0, 1]
    made = generate(engine, [GREEDY] * 3, 5, PROMPTS, [loras[i] for i in which])
    assert [one.output_token_ids for one in made] == [texts[i][j] for j, i in enumerate(which)]
    assert engine.stats().draft_tokens > 0


@pytest.mark.parametrize("module", NOT_SERVED)
def test_modules_that_adapters_may_not_change(module: str, tmp_path: Path) -> None:
    """Check that modules of layers that only this family has are rejected by name."""
    base, (path, _) = make(tmp_path, "gemma4, experts and embeddings")
    tensors = load_file(path / "adapter_model.safetensors")
    tensors[f"{PREFIX}model.layers.0.{module}.lora_A.weight"] = torch.zeros(4, 8)
    save_file(tensors, path / "adapter_model.safetensors")
    model = load_model(base, dtype="float32")
    with pytest.raises(
        UnsupportedModelError, match=rf"layers\.0\.{module}\.lora_A\.weight: not implemented; allowed: "
    ):
        load_lora(path, model, name="a", lora_int_id=1, max_lora_rank=9)


def test_keys_of_a_layer_that_has_none_are_rejected(tmp_path: Path) -> None:
    """Check that a layer that reads another layer's keys takes no adapter of keys."""
    base, (path, _) = make(tmp_path, "gemma4")
    tensors = load_file(path / "adapter_model.safetensors")
    assert not any("layers.5.self_attn.k_proj" in name for name in tensors)
    tensors[f"{PREFIX}model.layers.5.self_attn.k_proj.lora_A.weight"] = torch.zeros(9, 64)
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"layers\.5\.self_attn\.k_proj\.lora_A\.weight: not implemented"):
        load_lora(path, load_model(base), name="a", lora_int_id=1, max_lora_rank=9)
