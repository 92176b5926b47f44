"""Quantized checkpoints: the numbers of every format, logits, packed weights, lists of layers, and what is rejected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, make_checkpoint
from quantized_files import awq, compressed, fp8_block, fp8_matrix, gptq
from safetensors.torch import load_file, save_file
from specrs.arrays import BFLOAT16, FLOAT32
from specrs.backends.cpu.weights import Rounding, load_native
from specrs.core import PackedMatrix
from specrs.errors import CheckpointError, UnsupportedModelError
from specrs.models.loader import load_config
from specrs.models.quantization import table
from specrs.models.stored import PackedWeight, StackedWeight
from specrs.models.torch_arrays import to_torch
from specrs.models.torch_loader import load_model

from models.harness import Feeder

Make = Callable[[Path, Path], Path]
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
FORMATS: dict[str, tuple[Make, str | None]] = {
    "fp8-block": (fp8_block, None),
    "fp8-matrix": (fp8_matrix, None),
    "fp8-matrix-inverse": (lambda s, p: fp8_matrix(s, p, names=("weight_scale_inv", "activation_scale")), None),
    "fp8-uneven-block": (lambda s, p: fp8_block(s, p, block=(48, 80)), None),
    "ct-fp8-tensor": (lambda s, p: compressed(s, p, "float-quantized", strategy="tensor", **FP8), None),
    "ct-fp8-channel": (lambda s, p: compressed(s, p, "float-quantized", strategy="channel", **FP8), None),
    "ct-fp8-block": (
        lambda s, p: compressed(s, p, "float-quantized", strategy="block", block_structure=[128, 128], **FP8),
        None,
    ),
    "ct-int8-channel": (lambda s, p: compressed(s, p, "int-quantized", num_bits=8, strategy="channel"), "INT8"),
    "ct-int8-tensor": (lambda s, p: compressed(s, p, "int-quantized", num_bits=8, strategy="tensor"), "INT8"),
    "ct-int8-group": (
        lambda s, p: compressed(s, p, "naive-quantized", num_bits=8, strategy="group", group_size=32),
        "INT8",
    ),
    "ct-int8-asymmetric": (
        lambda s, p: compressed(s, p, "int-quantized", num_bits=8, strategy="channel", symmetric=False),
        None,
    ),
    "ct-int4-group": (
        lambda s, p: compressed(s, p, "pack-quantized", num_bits=4, strategy="group", group_size=32),
        "INT4",
    ),
    "ct-int4-channel": (
        lambda s, p: compressed(s, p, "pack-quantized", num_bits=4, strategy="channel"),
        "INT4",
    ),
    "ct-int4-asymmetric": (
        lambda s, p: compressed(s, p, "pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
        "INT8",  # its scales are fp32
    ),
    "ct-int4-act-order": (
        lambda s, p: compressed(s, p, "pack-quantized", ordered=True, num_bits=4, strategy="group", group_size=32),
        "INT4",
    ),
    "ct-int4-act-order-asymmetric": (
        lambda s, p: compressed(
            s,
            p,
            "pack-quantized",
            ordered=True,
            num_bits=4,
            strategy="group",
            group_size=16,
            symmetric=False,
        ),
        None,  # its groups are no multiple of 32
    ),
    "ct-int8-packed": (
        lambda s, p: compressed(s, p, "pack-quantized", num_bits=8, strategy="group", group_size=32),
        "INT8",
    ),
    "ct-nvfp4": (
        lambda s, p: compressed(
            s, p, "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
        ),
        None,
    ),
    "gptq-4": (gptq, "INT4"),
    "gptq-4-all": (lambda s, p: gptq(s, p, group=-1), "INT4"),
    "gptq-4-asymmetric": (lambda s, p: gptq(s, p, sym=False), "INT4"),
    "gptq-4-v2": (lambda s, p: gptq(s, p, sym=False, version="gptq_v2"), "INT4"),
    "gptq-4-act-order": (lambda s, p: gptq(s, p, desc_act=True), "INT4"),
    "gptq-8": (lambda s, p: gptq(s, p, bits=8), "INT8"),
    "awq": (awq, "INT4"),
}
"""For each format: how it is written, and the layout in which native passes pack it, or None if they dequantize it."""
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("source"), "qwen3", tie=False, head_dim=32, kv_heads=2, layers=2, hidden=64,
        intermediate=160, initializer_range=0.1, dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in made:
            made[name] = FORMATS[name][0](source, tmp_path_factory.mktemp("formats") / name)
        return made[name]

    return write


def logits(path: Path) -> torch.Tensor:
    return Feeder(load_model(path, dtype="float64")).feed_chunks(TOKENS, [8])


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dequantized_model(name: str, written: Callable[[str], Path]) -> None:
    """Check logits against the dequantized model: float64 within rounding of float32 weights, native passes within that
    of sums or 16-bit activations, bf16 within 2^-8."""
    path = written(name)
    expected = logits(path.with_name(path.name + ".numbers"))
    size = expected.abs().max()
    assert (logits(path) - expected).abs().max() < 2e-6 * size
    for exact, activations, bound in ((True, "fp32", 2e-5), (True, "auto", 1e-3), (False, "auto", 3e-2)):
        model = load_native(path, dtype="float32", rounding=Rounding(exact, activations))
        found = Feeder(model).feed_chunks(TOKENS, [8])
        assert (found - expected).abs().max() < bound * size
        weight = model.weights.layers[1].gate_up
        if FORMATS[name][1] is None or activations == "fp32":
            assert isinstance(weight, StackedWeight)
            assert {part.dtype for part in weight.parts} == {FLOAT32 if exact else BFLOAT16}
        else:
            assert isinstance(weight, PackedWeight)
            assert {part.kind for part in weight.parts if isinstance(part, PackedMatrix)} == {FORMATS[name][1]}


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_the_reference_s(name: str, written: Callable[[str], Path]) -> None:
    """Check each dequantized projection in float32 against float64: rounded once or twice."""
    path = written(name)
    expected = load_file(path.with_name(path.name + ".numbers") / "model.safetensors")
    checkpoint = table_checkpoint(path)
    for key, numbers in expected.items():
        if key.endswith("_proj.weight"):
            found = to_torch(checkpoint.mapped(key)).double()
            torch.testing.assert_close(found, numbers, rtol=2**-22, atol=1e-12)
            packed = checkpoint.packed(key) if checkpoint.is_quantized(key) else None
            if packed is not None:
                assert torch.equal(to_torch(packed.numbers()).double(), found)


def table_checkpoint(path: Path) -> Any:
    from specrs.models.loader import open_checkpoint
    from specrs.models.tensors import tensor_shapes

    config, checkpoint = open_checkpoint(path, None, "auto")
    checkpoint.check(tensor_shapes(config), {})
    return checkpoint


def change(path: Path, layer: str, **tensors: Any) -> None:
    """Replace tensors of `layer`; None removes one."""
    file = path / "model.safetensors"
    content = load_file(file)
    for suffix, value in tensors.items():
        content.pop(f"{layer}.{suffix}", None)
        if value is not None:
            content[f"{layer}.{suffix}"] = value
    save_file(content, file, metadata={"format": "pt"})


LAYER = "model.layers.1.mlp.up_proj"
SCALES = {
    "fp8-block": ("weight_scale_inv", (1, 0)),
    "fp8-matrix": ("weight_scale", ()),
    "fp8-matrix-inverse": ("weight_scale_inv", ()),
    "ct-fp8-channel": ("weight_scale", (7, 0)),
    "ct-int8-channel": ("weight_scale", (7, 0)),
    "ct-int4-group": ("weight_scale", (7, 1)),
    "ct-int4-act-order": ("weight_scale", (7, 1)),
    "ct-nvfp4": ("weight_global_scale", (0,)),
    "gptq-4": ("scales", (1, 7)),
    "gptq-4-act-order": ("scales", (1, 7)),
    "awq": ("scales", (1, 7)),
}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, 0.0])
@pytest.mark.parametrize("name", SCALES)
def test_scales_that_no_quantizer_writes(name: str, value: float, source: Path, tmp_path: Path) -> None:
    path, (suffix, at) = FORMATS[name][0](source, tmp_path / "model"), SCALES[name]
    scales = load_file(path / "model.safetensors")[f"{LAYER}.{suffix}"].clone()
    scales[at] = value
    change(path, LAYER, **{suffix: scales})
    for load in (load_model, load_native):
        where = re.escape(f"{LAYER}.{suffix}{list(at) or ''}={value:g}: must be ")
        with pytest.raises(CheckpointError, match=where):
            load(path)


@pytest.mark.parametrize(
    ("name", "suffix", "cut"),
    [
        ("fp8-block", "weight_scale_inv", lambda t: t[:1]),
        ("fp8-block", "weight", lambda t: t[:, :-1]),
        ("ct-int4-group", "weight_packed", lambda t: t[:, :-1]),
        ("ct-int4-group", "weight_scale", lambda t: t[:, :-1]),
        ("ct-int4-asymmetric", "weight_zero_point", lambda t: t[:-1]),
        ("ct-nvfp4", "weight_packed", lambda t: t[:-1]),
        ("gptq-4", "qweight", lambda t: t[:-1]),
        ("gptq-4", "qzeros", lambda t: t[:, :-1]),
        ("awq", "qweight", lambda t: t[:, :-1]),
        ("awq", "scales", lambda t: t[:-1]),
    ],
)
def test_truncated_packs(
    name: str, suffix: str, cut: Callable[[torch.Tensor], torch.Tensor], source: Path, tmp_path: Path
) -> None:
    path = FORMATS[name][0](source, tmp_path / "model")
    whole = load_file(path / "model.safetensors")[f"{LAYER}.{suffix}"]
    change(path, LAYER, **{suffix: cut(whole).contiguous()})
    with pytest.raises(CheckpointError, match=rf"up_proj\.{suffix} has shape .*, (config|quantization_config)"):
        load_model(path)
    change(path, LAYER, **{suffix: None})
    with pytest.raises(CheckpointError, match=rf"up_proj\.{suffix} is missing"):
        load_model(path)
    change(path, LAYER, **{suffix: whole.double()})
    with pytest.raises(CheckpointError, match=rf"up_proj\.{suffix} is F64, quantization_config makes it"):
        load_model(path)


def test_projections_whose_inputs_are_in_different_orders(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check projections with the same input and different orders of groups: activations are rounded in one order, so
    the first is packed and the other dequantized."""
    path = gptq(source, tmp_path / "gptq", desc_act=True)
    groups = load_file(path / "model.safetensors")[f"{LAYER}.g_idx"]
    change(path, LAYER, g_idx=groups.flip(0))
    caplog.set_level("WARNING", "specrs")
    model = load_native(path, dtype="float32")
    weight = model.weights.layers[1].gate_up
    assert isinstance(weight, PackedWeight)
    gate, up = weight.parts
    assert isinstance(gate, PackedMatrix)
    assert not isinstance(up, PackedMatrix)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        f"{path}: {LAYER} is in another order of inputs than model.layers.1.mlp.gate_proj, so it becomes float32"
    )
    expected = logits(path)
    assert (Feeder(model).feed_chunks(TOKENS, [8]) - expected).abs().max() < 1e-3 * expected.abs().max()


def test_other_damage(source: Path, tmp_path: Path) -> None:
    path = gptq(source, tmp_path / "gptq", desc_act=True)
    groups = load_file(path / "model.safetensors")[f"{LAYER}.g_idx"]
    groups[3] = 2
    change(path, LAYER, g_idx=groups)
    with pytest.raises(CheckpointError, match=r"up_proj\.g_idx\[3\]=2: must be a group from 0 to 1"):
        load_model(path)
    change(path, LAYER, g_idx=None)
    with pytest.raises(CheckpointError, match=r"up_proj\.g_idx is missing"):
        load_model(path)
    path = FORMATS["ct-int4-act-order"][0](source, tmp_path / "ordered")
    groups = load_file(path / "model.safetensors")[f"{LAYER}.weight_g_idx"]
    groups[5] = -1
    change(path, LAYER, weight_g_idx=groups)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_g_idx\[5\]=-1: must be a group from 0 to 1"):
        load_model(path)
    path = FORMATS["ct-int4-group"][0](source, tmp_path / "packed")
    change(path, LAYER, weight_shape=torch.tensor([160, 65]))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_shape=\[160, 65\]: must be \[160, 64\]"):
        load_model(path)
    change(path, LAYER, weight_shape=torch.tensor([160, 64]), weight_left=torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_left is not part of this architecture"):
        load_model(path)


def test_a_bias_of_zeros_that_the_layer_does_not_have(source: Path, tmp_path: Path) -> None:
    path = gptq(source, tmp_path / "gptq")
    expected = logits(path)
    change(path, LAYER, bias=torch.zeros(160))
    assert torch.equal(logits(path), expected)
    change(path, LAYER, bias=torch.ones(160))
    with pytest.raises(CheckpointError, match=r"up_proj\.bias is not part of this architecture"):
        load_model(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            r"quant_method='bitsandbytes': not implemented; allowed: fp8, compressed-ten",
        ),
        ({}, r"quantization_config\.quant_method=None: not implemented; allowed: fp8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt='e5m2': not implemented; allowed: 'e4m3'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]: must be two integers"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, r"ignored_layers='lm_head': must be a list"),
        ({"quant_method": "fp8", "ignored_layers": ["re:("]}, r"ignored_layers='re:\(': must be a regular expression"),
        ({"quant_method": "gptq", "bits": 3}, r"bits=3: not implemented; allowed: 4 or 8"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 0},
            r"group_size=0: must be an integer of at least 1, or -1",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 48}, r"group_size=48: must divide the 64 inputs of model\."),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, r"checkpoint_format='marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, r"version='gemv': not implemented; allowed: 'gemm'"),
        ({"quant_method": "awq", "zero_point": False}, r"zero_point=False: not implemented; allowed: true"),
        ({"quant_method": "awq", "group_size": 48}, r"group_size=48: must divide the 64 inputs"),
        ({"quant_method": "compressed-tensors"}, r"config_groups=None: must be an object"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}, "transform_config": {"a": 1}},
            r"transform_config=.*: not implemented; allowed: null",
        ),
    ],
)
def test_configs_that_are_rejected(fields: dict[str, Any], message: str, source: Path, tmp_path: Path) -> None:
    path = gptq(source, tmp_path / "model")
    edit_json(path / "config.json", quantization_config=fields)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        load_model(path)


@pytest.mark.parametrize(
    ("weights", "form", "message"),
    [
        ({"num_bits": 4}, "marlin-24", r"format='marlin-24': not implemented; allowed: float-quantized, int-quantized"),
        ({"num_bits": 3, "strategy": "channel"}, "pack-quantized", r"weights\.num_bits=\"3 of type 'int' in format"),
        ({"num_bits": 4, "strategy": "group"}, "pack-quantized", r"weights\.group_size=None: must be an integer"),
        ({"num_bits": 4, "strategy": "tensor"}, "pack-quantized", r"strategy='tensor': not implemented"),
        ({"num_bits": 8, "dynamic": True}, "int-quantized", r"weights\.dynamic=True: not implemented; allowed: false"),
        (
            {"num_bits": 8, "type": "float", "strategy": "block"},
            "float-quantized",
            r"block_structure=None: must be two",
        ),
        (
            {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 8},
            "float-quantized",
            r"strategy='group'",
        ),
    ],
)
def test_groups_that_are_rejected(
    weights: dict[str, Any], form: str, message: str, source: Path, tmp_path: Path
) -> None:
    path = gptq(source, tmp_path / "model")
    config = {"quant_method": "compressed-tensors", "format": form}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    edit_json(path / "config.json", quantization_config=config)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        load_config(path)


def test_lists_of_layers() -> None:
    """Check lists of layers: by name, by a whole part of a name, by pattern."""
    from specrs.models.quantization.modules import is_in

    name = "model.layers.1.mlp.up_proj"
    for inside in (name, "up_proj", "model.layers.1", "layers.1.mlp", r"re:.*\.mlp\..*", r"re:model\.layers\.[01]\."):
        assert is_in(name, [inside]), inside
    for outside in ("model.layers.10", "layers.1.self_attn", "up", "proj", r"re:mlp", r"re:.*down_proj", ""):
        assert not is_in(name, [outside] if outside else []), outside
    assert not is_in("model.layers.10.mlp.up_proj", ["model.layers.1"])


def test_targets_by_name_come_before_linear(source: Path, tmp_path: Path) -> None:
    path = FORMATS["ct-int8-channel"][0](source, tmp_path / "model")
    expected = logits(path)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    other = {"targets": [r"re:.*down_proj"], "weights": None}
    edit_json(path / "config.json", quantization_config=config | {"config_groups": {"group_0": group, "g": other}})
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_scale"):
        load_model(path)
    named = {"group_0": group | {"targets": [r"re:.*_proj$"]}}
    edit_json(path / "config.json", quantization_config=config | {"config_groups": named, "ignore": []})
    assert torch.equal(logits(path), expected)


def test_fused_projections_may_be_partly_quantized(source: Path, tmp_path: Path) -> None:
    """Check fused projections of which a part is not quantized: it stays as it is, and the others are packed."""
    path = FORMATS["ct-int8-channel"][0](source, tmp_path / "model")
    layer = "model.layers.1.self_attn.k_proj"
    weight = load_file(source / "model.safetensors")[f"{layer}.weight"]
    change(path, layer, weight=weight, weight_scale=None)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    edit_json(path / "config.json", quantization_config=config | {"ignore": ["lm_head", layer]})
    first, second = load_native(path, dtype="float32").weights.layers
    assert [isinstance(part, PackedMatrix) for part in first.qkv.parts] == [True, True, True]
    assert [isinstance(part, PackedMatrix) for part in second.qkv.parts] == [True, False, True]
    found = Feeder(load_native(path, dtype="float32")).feed_chunks(TOKENS, [8])
    assert (found - logits(path)).abs().max() < 1e-3 * found.abs().max()
    numbers = path.with_name("model.numbers")
    tensors = load_file(numbers / "model.safetensors")
    save_file(tensors | {f"{layer}.weight": weight.double()}, numbers / "model.safetensors", metadata={"format": "pt"})
    assert (logits(path) - logits(numbers)).abs().max() < 1e-5


def test_the_table_is_the_document_s() -> None:
    document = Path(__file__).parents[2] / "docs" / "supported.md"
    assert table.table() in document.read_text(encoding="utf-8")
    methods = {row.method for row in table.TABLE}
    assert methods >= {*table.METHODS, table.GGUF}
