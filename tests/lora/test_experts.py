"""LoRA adapters of single experts: rows and texts of the merged models, on one rank and on several, and files that are
rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from models.harness import Feeder
from parallel.harness import engine_on_threads
from parallel.test_loras import part_of
from parallel.threads import on_ranks
from safetensors.torch import load_file, save_file
from specrs import LLM, LoRARequest, SamplingParams
from specrs.backends.cpu.weights import load_native
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.errors import CheckpointError, UnsupportedModelError
from specrs.models.lora_loader import load_lora
from specrs.models.native_decoder import NativeDecoder
from specrs.models.torch_loader import load_model
from torch import Tensor

from .adapters import PREFIX, Spec, leaves_of, merge, write_adapter

VOCAB = 83
SIZES: dict[str, Any] = {
    "vocab": VOCAB,
    "hidden": 64,
    "head_dim": 16,
    "intermediate": 96,
    "kv_heads": 2,
    "tie": False,
    "with_tokenizer": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"mlp_only_layers": [0], "moe_intermediate_size": 48},
    "qwen3_next": {"moe_intermediate_size": 48},
}


def make(folder: Path, family: str) -> tuple[Path, list[Path]]:
    """Write a model and two adapters: one of all modules, one of every second, experts included."""
    base = make_checkpoint(folder / "0", family, seed=1, **(SIZES | FAMILIES[family]))
    leaves = tuple(leaves_of(base, experts=True))
    specs = [Spec(leaves, rank=9, experts=True), Spec(leaves[1::2], rank=2, experts=True)]
    return base, [write_adapter(folder / f"adapter {i}", base, spec, seed=i) for i, spec in enumerate(specs, 1)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "native", "tolerance"), [("float64", False, 1e-9), ("float32", True, 2e-5), ("bfloat16", True, 0.1)]
)
def test_rows_are_their_adapters(family: str, dtype: str, native: bool, tolerance: float, tmp_path: Path) -> None:
    """Check rows of two adapters and the base model in one pass against the merged models."""
    base, folders = make(tmp_path, family)
    model = load_native(base, dtype=dtype) if native else load_model(base, dtype=dtype)
    adapters = [
        load_lora(path, model, name=str(i), lora_int_id=i, max_lora_rank=9) for i, path in enumerate(folders, 1)
    ]
    merged = [base, *(merge(base, path, tmp_path / f"merged {path.name}") for path in folders)]
    models, which, lengths = [load_model(path, dtype="float64") for path in merged], [1, 0, 2, 1], [5, 3, 1, 40]
    feeder = Feeder(model, num_requests=4)
    feeder.adapters = {b: adapters[i - 1] for b, i in enumerate(which) if i}
    texts = [[((7 * b + 13 * p) % VOCAB, p) for p in range(n)] for b, n in enumerate(lengths)]
    logits = feeder.feed(dict(enumerate(texts))).double()
    for text, i, found in zip(texts, which, logits.split(lengths), strict=True):
        expected = [Feeder(model).feed({0: text}) for model in models]
        off = [float((found - logits).norm() / logits.norm()) for logits in expected]
        assert off[i] < tolerance
        assert min(off[:i] + off[i + 1 :]) > 0.2, off


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_ranks_add_up_to_the_whole_model(family: str, tmp_path: Path) -> None:
    base, folders = make(tmp_path, family)

    def feed(device: Any) -> Tensor:
        model = load_model(base, dtype="float64", device=device)
        feeder = Feeder(model, num_requests=3)
        feeder.adapters = {i: part_of(path, i, model, base) for i, path in enumerate(folders, 1)}
        return feeder.feed({b: [((7 * b + 13 * p) % VOCAB, p) for p in range(6)] for b in range(3)}, prompts=True)

    one, other = on_ranks(2, feed)
    torch.testing.assert_close(one, feed("cpu"), rtol=0, atol=1e-5)  # norms are in float32
    assert torch.equal(one, other)


PROMPTS = [{"prompt_token_ids": [(7 * i * j + 3 * j) % VOCAB for j in range(1, 4)] * 3} for i in range(3)]
SAME: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "detokenize": False}
PARAMS = [SamplingParams(temperature=0, **SAME), SamplingParams(temperature=0.8, seed=5, **SAME)]


def texts(llm: LLM, loras: Any = None) -> list[list[int]]:
    found = [llm.generate(PROMPTS, params, use_tqdm=False, lora_request=loras) for params in PARAMS]
    return [output.outputs[0].token_ids for outputs in found for output in outputs]


def config(path: Path, dtype: str, drafts: int = 0, **fields: Any) -> EngineConfig:
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": drafts,
        "prompt_lookup_min": 1,
        "rejection_sample_method": "coupled",
    }
    given = {"model": str(path), "dtype": dtype, "device": "cpu", "max_model_len": 64, "enable_lora": True}
    return EngineConfig.from_kwargs(**given, **fields, max_loras=2, speculative_config=speculative if drafts else None)


def test_text_depends_on_nothing_else(tmp_path: Path) -> None:
    """Check texts natively to the bit: one request at a time, and batches that mix adapters, with drafts. By torch on
    two ranks, check them against the merged models'."""
    base, folders = make(tmp_path, "qwen3_moe")
    loras = [None, *(LoRARequest(f"adapter {i}", i, str(path)) for i, path in enumerate(folders, 1))]
    alone = texts(LLM.from_engine(build_engine(config(base, "float32", max_num_seqs=1))), loras)
    llm = LLM.from_engine(build_engine(config(base, "float32", 3)))
    assert isinstance(llm.engine.weights.target, NativeDecoder)
    assert texts(llm, loras) == alone
    assert llm.stats().accepted_tokens > 0
    merged = [base, *(merge(base, path, tmp_path / f"merged {path.name}") for path in folders)]
    whole = [texts(LLM.from_engine(build_engine(config(path, "float64")))) for path in merged]
    expected = [whole[i % 3][i] for i in range(6)]
    with engine_on_threads(config(base, "float64", 3, tensor_parallel_size=2)) as engine:
        assert texts(LLM.from_engine(engine), loras) == expected


def test_a_gpu_rejects_adapters_of_experts_alone(tmp_path: Path) -> None:
    base, folders = make(tmp_path, "qwen3_moe")
    model = load_model(base, dtype="float32")
    says = r"experts\.0\.down_proj\.lora_A\.weight: experts are not implemented on a GPU; allowed: an adapter without"
    with pytest.raises(UnsupportedModelError, match=says):
        load_lora(folders[0], model, name="a", lora_int_id=1, max_lora_rank=9, experts=False)
    # `gate_proj` is the name of experts' projections, too; PEFT finds none of them in a model with fused experts.
    dense = write_adapter(tmp_path / "dense", base, Spec(("q_proj", "gate_proj"), rank=4))
    adapter = load_lora(dense, model, name="a", lora_int_id=1, max_lora_rank=9, experts=False)
    assert {name for layer in adapter.layers for name in layer} == {"qkv", "gate_up"}


def test_files_with_some_experts(tmp_path: Path) -> None:
    """Check that all experts that adapter_config.json names must be there if one is, and adapters of fused experts."""
    base, (path, _) = make(tmp_path, "qwen3_moe")
    model, file = load_model(base, dtype="float32"), path / "adapter_model.safetensors"
    tensors = load_file(file)
    gone = f"{PREFIX}model.layers.1.mlp.experts.2.up_proj.lora_B.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, file)
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.lora_B is missing"):
        load_lora(path, model, name="a", lora_int_id=1, max_lora_rank=9)
    settings = path / "adapter_config.json"
    fields = json.loads(settings.read_text()) | {"target_parameters": ["mlp.experts.gate_up_proj"]}
    settings.write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModelError, match=r"target_parameters=.*gate_up_proj.*not implemented"):
        load_lora(path, model, name="a", lora_int_id=1, max_lora_rank=9)
