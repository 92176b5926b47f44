"""The memory that is required before weights are loaded onto a GPU is that of the tensors that are then loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_gemma4
from gguf_files import write_gguf
from quantized_files import awq, compressed, fp8_block, gptq, mxfp4
from specrs.backends.cuda.fit import layouts_of
from specrs.backends.cuda.loader import QuantizedLoader
from specrs.backends.cuda.weight_bytes import weight_bytes
from specrs.backends.model_source import ModelSource
from specrs.backends.table import BACKENDS
from specrs.config import EngineConfig
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.loader import open_checkpoint
from specrs.models.quantization.at_load import quantized_at_load
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.shards import Shard
from specrs.models.torch_decoder import TorchDecoder
from weight_memory import assert_needed, memory_of

SIZES: dict[str, Any] = {"layers": 2, "vocab": 61, "head_dim": 64, "kv_heads": 2, "with_tokenizer": False}

EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}


def load(path: Path, **fields: Any) -> tuple[EngineConfig, TorchDecoder]:
    """Load a model on a CPU as for a GPU, in float16: a CPU keeps the LM head of a bf16 model in fp32."""
    config = EngineConfig(model=str(path), device="cuda", dtype="float16", **fields)
    made = BACKENDS["cuda"].load_model(ModelSource.of_target(config), "cpu", None)
    assert isinstance(made, TorchDecoder)
    return config, made


FAMILIES = [
    "qwen3",
    "gpt_oss",
    "mixtral",
    "qwen3_5_moe_text",
    "lfm2",
    "lfm2_moe",
    "llama4_text",
    "gemma4",
    "gemma4, experts",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_unquantized_models(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if family.startswith("gemma4"):
        path = make_gemma4(tmp_path / "model", family, with_tokenizer=False)
    else:
        path = make_checkpoint(tmp_path / "model", family, tie=family == "qwen3", **SIZES)
    config, model = load(path)
    assert_needed(config, memory_of(model.weights), monkeypatch)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a checkpoint whose matrices have rows of whole blocks of 256 inputs."""
    path = tmp_path_factory.mktemp("bytes") / "plain"
    return make_checkpoint(path, "llama", hidden=256, intermediate=512, initializer_range=0.05, **SIZES)


GGUF: dict[str, tuple[str, dict[str, str], int]] = {
    "Q8_0": ("Q8_0", {}, 8),
    "Q4_0": ("Q4_0", {}, 8),
    "Q6_K": ("Q6_K", {}, 8),
    "Q3_K": ("Q3_K", {}, 8),
    "Q4_1": ("Q4_1", {}, 8),
    "Q4_K": ("Q4_K", {}, 8),
    "Q5_K": ("Q5_K", {}, 8),
    "MXFP4": ("MXFP4", {}, 8),
    "as Q4_K_M": ("Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K"}, 8),
    "one layer of another type": ("Q4_K", {"blk.1.attn_v": "Q5_K", "blk.0.ffn_up": "Q3_K"}, 8),
    "stacks without a common layout": ("Q4_K", {"attn_v": "Q8_0", "ffn_up": "Q4_0"}, 4),
    "no layout": ("TQ2_0", {}, 0),
}
"""Type of the matrices of a file, types of some of them, and how many of 8 stacked matrices stay quantized."""


def num_quantized(model: TorchDecoder) -> int:
    """Return how many of the projections of a model's layers are quantized."""
    weights = [getattr(layer, name) for layer in model.weights.layers for name in ("qkv", "o", "gate_up", "down")]
    return sum(isinstance(weight, QuantizedWeight) for weight in weights)


@pytest.mark.parametrize("name", GGUF)
def test_gguf_files(name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, kinds, expected = GGUF[name]
    config, model = load(write_gguf(plain, tmp_path / "model.gguf", kind, kinds=kinds))
    assert num_quantized(model) == expected
    assert_needed(config, memory_of(model.weights), monkeypatch)


INT: dict[str, Any] = {"type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FLOAT: dict[str, Any] = {"type": "float", "symmetric": True, "strategy": "channel"}
FORMATS: dict[str, tuple[Callable[[Path, Path], Path], int]] = {
    "fp8 in blocks": (fp8_block, 7),
    "fp8 in blocks over two projections": (lambda source, path: fp8_block(source, path, block=(96, 128)), 7),
    "fp8 by output": (lambda source, path: compressed(source, path, "float-quantized", num_bits=8, **FLOAT), 8),
    "gptq": (gptq, 8),
    "gptq with zero points": (lambda source, path: gptq(source, path, sym=False), 8),
    "gptq by output": (lambda source, path: gptq(source, path, bits=8, group=-1), 8),
    "gptq in order of quantization": (lambda source, path: gptq(source, path, desc_act=True), 0),
    "awq": (awq, 8),
    "packed int4": (lambda source, path: compressed(source, path, "pack-quantized", num_bits=4, **INT), 8),
}
"""Writer of a checkpoint in each format, and how many of 8 stacked matrices stay quantized."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytes") / "small"
    sizes = SIZES | {"head_dim": 32, "group": 1}
    return make_checkpoint(path, "llama", hidden=128, intermediate=128, initializer_range=0.05, **sizes)


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, expected = FORMATS[name]
    config, model = load(write(small, tmp_path / "model"))
    assert num_quantized(model) == expected
    assert_needed(config, memory_of(model.weights), monkeypatch)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4", "q8_0", "q4_0", "q4_k"])
def test_quantization_at_load(
    quantization: str, load_format: str, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model = load(plain, quantization=quantization, load_format=load_format)
    assert num_quantized(model) == 8
    assert_needed(config, memory_of(model.weights), monkeypatch)


@pytest.mark.parametrize("of", ["int8", "int4", "mxfp4"])
def test_experts(of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if of == "mxfp4":
        make_checkpoint(tmp_path / "numbers", "gpt_oss", hidden=64, intermediate=64, **SIZES)
        unquantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
        config, model = load(mxfp4(tmp_path / "numbers", tmp_path / "model", unquantized))
    else:
        path = make_checkpoint(tmp_path / "model", "qwen3_5_moe_text", hidden=128, **EXPERTS, **SIZES)
        config, model = load(path, quantization=of)
    assert all(layer.experts is not None and layer.experts.stacked_quantized for layer in model.weights.layers)
    assert_needed(config, memory_of(model.weights), monkeypatch)


@pytest.mark.parametrize("name", ["int8", "q4_k", "fp8 in blocks", "as Q4_K_M"])
def test_the_part_of_a_rank(name: str, plain: Path, small: Path, tmp_path: Path) -> None:
    """Check parts of two ranks: some matrices are split between groups of inputs, and others cannot be, so they are
    dequantized."""
    at_load = name if name in ("int8", "q4_k") else None
    path = plain
    if name == "as Q4_K_M":
        path = write_gguf(plain, tmp_path / "model.gguf", "Q4_K", kinds={"attn_v": "Q6_K"})
    elif at_load is None:
        path = fp8_block(small, tmp_path / "model")
    config, checkpoint = open_checkpoint(path, None, "auto")
    tensors = checkpoint if at_load is None else quantized_at_load(checkpoint, at_load)
    assert isinstance(tensors, QuantizedTensors)
    layouts = layouts_of(str(path), None, config, at_load, "auto")
    for shard in (Shard(0, 2), Shard(1, 2)):
        made = QuantizedLoader(config, tensors, torch.float16, torch.device("cpu"), shard).load()
        assert weight_bytes(config, layouts, torch.float16, shard) == memory_of(made)
