"""gpt-oss in MXFP4: the numbers that transformers reads, and damage that is rejected."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import edit_json, make_checkpoint
from hf_reference import load
from quantized_files import mxfp4
from safetensors.torch import load_file, save_file
from specrs.backends.cpu.weights import load_native
from specrs.core import PackedMatrix
from specrs.errors import CheckpointError
from specrs.models.loader import open_checkpoint
from specrs.models.stored import PackedWeight
from specrs.models.tensors import tensor_shapes
from specrs.models.torch_arrays import to_torch
from specrs.models.torch_loader import load_model
from torch import Tensor

from models.harness import Feeder

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random codes with scales of a usual size; next to it `numbers`, as transformers dequantizes
    it."""
    folder = tmp_path_factory.mktemp("mxfp4")
    sizes = {"hidden": 64, "intermediate": 96, "head_dim": 32, "kv_heads": 1, "vocab": 83, "tie": False}
    numbers = make_checkpoint(folder / "numbers", "gpt_oss", dtype=torch.bfloat16, **sizes)
    mxfp4(numbers, folder / "codes", CONFIG)
    return folder


def logits(path: Path, **args: Any) -> Tensor:
    return Feeder(load_model(path, **args)).feed_chunks(TOKENS, [8])


def test_numbers_are_transformers_own(source: Path) -> None:
    config, checkpoint = open_checkpoint(source / "codes", None, "auto")
    checkpoint.check(tensor_shapes(config), {})
    whole = load_file(source / "numbers" / "model.safetensors")
    for expert in range(5):
        gate_up, down = (whole[f"model.layers.1.mlp.experts.{x}_proj"][expert] for x in ("gate_up", "down"))
        biases = whole["model.layers.1.mlp.experts.gate_up_proj_bias"][expert]
        at = f"model.layers.1.mlp.experts.{expert}."
        for first, name in enumerate(("gate", "up")):
            assert torch.equal(to_torch(checkpoint.mapped(f"{at}{name}_proj.weight")), gate_up[:, first::2].t().float())
            assert torch.equal(to_torch(checkpoint.mapped(f"{at}{name}_proj.bias")), biases[first::2])
        assert torch.equal(to_torch(checkpoint.mapped(f"{at}down_proj.weight")), down.t().float())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_logits_are_those_of_transformers(source: Path) -> None:
    """Check float64 logits against a checkpoint of the dequantized weights, and against transformers' own reading of
    the codes."""
    found = logits(source / "codes", dtype="float64")
    with torch.inference_mode():
        expected = load(source / "numbers")(torch.tensor([TOKENS])).logits[0]
    # transformers has norms' weights in fp32.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert torch.equal(logits(source / "numbers", dtype="float64"), found)


def test_experts_are_packed_in_native_passes(source: Path) -> None:
    """Check native passes of a checkpoint in MXFP4: experts are packed as GGML's MXFP4 blocks with the same values;
    routers and attention are not quantized."""
    config, checkpoint = open_checkpoint(source / "codes", None, "auto")
    checkpoint.check(tensor_shapes(config), {})
    expected = logits(source / "codes", dtype="float64")
    for dtype, bound in (("float32", 1e-3), ("bfloat16", 0.2)):
        model = load_native(source / "codes", dtype=dtype)
        experts = model.weights.layers[0].experts
        assert experts is not None
        assert not isinstance(experts.router, PackedWeight)
        for expert, weight in enumerate(experts.down):
            (part,) = weight.parts
            assert isinstance(part, PackedMatrix)
            assert part.kind == "MXFP4"
            name = f"model.layers.0.mlp.experts.{expert}.down_proj.weight"
            assert np.array_equal(part.numbers(), checkpoint.mapped(name))
        assert all(isinstance(weight, PackedWeight) for weight in experts.gate_up)
        found = Feeder(model).feed_chunks(TOKENS, [3, 5])
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)


def change(source: Path, path: Path, **tensors: Callable[[Tensor], Tensor | None]) -> Path:
    """Copy the checkpoint with tensors of layer 1's experts changed; None leaves one out."""
    shutil.copytree(source / "codes", path)
    content = load_file(path / "model.safetensors")
    for name, made in tensors.items():
        key = f"model.layers.1.mlp.experts.{name}"
        new = made(content.pop(key))
        if new is not None:
            content[key] = new.contiguous()
    save_file(content, path / "model.safetensors", metadata={"format": "pt"})
    return path


def scaled(value: int) -> Callable[[Tensor], Tensor]:
    def change(scales: Tensor) -> Tensor:
        scales[2, 5, 1] = value
        return scales

    return change


@pytest.mark.parametrize("value", [253, 255])
def test_scales_that_are_none(value: int, source: Path, tmp_path: Path) -> None:
    path = change(source, tmp_path / "model", gate_up_proj_scales=scaled(value))
    # Output 5 of gates and values in turns is the third value.
    message = rf"layers\.1\.mlp\.experts\.2\.up_proj\.scales\[2, 1\]={value}: must be at most 252"
    for load_any in (load_model, load_native):
        with pytest.raises(CheckpointError, match=message):
            load_any(path)
    change(source, tmp_path / "largest", gate_up_proj_scales=scaled(252))
    assert load_native(tmp_path / "largest").weights


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"down_proj_scales": lambda t: t[:, :, :-1]}, r"down_proj\.scales has shape \(64, 2\), .* makes it \(64, 3\)"),
        ({"down_proj_blocks": lambda t: t[:, :-1]}, r"down_proj\.blocks has shape \(63, 3, 16\)"),
        ({"gate_up_proj_blocks": lambda t: t[..., :8]}, r"gate_proj\.blocks has shape \(96, 2, 8\)"),
        ({"gate_up_proj_blocks": lambda t: t[:4]}, r"experts\.4\.gate_proj\.blocks, .* are missing"),
        ({"gate_up_proj_scales": lambda t: t.float()}, r"gate_proj\.scales is F32, quantization_config makes it U8"),
        ({"down_proj_scales": lambda _: None}, r"down_proj\.scales.* are missing"),
        ({"down_proj_bias": lambda _: None}, r"down_proj\.bias.* are missing"),
        ({"down_proj_bias": lambda t: t[:, :-1]}, r"down_proj\.bias has shape \(63,\)"),
    ],
)
def test_damage(changes: dict[str, Any], message: str, source: Path, tmp_path: Path) -> None:
    path = change(source, tmp_path / "model", **changes)
    for load_any in (load_model, load_native):
        with pytest.raises(CheckpointError, match=message):
            load_any(path)


def test_methods_of_other_checkpoints(source: Path, tmp_path: Path) -> None:
    path = shutil.copytree(source / "codes", tmp_path / "fp8")
    edit_json(path / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match=r"quant_method='fp8': not implemented; allowed: for GptOss.* mxfp4$"):
        load_model(path)
    other = make_checkpoint(tmp_path / "mixtral", "mixtral")
    edit_json(other / "config.json", quantization_config=CONFIG)
    with pytest.raises(CheckpointError, match=r"quant_method='mxfp4': not implemented; allowed: for Mixtral.* fp8, "):
        load_model(other)


def test_layers_that_are_not_converted(source: Path, tmp_path: Path) -> None:
    """Check `modules_to_not_convert` with a star for the layer's number, as in gpt-oss."""
    path, numbers = (shutil.copytree(source / kind, tmp_path / kind) for kind in ("codes", "numbers"))
    content, plain = (load_file(folder / "model.safetensors") for folder in (path, numbers))
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts.down_proj"
        content.pop(f"{name}_blocks")
        content.pop(f"{name}_scales")
        content[name] = plain[name]
    save_file(content, path / "model.safetensors", metadata={"format": "pt"})
    listed = ["model.layers.*.mlp.experts.*.down_proj"]
    edit_json(path / "config.json", quantization_config=CONFIG | {"modules_to_not_convert": listed})
    assert json.loads((path / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert torch.equal(logits(path, dtype="float64"), logits(numbers, dtype="float64"))
