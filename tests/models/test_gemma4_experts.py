"""Gemma 4 with experts next to its MLP: transformers' logits by torch and natively, in
every weight format, and mistakes that would show."""

from __future__ import annotations

import functools
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quantized_files
import torch
from checkpoints import GEMMA4, edit_json, make_gemma4
from gemma4_reference import float64, logits
from safetensors.torch import load_file, save_file
from specrs.backends.cpu.weights import Rounding, load_native
from specrs.core import CpuPool
from specrs.errors import CheckpointError, UnsupportedModelError
from specrs.models import torch_decoder
from specrs.models.config import parse_config
from specrs.models.loader import load_config
from specrs.models.native_decoder import NativeDecoder
from specrs.models.tensors import PARALLEL_NORMS, tensor_shapes
from specrs.models.torch_loader import load_model, open_model
from torch import Tensor

from models.harness import Feeder

VARIANTS = [name for name in GEMMA4 if "experts" in name]
TOKENS = random.Random(7).choices(range(61), k=40)
BOUND = 2e-5
"""Largest difference of native logits from those in float64, relative to the largest logit."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemma4_experts")


@functools.cache
def make(folder: Path, variant: str) -> Path:
    return make_gemma4(folder / variant.replace(" ", "_"), variant)


@functools.cache
def reference(path: Path) -> Tensor:
    return logits(path, TOKENS)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest logit."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def fed(model: Any, chunks: list[int] | None = None) -> Tensor:
    return Feeder(model, block_size=4, max_len=44).feed_chunks(TOKENS, chunks or [len(TOKENS)])


def by_torch(path: Path, **options: Any) -> Tensor:
    with float64():
        return fed(load_model(path, dtype="float64", **options))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_logits(folder: Path, variant: str, dtype: str, tmp_path: Path) -> None:
    """Check native logits against float64. One thread and several give the same bits. With dtype bfloat16, K and V are
    bf16."""
    path = make_gemma4(tmp_path / "model", variant, dtype=getattr(torch, dtype))
    model = load_native(path, dtype=dtype)
    found = fed(model, [1, 2, 37])
    expected = logits(path, TOKENS)
    if dtype == "float32":
        assert difference(found, expected) < BOUND
    else:  # with K and V rounded to bf16, a row may be sent to other experts than in float64
        assert (found.double() - expected).abs().median() < 0.1 * expected.abs().max()
    for threads in (2, 3):
        assert torch.equal(fed(model.on_pool(CpuPool(threads)), [9, 31]), found)


def test_rows_rounded_to_bf16_have_one_order_of_sums(tmp_path: Path) -> None:
    """Check that rows rounded to bf16 give the same bits for any chunks."""
    path = make_gemma4(tmp_path / "model", "gemma4, experts", dtype=torch.bfloat16)
    model = load_native(path, dtype="bfloat16").on_pool(CpuPool(2), activations="bf16")
    whole = fed(model)
    assert torch.equal(fed(model, [1, 8, 31]), whole)


WIDE = {"hidden": 256, "intermediate": 256, "moe_intermediate_size": 256, "layers": 3}
WIDE |= {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
"""Sizes of which blocks of 256 inputs can be made."""


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4", "q8_0", "q4_0", "q4_k"])
def test_weights_quantized_at_load(folder: Path, quantization: str, tmp_path: Path) -> None:
    """Compare with torch on the dequantized weights, with activations in fp32 and rounded to 16-bit integers."""
    path = make(folder, "gemma4, experts")
    if quantization == "q4_k":
        path = make_gemma4(tmp_path / "wide", "gemma4, experts", **WIDE)
    expected = by_torch(path, quantization=quantization)
    for activations, bound in (("fp32", 1e-4), ("auto", 0.02)):
        model = load_native(path, quantization=quantization, rounding=Rounding(activations=activations))
        assert difference(fed(model, [4, 1, 35]), expected) < (0.03 if quantization == "fp8" else bound), activations
    tensors = open_model(path, None, "auto", None, quantization)[1]
    quantized = {name.removeprefix("model.layers.0.") for name in tensor_shapes(load_config(path)) if ".0." in name}
    quantized = {name for name in quantized if tensors.is_quantized(f"model.layers.0.{name}")}
    assert {"mlp.gate_proj.weight", "experts.0.up_proj.weight", "experts.4.down_proj.weight"} <= quantized
    assert not any("router" in name or "norm" in name for name in quantized)
    assert difference(by_torch(path), expected) > 1e-3


def apart(source: Path, path: Path) -> Path:
    """Write a checkpoint whose experts have a tensor for each projection, as quantized files have them."""
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = tensor
            continue
        stem, _, kind = name.rpartition(".")
        for i, of_expert in enumerate(tensor):
            gate, up = of_expert.chunk(2)
            parts = {"gate": gate, "up": up} if kind == "gate_up_proj" else {"down": of_expert}
            tensors |= {f"{stem}.{i}.{part}_proj.weight": own.contiguous() for part, own in parts.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_experts_with_tensors_of_their_own_are_the_same(folder: Path, tmp_path: Path) -> None:
    path = make(folder, "gemma4, experts")
    found = apart(path, tmp_path / "apart")
    assert torch.equal(by_torch(found), by_torch(path))
    assert torch.equal(fed(load_native(found)), fed(load_native(path)))


@pytest.mark.parametrize("write", [quantized_files.fp8_block, quantized_files.gptq, quantized_files.awq])
def test_quantized_checkpoints(folder: Path, write: Callable[..., Path], tmp_path: Path) -> None:
    """Check that quantized checkpoints give the logits of their dequantized weights."""
    source = apart(make(folder, "gemma4, experts"), tmp_path / "apart")
    sizes: dict[str, Any] = {"block": (32, 32)} if write is quantized_files.fp8_block else {"group": 32}
    # Names of projections that quantizers leave as they are.
    if write is quantized_files.gptq:
        sizes["dynamic"] = {r"-:.*\.router\.": {}}
    elif write is quantized_files.awq:
        sizes["modules_to_not_convert"] = ["router"]
    else:
        sizes["modules_to_not_convert"] = ["router", "model.layers.0.mlp.down_proj"]
    path = write(source, tmp_path / "quantized", **sizes)
    expected = by_torch(tmp_path / "quantized.numbers")
    assert difference(by_torch(path), expected) < 1e-5
    assert difference(fed(load_native(path)), expected) < 0.02


def of_experts(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that changes the experts of each layer of a model's weights."""

    def changed(w: Any) -> Any:
        return replace(w, layers=tuple(replace(layer, experts=change(layer.experts)) for layer in w.layers))

    return changed


def _swapped(e: Any) -> Any:
    """Plant a mistake: exchange the output norms of the MLP and the experts."""
    norms = e.norms
    return replace(e, norms=replace(norms, mlp_output=norms.expert_output, expert_output=norms.mlp_output))


def _norm_of_the_mlp(w: Any) -> Any:
    """Plant a mistake: experts read the MLP's input."""
    layers = [
        replace(o, experts=replace(o.experts, norms=replace(o.experts.norms, expert_input=o.post_attention_norm)))
        for o in w.layers
    ]
    return replace(w, layers=tuple(layers))


def _scales(e: Any, **changed: Any) -> Any:
    return replace(
        e, scales=replace(e.scales, **{name: change(getattr(e.scales, name)) for name, change in changed.items()})
    )


# Weights of chosen experts that do not add up to 1 would not show: the norm after the experts takes out a factor.
MISTAKES: dict[str, Callable[[Any], Any]] = {
    "no factor of the router": of_experts(lambda e: _scales(e, hidden=lambda x: x * 0 + 1)),
    "no root of the router's inputs": of_experts(lambda e: _scales(e, hidden=lambda x: x * 8)),
    "no factors of experts": of_experts(lambda e: _scales(e, experts=lambda x: x * 0 + 1)),
    "factors of the neighbour": of_experts(lambda e: _scales(e, experts=lambda x: x[[1, 2, 3, 4, 0]])),
    "the router reads what experts read": of_experts(lambda e: replace(e, scales=None)),
    "norms swapped": of_experts(_swapped),
    "no norm of the MLP": of_experts(
        lambda e: replace(e, norms=replace(e.norms, mlp_output=e.norms.mlp_output * 0 + 1))
    ),
    "no norm of experts": of_experts(
        lambda e: replace(e, norms=replace(e.norms, expert_output=e.norms.expert_output * 0 + 1))
    ),
    "experts read the MLP's input": _norm_of_the_mlp,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(folder: Path, mistake: str) -> None:
    path = make(folder, "gemma4, experts")
    with float64():
        model = load_model(path, dtype="float64")
        found = fed(replace(model, weights=MISTAKES[mistake](model.weights)))
    assert difference(found, reference(path)) > 100 * BOUND
    native = NativeDecoder(MISTAKES[mistake](load_native(path).weights))
    assert difference(fed(native), reference(path)) > 100 * BOUND


def test_experts_of_another_activation_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, mixture = make(folder, "gemma4, experts"), torch_decoder.mixture

    def with_silu(x: Tensor, weights: Any, experts: Any, _: Any, routed: Tensor, *others: Any) -> Tensor:
        return mixture(x, weights, experts, torch_decoder.silu_and_mul, routed, *others)

    monkeypatch.setattr(torch_decoder, "mixture", with_silu)
    assert difference(by_torch(path), reference(path)) > 100 * BOUND


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("router.proj.weight", (4, 64)),
        ("router.scale", (63,)),
        ("router.per_expert_scale", (6,)),
        ("experts.gate_up_proj", (5, 62, 64)),
        ("experts.gate_up_proj", (4, 64, 64)),
        ("experts.down_proj", (5, 64, 33)),
        ("mlp.gate_proj.weight", (95, 64)),
        *((f"{norm}.weight", (65,)) for norm in PARALLEL_NORMS),
    ],
)
def test_wrong_shapes_are_rejected_by_name(folder: Path, name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    path = make_gemma4(tmp_path / "model", "gemma4, experts", with_tokenizer=False)
    tensors = load_file(path / "model.safetensors")
    assert f"model.layers.1.{name}" in tensors
    stem = "experts" if name.startswith("experts") else re.escape(name.removesuffix(".weight"))
    for own, message in ((torch.zeros(shape), "has shape|is missing|are missing"), (None, "is missing|are missing")):
        changed = tensors | {f"model.layers.1.{name}": own}
        kept = {key: tensor for key, tensor in changed.items() if tensor is not None}
        save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=rf"layers\.1\.{stem}.*({message})|{message}.*layers\.1\.{stem}"):
            load_native(path)


@pytest.mark.parametrize("enabled", [False, True])
def test_experts_and_their_field_must_agree(folder: Path, enabled: bool, tmp_path: Path) -> None:
    path = make_gemma4(tmp_path / "model", "gemma4" if enabled else "gemma4, experts", with_tokenizer=False)
    sizes = {"num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 32}
    edit_json(path / "config.json", enable_moe_block=enabled, **sizes)
    message = "are missing" if enabled else "not part of this architecture"
    with pytest.raises(CheckpointError, match=message):
        load_native(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": None}, "num_experts=None: must be an integer"),
        ({"top_k_experts": None}, "top_k_experts=None: must be an integer"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size=0: must be an integer"),
        ({"top_k_experts": 6}, "top_k_experts=6: must be at most num_experts=5"),
        ({"enable_moe_block": "yes"}, "enable_moe_block='yes': must be true or false"),
        ({"num_local_experts": 4}, "num_local_experts=4: must be num_experts=5"),
    ],
)
def test_wrong_fields_are_named(folder: Path, fields: dict[str, Any], message: str) -> None:
    raw = json.loads((make(folder, "gemma4, experts") / "config.json").read_text(encoding="utf-8"))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        parse_config(raw | fields)


def test_a_model_of_the_published_size_has_the_weights_of_its_name() -> None:
    """Check the configuration of Gemma 4 26B-A4B: it has about 26 billion parameters, of which a token reads about 4
    billion."""
    config = parse_config(
        {
            "architectures": ["Gemma4ForCausalLM"],
            "vocab_size": 262144,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
            "sliding_window": 1024,
            "max_position_embeddings": 262144,
        }
    )
    total = sum(map(math.prod, tensor_shapes(config).values()))
    assert abs(total / 26e9 - 1) < 0.04
    assert abs(config.num_parameters / 1e9 - 4) < 0.4
    assert config.num_parameters_read(10**9) == pytest.approx(total, rel=1e-9)
