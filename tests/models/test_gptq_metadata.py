"""GPTQ checkpoints whose metadata and content may disagree: versions of the format, the quantizer's own file,
`dynamic`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, make_checkpoint
from quantized_files import awq, gptq
from safetensors.torch import load_file, save_file
from specrs.backends.cpu.weights import Rounding, load_native
from specrs.errors import CheckpointError, UnsupportedModelError
from specrs.models.loader import load_config, open_checkpoint
from specrs.models.quantization.table import method_of
from specrs.models.tensors import tensor_shapes
from specrs.models.torch_arrays import to_torch
from specrs.models.torch_loader import load_model

from models.harness import Feeder

VERSIONS = ("gptq", "gptq_v2")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("source"), "llama", tie=False, head_dim=32, kv_heads=2, layers=1, hidden=64,
        intermediate=64, initializer_range=0.1,
    )  # fmt: skip


def numbers(folder: Path) -> dict[str, torch.Tensor]:
    """Return the dequantized projections, as specrs reads them."""
    config, checkpoint = open_checkpoint(folder, None, "auto")
    checkpoint.check(tensor_shapes(config), {})
    return {name: to_torch(checkpoint.mapped(name)) for name in tensor_shapes(config) if name.endswith("_proj.weight")}


def assert_right(folder: Path, expected: Path) -> None:
    """Check the dequantized weights against those of the writer in the tests, by torch and in native passes."""
    reference = load_file(expected.with_name(expected.name + ".numbers") / "model.safetensors")
    for name, found in numbers(folder).items():
        torch.testing.assert_close(found.double(), reference[name].double(), rtol=2**-22, atol=1e-12)
    tokens = [3, 1, 4]
    plain = Feeder(load_model(expected.with_name(expected.name + ".numbers"), dtype="float64")).feed_chunks(tokens, [3])
    exact = load_native(folder, dtype="float32", rounding=Rounding(activations="fp32"))
    for model, bound in (
        (load_model(folder, dtype="float64"), 2e-5),
        (exact, 2e-5),
        (load_native(folder, dtype="float32"), 1e-3),  # activations are rounded to 16 bits
    ):
        assert (Feeder(model).feed_chunks(tokens, [3]) - plain).abs().max() < bound * plain.abs().max()


@pytest.mark.parametrize("sym", [True, None], ids=["sym", "no sym"])
@pytest.mark.parametrize("name", [*VERSIONS, None])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_symmetric_codes_tell_their_version(
    bits: int, version: str, name: str | None, sym: bool | None, source: Path, tmp_path: Path, caplog: Any
) -> None:
    """Check that zero points of symmetric codes tell the version: 7 or 127 is the first one, 8 or 128 the second,
    whatever name the file gives."""
    path = gptq(source, tmp_path / "model", bits=bits, version=version, checkpoint_format=name, sym=True)
    if sym is None:
        config = json.loads((path / "config.json").read_text())["quantization_config"]
        edit_json(path / "config.json", quantization_config={k: v for k, v in config.items() if k != "sym"})
    with caplog.at_level(logging.WARNING, "specrs"):
        assert_right(path, path)
    wrong = version != (name or "gptq")
    assert caplog.text.count("zero points are") == wrong


@pytest.mark.parametrize("version", VERSIONS)
def test_the_name_decides_where_codes_are_not_symmetric(
    version: str, source: Path, tmp_path: Path, caplog: Any
) -> None:
    path = gptq(source, tmp_path / "model", version=version, checkpoint_format=version, sym=False)
    with caplog.at_level(logging.WARNING, "specrs"):
        assert_right(path, path)
        assert not caplog.text
        config = json.loads((path / "config.json").read_text())["quantization_config"]
        edit_json(path / "config.json", quantization_config=config | {"sym": True})
        assert_right(path, path)
    assert "sym=true, but zero points are from" in caplog.text


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json"])
def test_the_quantizer_s_own_file_alone(file: str, source: Path, tmp_path: Path) -> None:
    """Check checkpoints that have only the quantizer's own file: AutoGPTQ and AutoAWQ used their own names for fields
    and the weights' file."""
    if file == "quantize_config.json":
        path = gptq(source, tmp_path / "model", group=32)
        content: dict[str, Any] = {
            "bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
            "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "gptq_model-4bit-32g",
        }  # fmt: skip
        (path / "model.safetensors").rename(path / "gptq_model-4bit-32g.safetensors")
    else:
        path = awq(source, tmp_path / "model", group=32)
        content = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    edit_json(path / "config.json", remove=("quantization_config",))
    with pytest.raises(CheckpointError, match=r"_proj\.weight.* missing"):
        load_model(path)
    (path / file).write_text(json.dumps(content))
    assert_right(path, path)
    assert method_of(str(path), None) == ("gptq" if file == "quantize_config.json" else "awq")
    (path / file).write_text(json.dumps(content | {"bits": 3, "w_bit": 3}))
    with pytest.raises(UnsupportedModelError, match=r"bits=3: not implemented; allowed: 4"):
        load_config(path)


def test_config_json_comes_before_the_file(source: Path, tmp_path: Path) -> None:
    path = gptq(source, tmp_path / "model")
    (path / "quantize_config.json").write_text(json.dumps({"bits": 8, "group_size": 64}))
    assert_right(path, path)


def test_dynamic_without_a_layer(source: Path, tmp_path: Path) -> None:
    path = gptq(source, tmp_path / "model", dynamic={"-:lm_head": {}})
    assert_right(path, path)
    skipped = gptq(source, tmp_path / "skipped", dynamic={r"-:.*\.(down|k)_proj$": {}})
    kept = {
        name: t
        for name, t in load_file(source / "model.safetensors").items()
        if "down_proj" in name or "k_proj" in name
    }
    for folder in (skipped, skipped.with_name("skipped.numbers")):
        tensors = load_file(folder / "model.safetensors")
        layers = tuple(name.removesuffix("weight") for name in kept)
        tensors = {name: value for name, value in tensors.items() if not name.startswith(layers)} | kept
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_right(skipped, skipped)


def test_dynamic_of_other_bits(source: Path, tmp_path: Path) -> None:
    """Check `dynamic` with other bits: the first rule that matches counts, with `+:` or without."""
    dynamic = {r"+:.*up_proj": {"bits": 8, "group_size": 64}, ".*(up|gate)_proj": {"bits": 8, "group_size": 16}}
    path = gptq(source, tmp_path / "model", group=32, dynamic=dynamic)
    for bits, group, part in ((8, 64, ".up_proj"), (8, 16, ".gate_proj")):
        other = gptq(source, tmp_path / part, bits=bits, group=group)
        for suffix in ("", ".numbers"):
            mine, its = (folder.with_name(folder.name + suffix) / "model.safetensors" for folder in (path, other))
            rest = {name: value for name, value in load_file(mine).items() if part not in name}
            save_file(rest | {n: v for n, v in load_file(its).items() if part in n}, mine, metadata={"format": "pt"})
    assert_right(path, path)


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ([], r"dynamic=\[\]: must be an object of patterns"),
        ({"-:(": {}}, r"dynamic='-:\(': must be a regular expression after '-:' or '\+:'"),
        ({"a": 1}, r"dynamic\['a'\]=1: must be an object of fields"),
        ({"a": {"pack_dtype": "int16"}}, r"dynamic\['a'\]\.pack_dtype='int16': not implemented; allowed: not there"),
        ({"a": {"bits": 3}}, r"bits=3: not implemented; allowed: 4 or 8"),
        ({"a": {"group_size": 0}}, r"group_size=0: must be an integer of at least 1"),
    ],
)
def test_dynamic_that_is_rejected(dynamic: Any, message: str, source: Path, tmp_path: Path) -> None:
    path = gptq(source, tmp_path / "model", dynamic=dynamic)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        load_config(path)
