"""Engines with weights quantized at load: their text is that of the dequantized weights, at any K."""

from __future__ import annotations

import functools
import itertools
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, make_gemma4
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.harness import Feeder
from models.native_passes import numbers_of
from process_memory import status
from safetensors.torch import load_file, save_file
from specrs.arrays import FLOAT32, FLOAT64
from specrs.backends.cpu.weights import Rounding, load_native
from specrs.backends.cuda.loader import QuantizedLoader
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.core import PackedMatrix
from specrs.engine import weights as engine_weights
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.weights import load_weights
from specrs.errors import CheckpointError, UnsupportedConfigError
from specrs.kernels.coding import Coding
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.loader import open_checkpoint
from specrs.models.native_decoder import NativeDecoder
from specrs.models.quantization.at_load import quantized_at_load
from specrs.models.stored import PackedWeight, StackedWeight
from specrs.models.torch_decoder import TorchDecoder

from engine.harness import Bank, config, request, run
from engine.logits import LOGITS, logits_of, with_logits

KINDS = ("int8", "int4", "q8_0", "q4_0")
LARGEST = {"int8": 0.5 / 127, "int4": 0.5 / 7, "q8_0": 0.57 / 127, "q4_0": 1 / 8}
"""Largest error of a weight divided by the largest weight of its matrix, by quantization."""
BITS = {"int8": 8, "int4": 4, "q8_0": 8, "q4_0": 4}
FIRST = {"qkv": "self_attn.q_proj", "o": "self_attn.o_proj", "gate_up": "mlp.gate_proj", "down": "mlp.down_proj"}
"""Name in a checkpoint of the first matrix in each stacked weight of a layer."""


@functools.cache
def weights(target: Path, draft: Path | None, dtype: str, kind: str | None, draft_kind: str | None) -> Weights:
    """Load the weights once per pair and kind."""
    return load_weights(quantizing(config(target, draft, k=1, dtype=dtype), kind, draft_kind))


def quantizing(made: EngineConfig, kind: str | None, draft_kind: str | None = None) -> EngineConfig:
    speculative = made.speculative_config
    if speculative is not None:
        speculative = replace(speculative, quantization=draft_kind)
    return replace(made, quantization=kind, speculative_config=speculative)


def engine(
    target: Path, draft: Path | None, kind: str | None, draft_kind: str | None = None, **fields: object
) -> Engine:
    dtype = str(fields.pop("dtype", "float32"))
    made = quantizing(config(target, draft, dtype=dtype, **fields), kind, draft_kind)  # type: ignore[arg-type]
    return build_engine(made, weights(target, draft, dtype, kind, draft_kind))


@functools.cache
def alone(target: Path, prompt: tuple[int, ...], dtype: str, kind: str | None) -> tuple[np.ndarray, list[int]]:
    """Return logits and text of a prompt without drafts, in one chunk."""
    made = engine(target, None, kind, k=0, dtype=dtype, max_num_batched_tokens=512, **LOGITS)
    job = with_logits(0, list(prompt), 0, 0, 24)
    made.add_request(job)
    run(made)
    return logits_of(job), job.output_token_ids


@pytest.mark.parametrize("family", ["native_qwen_bank", "native_llama_bank"])
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_drafts_change_no_bit(family: str, data: st.DataObject, request_bank: dict[str, Bank]) -> None:
    """Check that text and logits at any K are those of K = 0, with any draft model."""
    bank = request_bank[family]
    kind, draft_kind = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from([None, *KINDS, "q4_k"]))
    draft = bank.drafts[data.draw(st.sampled_from(["close", "small", "equal"]))]
    k = data.draw(st.integers(1, 5))
    made = engine(
        bank.target,
        draft,
        kind,
        draft_kind,
        k=k,
        dtype=bank.dtype,
        max_num_batched_tokens=data.draw(st.sampled_from([17, 64, 512])),
        **LOGITS,
    )
    prompts = data.draw(st.lists(st.sampled_from([tuple(prompt) for prompt in bank.prompts]), min_size=1, max_size=4))
    jobs = [
        (
            with_logits(2 * i, list(prompt), k, k, 24),
            request(2 * i + 1, list(prompt), k=k, max_tokens=24, engine_k=k, ignore_eos=True),
        )
        for i, prompt in enumerate(prompts)
    ]
    # First steps that report nothing, then those that report logits.
    for which in (1, 0):
        for pair in jobs:
            made.add_request(pair[which])
        run(made)
    for prompt, (reporting, plain) in zip(prompts, jobs, strict=True):
        logits, text = alone(bank.target, prompt, bank.dtype, kind)
        assert plain.output_token_ids == reporting.output_token_ids == text
        assert np.array_equal(logits_of(reporting).view(np.int32), logits.view(np.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_model_is_the_model_of_its_numbers(kind: str, native_qwen_bank: Bank, tmp_path: Path) -> None:
    """Check that a checkpoint of the dequantized weights gives the same logits: to the bit with fp32 activations,
    within their rounding with 16-bit activations. The original weights give other logits."""
    target, prompt = native_qwen_bank.target, tuple(native_qwen_bank.prompts[4])
    folder = tmp_path / "numbers"
    shutil.copytree(target, folder)
    tensors = load_file(folder / "model.safetensors")
    made = load_native(target, dtype="float32", quantization=kind)
    for i, layer in enumerate(made.weights.layers):
        for weight, names in (
            (layer.qkv, [f"self_attn.{x}_proj" for x in "qkv"]),
            (layer.o, ["self_attn.o_proj"]),
            (layer.gate_up, ["mlp.gate_proj", "mlp.up_proj"]),
            (layer.down, ["mlp.down_proj"]),
        ):
            assert isinstance(weight, PackedWeight)
            for name, part in zip(names, weight.parts, strict=True):
                assert isinstance(part, PackedMatrix)
                full = f"model.layers.{i}.{name}.weight"
                made_of = torch.from_numpy(part.numbers())
                spread = (tensors[full] - made_of).abs().max() / tensors[full].abs().max()
                assert 0 < spread <= LARGEST[kind] * (1 + 1 / 128)
                tensors[full] = made_of
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def logits(path: Path, quantization: str | None, activations: str) -> torch.Tensor:
        rounding = Rounding(activations=activations)
        model = load_native(path, dtype="float32", quantization=quantization, rounding=rounding)
        return Feeder(model).feed_chunks(list(prompt), [len(prompt)])

    numbers = logits(folder, None, "fp32")
    assert torch.equal(logits(target, kind, "fp32"), numbers)
    size = numbers.abs().max()
    assert 0 < (logits(target, kind, "auto") - numbers).abs().max() < 1e-3 * size
    assert (logits(target, None, "fp32") - numbers).abs().max() > 1e-2 * size


def test_what_is_quantized(native_qwen_bank: Bank) -> None:
    """Check which weights are quantized: the projections of the target's layers, and on request those of the draft's;
    not embedding and LM head."""
    bank = native_qwen_bank
    for kind, draft_kind in (("int8", None), ("int4", "int8"), ("q4_0", "q8_0"), (None, "int4")):
        made = weights(bank.target, bank.drafts["small"], "float32", kind, draft_kind)
        for model, its in zip(made.models, (kind, draft_kind), strict=True):
            assert isinstance(model, NativeDecoder)
            assert model.dtype == FLOAT32, "of the KV cache"
            w = model.weights
            assert isinstance(w.lm_head, StackedWeight)
            assert w.embedding.dtype == FLOAT32
            for layer in w.layers:
                for weight in (layer.qkv, layer.o, layer.gate_up, layer.down):
                    assert isinstance(weight, StackedWeight if its is None else PackedWeight)
                    if isinstance(weight, PackedWeight):
                        kinds = {part.kind for part in weight.parts if isinstance(part, PackedMatrix)}
                        assert its is not None
                        assert kinds == {its.upper()}


def test_groups_are_the_largest_that_divide(tmp_path: Path) -> None:
    folder = make_checkpoint(
        tmp_path / "wide", hidden=128, intermediate=192, head_dim=16, layers=1, with_tokenizer=False
    )
    (layer,) = load_native(folder, quantization="int4").weights.layers
    for weight, size, group in ((layer.qkv, 128, 128), (layer.o, 96, 32), (layer.down, 192, 64)):
        assert isinstance(weight, PackedWeight)
        assert weight.shape[1] == size
        for part in weight.parts:
            outputs = -(-part.shape[0] // 16) * 16
            assert part.nbytes == outputs * (size // 2 + 2 * size // group)


@pytest.mark.parametrize("kind", KINDS)
def test_memory(kind: str, tmp_path: Path) -> None:
    """Check memory: loading makes no copy of the model but its quantized weights, and afterwards the file is not
    mapped."""
    folder = make_checkpoint(
        tmp_path / "large", hidden=512, intermediate=3072, layers=6, dtype=torch.bfloat16, with_tokenizer=False
    )
    file = (folder / "model.safetensors").stat().st_size
    matrices = 6 * (512 * 288 * 2 + 2 * 512 * 144 + 3 * 512 * 3072)
    load_native(folder, quantization=kind, load_format="dummy")  # what libraries take the first time
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, anonymous = status("VmRSS"), status("RssAnon")
    model = load_native(folder, dtype="float32", quantization=kind)
    codes = matrices * BITS[kind] // 8
    kept = model.weights.embedding.nbytes
    num_bytes = model.num_bytes - model.weights.lm_head.num_bytes
    assert codes < num_bytes <= codes * {"int8": 1.01, "int4": 1.13, "q8_0": 1.08, "q4_0": 1.15}[kind]
    slack = 12 << 20
    assert 2 * matrices > codes + slack, "a copy in bf16 would show"
    assert status("VmHWM") - before < file + codes + kept + slack
    assert status("RssAnon") - anonymous < codes + kept + slack
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "broken", layers=1, with_tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    name = r"model\.layers\.0\.mlp\.up_proj\.weight"
    with pytest.raises(CheckpointError, match=rf"broken: {name} cannot be quantized: {name}\[3, 5\]=NaN: must be"):
        load_native(folder, quantization="int8")


@pytest.mark.parametrize(
    ("kind", "value"),
    [("q4_0", torch.nan), ("q4_0", torch.inf), ("q4_0", 6e5), ("q8_0", 9e6), ("q4_k", torch.nan), ("q4_k", 5e6)],
)
def test_a_weight_that_no_block_holds_is_named(kind: str, value: float, tmp_path: Path) -> None:
    """Check the error for a weight that no block can hold: an eighth of the largest weight (a 127th with Q8_0, a 63rd
    with Q4_K) must be an fp16 number."""
    folder = make_checkpoint(tmp_path / "broken", layers=1, hidden=256, with_tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    reason = r"largest weight is (nan|inf|600000|[95]e\+06), and must be 0 or from .* to (524032|[48].*e\+06); use int8"
    name = r"model\.layers\.0\.mlp\.up_proj\.weight"
    with pytest.raises(CheckpointError, match=rf"broken: {name} cannot be quantized to Q._[0K]: its {reason}"):
        load_native(folder, quantization=kind)


def test_weights_that_fp16_scales_would_lose(tmp_path: Path) -> None:
    """Check weights that fp16 scales would lose: a matrix of tiny numbers is rejected with its name; a tiny block, or a
    matrix of zeros, becomes zeros."""
    folder = make_checkpoint(tmp_path / "tiny", layers=1, with_tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors["model.layers.0.mlp.gate_proj.weight"][:] = 0
    tensors[name][1, :32] *= 1e-30
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (layer,) = load_native(folder, quantization="q8_0").weights.layers
    gate, up = numbers_of(layer.gate_up)[: len(tensors[name])], numbers_of(layer.gate_up)[len(tensors[name]) :]
    assert not gate.any()
    assert not up[1, :32].any()
    assert up[1, 32:].any()
    tensors[name] *= 1e-6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=rf"{name} cannot be quantized to Q8_0: its largest weight is .*; use int8"
    ):
        load_native(folder, quantization="q8_0")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_checkpoints_of_other_types(dtype: torch.dtype, tmp_path: Path) -> None:
    """Check that float16 and float64 checkpoints are converted to float32 before quantizing, a matrix at a time."""
    made = []
    folder = make_checkpoint(tmp_path / "model", layers=1, with_tokenizer=False, dtype=dtype)
    for of in (dtype, torch.float32):
        tensors = {name: tensor.to(of) for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        made.append(numbers_of(load_native(folder, dtype="float32", quantization="int4").weights.layers[0].gate_up))
    assert np.array_equal(*made)


def test_log_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specrs")
    folder = make_checkpoint(tmp_path / "halved", layers=1, dtype=torch.bfloat16, with_tokenizer=False)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load_native(folder, dtype="float32", quantization="int8")
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"{folder}: embedding, LM head and routers are kept as bfloat16, which holds them exactly",
        f"{folder}: 7 matrices are packed, 0.00 GiB; 0 become float32 when they are loaded, 0.00 GiB",
    ]


def test_models_that_make_no_groups(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "odd", hidden=96, intermediate=168, layers=1, with_tokenizer=False)
    even = make_checkpoint(tmp_path / "even", layers=1, with_tokenizer=False)
    reason = r"odd has intermediate_size = 168, groups need a multiple of 32; allowed: None, 'fp8' or 'int8'"
    for kind in ("int4", "q8_0", "q4_0", "q4_k"):
        with pytest.raises(UnsupportedConfigError, match=rf"^quantization='{kind}': .*{reason}"):
            load_weights(EngineConfig(model=str(folder), device="cpu", quantization=kind))
    load_weights(EngineConfig(model=str(folder), device="cpu", quantization="int8"))
    speculative = {"model": str(folder), "num_speculative_tokens": 2, "quantization": "int4"}
    with pytest.raises(UnsupportedConfigError, match=rf"^speculative_config.quantization='int4': .*{reason}"):
        load_weights(EngineConfig(model=str(even), device="cpu", speculative_config=speculative))  # type: ignore[arg-type]


def test_experts_that_make_no_groups(tmp_path: Path) -> None:
    """Check the sizes of shared experts, and of an MLP next to experts, before weights are read."""
    sizes: dict[str, Any] = {"hidden": 64, "head_dim": 32, "kv_heads": 2, "with_tokenizer": False}
    fields = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 56}
    shared = make_checkpoint(tmp_path / "shared", "qwen3_5_moe_text", **sizes, **fields)
    mlp = make_gemma4(tmp_path / "mlp", "gemma4, experts", **sizes, intermediate=40)
    for folder, name in ((shared, "a shared expert's intermediate size = 56"), (mlp, "intermediate_size = 40")):
        (folder / "model.safetensors").write_bytes(b"")
        with pytest.raises(UnsupportedConfigError, match=rf"^quantization='int4': .* has {name}, groups need"):
            load_weights(EngineConfig(model=str(folder), device="cpu", quantization="int4"))


@pytest.mark.parametrize("kind", KINDS)
def test_other_passes_have_the_same_numbers(kind: str, tmp_path: Path) -> None:
    """Check that a float64 model and a GPU's quantized weights have the numbers of native passes. No INT4 format of a
    GPU fits 96 inputs, so those weights are INT8 there."""
    folder = make_checkpoint(
        tmp_path / "model", hidden=128, intermediate=96, layers=1, dtype=torch.float64, with_tokenizer=False
    )
    (native,) = load_native(folder, dtype="float32", quantization=kind).weights.layers
    made = load_weights(EngineConfig(model=str(folder), device="cpu", quantization=kind)).target
    assert isinstance(made, TorchDecoder)
    assert made.dtype == FLOAT64
    (plain,) = made.weights.layers
    config, checkpoint = open_checkpoint(folder, None, "auto")
    codes = quantized_at_load(checkpoint, kind)
    (quantized,) = QuantizedLoader(config, codes, torch.float32, torch.device("cpu")).load().layers
    for name in ("qkv", "o", "gate_up", "down"):
        numbers = torch.from_numpy(numbers_of(getattr(native, name)))
        assert torch.equal(getattr(plain, name).dequantized().double(), numbers)
        weight = getattr(quantized, name)
        assert isinstance(weight, QuantizedWeight)
        assert weight.coding.kind == ("int8" if name in ("o", "down") or BITS[kind] == 8 else "int4")
        assert codes.coding(f"model.layers.0.{FIRST[name]}.weight") == weight.coding
        assert torch.equal(weight.dequantized(), numbers)


def test_q4_k_is_for_inputs_that_make_super_blocks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Check that Q4_K is used only for inputs that fill super-blocks; other matrices become Q8_0, which is logged once
    per projection. A float64 model and a GPU have the same numbers."""
    folder = make_checkpoint(
        tmp_path / "mixed", hidden=256, intermediate=512, head_dim=32, layers=2, dtype=torch.float64,
        with_tokenizer=False,
    )  # fmt: skip
    caplog.set_level(logging.INFO, "specrs")
    layers = load_native(folder, dtype="float32", quantization="q4_k").weights.layers
    said = [record.getMessage() for record in caplog.records]
    size = layers[0].o.shape[1]
    assert size % 256
    reason = f"its {size} inputs are no multiple of 256"
    assert said == [
        f"{folder}: each o_proj.weight becomes Q8_0 in place of Q4_K: {reason}",
        f"{folder}: 14 matrices are packed, 0.00 GiB; 0 become float32 when they are loaded, 0.00 GiB",
    ]
    made = load_weights(EngineConfig(model=str(folder), device="cpu", quantization="q4_k")).target
    assert isinstance(made, TorchDecoder)
    config, checkpoint = open_checkpoint(folder, None, "auto")
    codes = quantized_at_load(checkpoint, "q4_k")
    quantized = QuantizedLoader(config, codes, torch.float32, torch.device("cpu")).load().layers
    for i, name in itertools.product((0, 1), ("qkv", "o", "gate_up", "down")):
        native = getattr(layers[i], name)
        assert isinstance(native, PackedWeight)
        kinds = {part.kind for part in native.parts if isinstance(part, PackedMatrix)}
        assert kinds == {"Q8_0" if name == "o" else "Q4_K"}
        numbers = torch.from_numpy(numbers_of(native))
        assert torch.equal(getattr(made.weights.layers[i], name).dequantized().double(), numbers)
        weight = getattr(quantized[i], name)
        assert isinstance(weight, QuantizedWeight)
        assert weight.coding == (Coding("int8", 32) if name == "o" else Coding("int4", 32, minima="blocks"))
        assert codes.coding(f"model.layers.{i}.{FIRST[name]}.weight") == weight.coding
        assert torch.equal(weight.dequantized().float(), numbers.float())


def test_what_a_gpu_cannot_group_is_rejected_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "odd", hidden=96, intermediate=168, layers=1, with_tokenizer=False)
    monkeypatch.setattr(engine_weights, "resolve_device", lambda _: "cuda:0")
    monkeypatch.setattr("specrs.backends.cuda.fit.check_weights_fit", lambda *_: None)
    with pytest.raises(UnsupportedConfigError, match=r"^quantization='int4': .*odd has intermediate_size = 168"):
        load_weights(EngineConfig(model=str(folder), quantization="int4"))
