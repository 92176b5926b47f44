"""Adapters that cannot be read or use unimplemented features are rejected; an id stands for one adapter."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from specrs import LoRARequest, SpecrsError
from specrs.config import EngineConfig
from specrs.engine.loras import LoRAStore
from specrs.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import load_model
from specrs.models.wrappers import TEXT_BEGINNINGS

from .adapters import PREFIX, Spec, write_adapter

SPEC = Spec(("q_proj", "down_proj"), rank=4)
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden": 48, "head_dim": 16, "intermediate": 40, "kv_heads": 2, "with_tokenizer": False}
    return make_checkpoint(tmp_path_factory.mktemp("base"), **sizes)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> TorchDecoder:
    return load_model(checkpoint)


def store(model: TorchDecoder, rank: int = 16, kept: int = 1) -> LoRAStore:
    return LoRAStore(model, max_lora_rank=rank, max_cpu_loras=kept)


def request(path: Path, number: int = 1, name: str | None = None) -> LoRARequest:
    return LoRARequest(name or f"adapter {number}", number, str(path))


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"peft_type": "IA3"}, UnsupportedModelError, "peft_type='IA3': not implemented; allowed: 'LORA'"),
        ({"use_dora": True}, UnsupportedModelError, "use_dora=True: not implemented"),
        ({"bias": "lora_only"}, UnsupportedModelError, "bias='lora_only': not implemented"),
        ({"fan_in_fan_out": True}, UnsupportedModelError, "fan_in_fan_out=True: not implemented"),
        ({"fan_in_fan_out": 0}, UnsupportedModelError, "fan_in_fan_out=0: not implemented"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedModelError, "modules_to_save="),
        ({"layer_replication": [[0, 1]]}, UnsupportedModelError, "layer_replication="),
        ({"init_lora_weights": "pissa"}, UnsupportedModelError, "init_lora_weights='pissa': not implemented"),
        ({"task_type": "SEQ_CLS"}, UnsupportedModelError, "task_type='SEQ_CLS'"),
        ({"r": 0}, CheckpointError, "r=0: must be an integer of at least 1"),
        ({"r": True}, CheckpointError, "r=True"),
        (
            {"r": 5},
            CheckpointError,
            r"lora_A.weight=\(4, \d+\): must be \(5, \d+\) for rank 5 and this model; set r, or rank_pattern, .* to 4$",
        ),
        ({"r": 17}, CheckpointError, "=17: must be at most max_lora_rank=16"),
        (
            {"rank_pattern": {"q_proj": 3}},
            CheckpointError,
            r"lora_A.weight=\(4, 48\): must be \(3, 48\) for rank 3.* to 4$",
        ),
        ({"rank_pattern": {"q_proj": "3"}}, CheckpointError, "rank_pattern="),
        ({"alpha_pattern": {"(": 3}}, CheckpointError, "alpha_pattern='\\(': must be an expression"),
        ({"lora_alpha": 0}, CheckpointError, "lora_alpha=0: must be a finite number greater than 0"),
        ({"lora_alpha": 10**400}, CheckpointError, "lora_alpha="),
        ({"use_rslora": 1}, CheckpointError, "use_rslora=1: must be true or false"),
        ({"target_modules": None}, CheckpointError, "target_modules=None: must be a list"),
        ({"target_modules": "*"}, CheckpointError, "target_modules='\\*': must be an expression"),
        ({"target_modules": ["q_proj"]}, CheckpointError, "does not name model.layers.0.mlp.down_proj; add it to t"),
        (
            {"target_modules": "all-linear"},
            CheckpointError,
            "k_proj.lora_A, .* is missing, and 17 more; take modules that",
        ),
        ({"target_modules": ["lm_head"]}, CheckpointError, "does not name"),
        ({"exclude_modules": ["q_proj"]}, CheckpointError, "does not name"),
        ({"layers_to_transform": [0]}, CheckpointError, "does not name model.layers.1"),
        ({"layers_to_transform": "0"}, CheckpointError, "layers_to_transform="),
        ({"layers_pattern": "blocks"}, CheckpointError, "layers_pattern='blocks'"),
    ],
)
def test_what_the_configuration_says(
    fields: dict[str, Any], error: type[SpecrsError], says: str, checkpoint: Path, model: TorchDecoder, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "adapter", checkpoint, SPEC, **fields)
    with pytest.raises(error, match=says):
        store(model).load(request(path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({f"{Q}.lora_B.weight": None}, "model.layers.0.self_attn.q_proj.lora_B is missing"),
        ({f"{Q}.lora_A.weight": torch.zeros(4, 47)}, r"=\(4, 47\): must be \(4, 48\) for rank 4 .*; use an adapter"),
        ({f"{Q}.lora_B.weight": torch.zeros(4, 64)}, r"=\(4, 64\): must be \(64, 4\) for rank 4 .*; use an adapter"),
        ({f"{Q}.lora_B.weight": torch.zeros(64, 5)}, r"=\(64, 5\): must be \(64, 4\) .*; set r, or .* to 5$"),
        ({f"{Q}.lora_B.weight": torch.zeros(64)}, r"=\(64,\): must be \(64, 4\) .*; use an adapter"),
        (
            {f"{Q}.lora_A.weight": torch.zeros(4, 48, dtype=torch.int32)},
            "lora_A.weight='I32': must be one of .*; convert",
        ),
        ({f"{PREFIX}lm_head.lora_A.weight": torch.zeros(4, 48)}, "lm_head.lora_A.weight: not implemented"),
        ({f"{Q}.lora_magnitude_vector": torch.zeros(4)}, "lora_magnitude_vector: not implemented"),
        ({f"{Q}.lora_A.bias": torch.zeros(4)}, "lora_A.bias: not implemented"),
        ({"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 48)}, "not implemented; allowed: base_model"),
        ({f"{PREFIX}model.layers.9.mlp.down_proj.lora_A.weight": torch.zeros(4, 40)}, "layers.9.*not implemented"),
    ],
)
def test_what_the_tensors_are(
    change: dict[str, torch.Tensor | None], says: str, checkpoint: Path, model: TorchDecoder, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "adapter", checkpoint, SPEC)
    tensors = load_file(path / "adapter_model.safetensors") | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        store(model).load(request(path))


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("llama4_text", "model.layers.1.feed_forward.shared_expert.down_proj"),
        ("llama4_text", "model.layers.1.feed_forward.experts.down_proj"),
        ("llama4_text", "model.layers.0.mlp.down_proj"),
        ("qwen3_moe", "model.layers.0.mlp.experts.9.up_proj"),
        ("qwen3_moe", "model.layers.0.mlp.experts"),
        ("qwen3_moe", "model.layers.0.mlp.gate"),
    ],
)
def test_modules_that_adapters_may_not_change(family: str, module: str, tmp_path: Path) -> None:
    """Check that adapters of fused and shared experts are rejected by name, and so are names that only other families
    have."""
    path = make_checkpoint(tmp_path / "base", family, with_tokenizer=False)
    own = write_adapter(tmp_path / "adapter", path, Spec(("o_proj",), rank=4))
    tensors = load_file(own / "adapter_model.safetensors")
    tensors |= {f"{PREFIX}{module}.lora_A.weight": torch.zeros(4, 8)}
    save_file(tensors, own / "adapter_model.safetensors")
    says = rf"{module}.lora_A.weight: not implemented; allowed: .* q_proj, .*, but not of shared or fused experts"
    with pytest.raises(UnsupportedModelError, match=says):
        store(load_model(path)).load(request(own))


def test_files_that_are_not_there(checkpoint: Path, model: TorchDecoder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lora_path='/.*nowhere': must be a folder or a hub id"):
        store(model).load(request(tmp_path / "nowhere"))
    path = write_adapter(tmp_path / "adapter", checkpoint, SPEC)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is missing; adapter_model\.bin is a pickle"):
        store(model).load(request(path))
    (path / "adapter_model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(CheckpointError, match="could not be read"):
        store(model).load(request(path))
    (path / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is missing"):
        store(model).load(request(path))


def test_an_id_stands_for_one_adapter(
    checkpoint: Path, model: TorchDecoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "specrs")
    a, b = (write_adapter(tmp_path / name, checkpoint, SPEC, seed=i) for i, name in enumerate("ab"))
    loras = store(model, kept=1)
    first = loras.load(request(a))
    assert loras.load(request(a)) is first
    assert loras.get(1) is first
    for wrong in (request(b), request(a, name="another")):
        with pytest.raises(InvalidRequestError, match="lora_int_id=1: stands for 'adapter 1'"):
            loras.load(wrong)
    with pytest.raises(InvalidRequestError, match="lora_name='adapter 1': is the name of lora_int_id=1"):
        loras.load(request(b, 2, "adapter 1"))
    loras.load(request(b, 2))
    assert loras.load(request(a)) is first  # nothing keeps it but this test
    loras.load(request(b, 2))
    del first
    with pytest.raises(KeyError):
        loras.get(1)
    loras.load(request(a))
    assert sum("LoRA adapter" in record.message for record in caplog.records) == 4
    loras.load(request(b, 2))
    write_adapter(a, checkpoint, SPEC, seed=5, lora_alpha=3.125)
    with pytest.raises(InvalidRequestError, match="its files have changed since it was first read"):
        loras.load(request(a))


def test_the_one_not_asked_for_longest_goes(checkpoint: Path, model: TorchDecoder, tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / name, checkpoint, SPEC, seed=i) for i, name in enumerate("abc")]
    loras = store(model, kept=2)
    for number in (1, 2, 1, 3):
        loras.load(request(folders[number - 1], number))
    assert loras.get(1) is not loras.get(3)
    with pytest.raises(KeyError):
        loras.get(2)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lora_name": ""}, "lora_name=''"),
        ({"lora_int_id": 0}, "lora_int_id=0: must be an integer from 1"),
        ({"lora_int_id": 2**32}, "lora_int_id="),
        ({"lora_path": ""}, "lora_path=''"),
        ({"base_model_name": ""}, "base_model_name=''"),
        ({"tensorizer_config_dict": {}}, "tensorizer_config_dict={}: not implemented; allowed: None"),
    ],
)
def test_requests(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        LoRARequest(**({"lora_name": "a", "lora_int_id": 1, "lora_path": "b"} | fields))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_impl": "transformers"}, "enable_lora=True: not implemented with model_impl='transformers'"),
        ({"cpu_activations": "bf16"}, "enable_lora=True: not implemented with cpu_activations='bf16'"),
        ({"max_loras": 0}, "max_loras=0"),
        ({"max_lora_rank": 513}, "max_lora_rank=513: must be an integer from 1 to 512"),
        ({"max_loras": 3, "max_cpu_loras": 2}, "max_cpu_loras=2: must be at least max_loras=3, or None"),
        ({"lora_dtype": "float16"}, "lora_dtype='float16'"),
        ({"fully_sharded_loras": True}, "fully_sharded_loras=True"),
    ],
)
def test_settings(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecrsError, match=says):
        EngineConfig.from_kwargs(enable_lora=True, **fields)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_devices_and_ranks_take_adapters(device: str, ranks: int) -> None:
    assert EngineConfig.from_kwargs(enable_lora=True, device=device, tensor_parallel_size=ranks).enable_lora


def test_config_files_are_read_as_json(checkpoint: Path, model: TorchDecoder, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter", checkpoint, SPEC)
    for text in ("[]", "{", "[" * 100_000, json.dumps({"r": 4})):
        (path / "adapter_config.json").write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
            store(model).load(request(path))


@pytest.mark.parametrize("kind", ["A", "B"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_are_finite(kind: str, number: float, checkpoint: Path, model: TorchDecoder, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter", checkpoint, SPEC)
    tensors = load_file(path / "adapter_model.safetensors")
    name = next(name for name in tensors if f"lora_{kind}" in name)
    tensors[name][1, 1] = number
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}.* must hold finite numbers"):
        store(model).load(request(path))


@pytest.mark.parametrize("beginning", TEXT_BEGINNINGS)
@pytest.mark.parametrize("named_by", ["list", "expression"])
def test_an_adapter_of_a_multimodal_checkpoint(
    beginning: str, named_by: str, checkpoint: Path, model: TorchDecoder, tmp_path: Path
) -> None:
    """Check that modules may have the names of a multimodal checkpoint, also where an expression names them."""
    spec = replace(SPEC, named_by=named_by)
    path = write_adapter(tmp_path / "adapter", checkpoint, spec)
    known = store(model).load(request(path))
    tensors = load_file(path / "adapter_model.safetensors")
    renamed = {name.replace(f"{PREFIX}model.", PREFIX + beginning, 1): tensor for name, tensor in tensors.items()}
    assert not renamed.keys() & tensors.keys()
    save_file(renamed, path / "adapter_model.safetensors")
    found = store(model).load(request(path))
    for own, other in zip(found.layers, known.layers, strict=True):
        assert own.keys() == other.keys()
        for name, parts in own.items():
            assert all(torch.equal(x.a, y.a) and torch.equal(x.b, y.b) for x, y in zip(parts, other[name], strict=True))
