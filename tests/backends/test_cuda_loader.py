"""The CUDA backend loads checkpoints, with the CPU's memory in place of a GPU's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from assistant_reference import make_assistant
from checkpoints import make_checkpoint, make_eagle3, make_gemma4
from gguf_files import write_gguf
from mtp_reference import add_head
from quantized_files import fp8_block, gptq
from specrs.backends.cuda.products import is_dequantized
from specrs.backends.model_source import ModelSource
from specrs.backends.table import BACKENDS
from specrs.config import EngineConfig
from specrs.drafters.assistant.files import open_assistant
from specrs.drafters.assistant.torch_loader import TorchAssistant
from specrs.drafters.mtp.files import open_mtp
from specrs.drafters.mtp.head import MtpHead
from specrs.errors import UnsupportedConfigError, UnsupportedModelError
from specrs.kernels.coding import Coding
from specrs.kernels.cuda.device import DeviceLimits
from specrs.kernels.cuda.scaled_linear import serves
from specrs.kernels.kv_scales import KVScales
from specrs.kernels.linear import DenseWeight
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.torch_arrays import to_torch
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import load_model
from specrs.speculative_config import SpeculativeConfig


def load(folder: Path, **fields: Any) -> TorchDecoder:
    config = EngineConfig(model=str(folder), device="cuda", **fields)
    made = BACKENDS["cuda"].load_model(ModelSource.of_target(config), "cpu", None)
    assert isinstance(made, TorchDecoder)
    return made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader") / "plain"
    return make_checkpoint(folder, layers=1, hidden=128, intermediate=128, dtype=torch.bfloat16, with_tokenizer=False)


def test_the_dtype_is_the_checkpoints(plain: Path) -> None:
    weights = load(plain).weights
    assert weights.dtype == torch.bfloat16
    assert isinstance(weights.layers[0].qkv, DenseWeight)
    assert load(plain, kv_cache_dtype="fp8").weights.cache_dtype == torch.float8_e4m3fn


def test_quantized_weights_stay_quantized(plain: Path, tmp_path: Path) -> None:
    (layer,) = load(gptq(plain, tmp_path / "gptq")).weights.layers
    (at_load,) = load(plain, quantization="int8").weights.layers
    for w in (layer, at_load):
        assert all(isinstance(part, QuantizedWeight) for part in (w.qkv, w.o, w.gate_up, w.down))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_draft_in_fp8_rounds_rows_of_wide_passes(plain: Path, dtype: str) -> None:
    """Check that a draft model in FP8 rounds rows of wide passes to FP8, but not with float16, whose products do not
    run on FP8 tensor cores. The target and drafts in other formats round no rows."""
    for quantization in ("fp8", "int8", None):
        speculative = SpeculativeConfig(model=str(plain), quantization=quantization, num_speculative_tokens=2)
        config = EngineConfig(model=str(plain), device="cuda", quantization="fp8", speculative_config=speculative)
        sources = [ModelSource.of_draft(config, dtype), ModelSource.of_target(config)]
        (draft,), (target,) = (BACKENDS["cuda"].load_model(source, "cpu", None).weights.layers for source in sources)
        for name in ("qkv", "o", "gate_up", "down"):
            held, w = getattr(draft, name), getattr(target, name)
            rounds = isinstance(held, QuantizedWeight) and held.fp8_wide_rows
            assert rounds == (quantization == "fp8" and dtype == "bfloat16")
            assert isinstance(held, QuantizedWeight) == (quantization is not None)
            assert not getattr(held, "fp8_rows", False)
            assert not w.fp8_rows
            assert not w.fp8_wide_rows


CODED = {
    "Q8_0": Coding("int8", 32),
    "Q4_0": Coding("int4", 32),
    "Q5_0": Coding("int8", 32),
    "Q3_K": Coding("int4", 16),
    "Q6_K": Coding("int8", 16),
    "IQ4_NL": Coding("int8", 32),
    "IQ4_XS": Coding("int8", 32),
    "MXFP4": Coding("mxfp4", 32),
    "Q4_1": Coding("int4", 32, minima="pairs"),
    "Q5_1": Coding("int8", 32, minima="pairs"),
    "Q2_K": Coding("int4", 16, minima="blocks"),
    "Q4_K": Coding("int4", 32, minima="blocks"),
    "Q5_K": Coding("int8", 32, minima="blocks"),
    "TQ2_0": None,
    "BF16": None,
}
"""Format in which a GPU holds projections, by the type in a GGUF file. None: dequantized to 16 bits."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a checkpoint whose matrices have rows of whole blocks of 256 inputs."""
    folder = tmp_path_factory.mktemp("wide") / "wide"
    sizes: dict[str, Any] = {"layers": 1, "hidden": 256, "intermediate": 256, "head_dim": 64, "kv_heads": 2}
    return make_checkpoint(folder, "llama", initializer_range=0.05, vocab=61, with_tokenizer=False, **sizes)


@pytest.mark.parametrize("kind", CODED)
def test_gguf_files(kind: str, wide: Path, tmp_path: Path) -> None:
    """Check that weights are those of the file: exactly if they stay quantized, otherwise rounded once to 16 bits. The
    file's numbers are rounded to fp32, which matters only with minima."""
    path = write_gguf(wide, tmp_path / "model.gguf", kind)
    weights = load(path).weights
    exact = load_model(path, dtype="float64").weights
    assert weights.dtype == torch.bfloat16
    (layer,), (numbers,) = weights.layers, exact.layers
    for name in ("qkv", "o", "gate_up", "down"):
        found, expected = getattr(layer, name), getattr(numbers, name).dequantized()
        if CODED[kind] is None:
            assert isinstance(found, DenseWeight)
            assert torch.equal(found.weight, expected.bfloat16())
        else:
            assert found.coding == CODED[kind]
            assert torch.equal(found.dequantized().float(), expected.float())
    assert isinstance(weights.lm_head, DenseWeight)
    assert torch.equal(weights.lm_head.weight, exact.lm_head.dequantized().bfloat16())


@pytest.mark.parametrize("kind", ["Q6_K", "Q5_K", "Q3_K", "Q8_0"])
def test_projections_of_several_types(kind: str, wide: Path, tmp_path: Path) -> None:
    """Check a file whose v has another type than q and k, as in Q4_K_M: they stay quantized together with the numbers
    of the file if both types have super-blocks. Otherwise they are dequantized."""
    path = write_gguf(wide, tmp_path / "model.gguf", "Q4_K", kinds={"attn_v": kind})
    (layer,), (numbers,) = load(path).weights.layers, load_model(path, dtype="float64").weights.layers
    expected = numbers.qkv.dequantized()
    if kind == "Q8_0":
        assert isinstance(layer.qkv, DenseWeight)
        assert torch.equal(layer.qkv.weight, expected.bfloat16())
        return
    assert isinstance(layer.qkv, QuantizedWeight)
    assert layer.qkv.coding == Coding("int8", 32 if kind == "Q5_K" else 16, minima="blocks")
    assert torch.equal(layer.qkv.dequantized().float(), expected.float())


@pytest.mark.parametrize(("counts", "ids"), [(False, [0, 1, 2]), (True, [1, 5, 60])])
def test_mtp_heads(counts: bool, ids: list[int], tmp_path: Path) -> None:
    """Check that a head has the target's embedding, and its first ids a view of the target's LM head."""
    path = add_head(make_checkpoint(tmp_path / "target", "qwen3_5_text", vocab=61, dtype=torch.bfloat16))
    file = tmp_path / "counts.json"
    file.write_text('{"1": 3, "5": 2, "60": 9}')
    target = load(path)
    files = open_mtp(str(path), target, revision=None, size=3, counts=str(file) if counts else None)
    head = BACKENDS["cuda"].load_head(files, target, None)
    assert isinstance(head, MtpHead)
    own, theirs = head.weights.decoder.lm_head, target.weights.lm_head
    assert isinstance(own, DenseWeight)
    assert isinstance(theirs, DenseWeight)
    assert head.weights.dtype == torch.bfloat16
    assert own.weight.dtype == theirs.weight.dtype
    assert head.weights.decoder.embedding is target.weights.embedding
    assert head.target_ids.tolist() == ids
    assert torch.equal(own.weight, theirs.weight[ids])
    assert (own.weight.data_ptr() == theirs.weight.data_ptr()) != counts


@pytest.mark.parametrize(("size", "cache"), [(None, "auto"), (3, "fp8_e4m3")])
def test_assistants(size: int | None, cache: str, tmp_path: Path) -> None:
    """Check that an assistant has the target's embedding, dtypes and scales of K and V, and its own LM head."""
    path = make_gemma4(tmp_path / "target", dtype=torch.bfloat16)
    own = make_assistant(tmp_path / "assistant", path, dtype=torch.bfloat16)
    target = load(path, kv_cache_dtype=cache)
    layers = (replace(layer, kv_scales=KVScales(1.0 + i, 2.0)) for i, layer in enumerate(target.weights.layers))
    target = replace(target, weights=replace(target.weights, layers=tuple(layers)))
    files = open_assistant(str(own), target, revision=None, size=size, counts=None)
    assistant = BACKENDS["cuda"].load_head(files, target, None)
    assert isinstance(assistant, TorchAssistant)
    decoder, theirs = assistant.weights.decoder, target.weights
    assert decoder.embedding is theirs.embedding
    assert decoder.dtype == torch.bfloat16
    assert assistant.cache_dtype == target.cache_dtype
    assert [layer.kv_scales for layer in decoder.layers] == [theirs.layers[i].kv_scales for i in files.config.sources]
    assert isinstance(decoder.lm_head, DenseWeight)
    rows = files.tensors.mapped("model.embed_tokens.weight")[:size]
    assert torch.equal(decoder.lm_head.weight, to_torch(rows))
    assert assistant.target_ids.tolist() == list(range(size or 61))


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen3", {}, "^head_dim=48: the GPU kernels serve 64, .*; allowed: device='cpu'"),
        ("qwen3_5_text", {"head_dim": 64, "linear_value_head_dim": 136}, "^linear_value_head_dim=136: the GPU kernels"),
    ],
)
def test_models_that_no_kernel_serves(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that targets and draft models are rejected before weights are loaded and before their sizes are compared
    with the GPU's memory."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (0, 0))
    own = str(make_checkpoint(tmp_path / "own", family, with_tokenizer=False, **fields))
    served = str(make_checkpoint(tmp_path / "served", head_dim=64, with_tokenizer=False))
    pairs = [(own, served), (served, own)]
    for target, draft in pairs[:1] if family == "qwen3_5_text" else pairs:
        speculative = SpeculativeConfig(model=draft, num_speculative_tokens=2)
        config = EngineConfig(model=target, device="cuda", speculative_config=speculative)
        with pytest.raises(UnsupportedModelError, match=message):
            BACKENDS["cuda"].check_config(config, "cuda:0", None)


def test_a_head_that_no_kernel_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that an EAGLE-3 head is rejected before weights are loaded and before sizes are compared with memory."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (0, 0))
    target = make_checkpoint(tmp_path / "target", head_dim=64, with_tokenizer=False)
    for layout in ("llama", "speculators"):
        head = make_eagle3(tmp_path / layout, target, layout, head_dim=24)
        speculative = SpeculativeConfig(method="eagle3", model=str(head), num_speculative_tokens=2)
        config = EngineConfig(model=str(target), device="cuda", speculative_config=speculative)
        with pytest.raises(
            UnsupportedModelError, match=r"head_dim=24: the GPU kernels serve .*; allowed: device='cpu'"
        ):
            BACKENDS["cuda"].check_config(config, "cuda:0", None)


def test_rows_in_fp8_need_weights_in_fp8(plain: Path, tmp_path: Path) -> None:
    (layer,) = load(fp8_block(plain, tmp_path / "fp8"), cuda_fp8_rows=True).weights.layers
    assert isinstance(layer.qkv, QuantizedWeight)
    assert layer.qkv.fp8_rows
    with pytest.raises(UnsupportedConfigError, match=r"^cuda_fp8_rows=True: .*plain has no FP8 weights here"):
        load(plain, cuda_fp8_rows=True)


def test_many_rows_dequantize_all_but_weights_that_are_multiplied_as_fp8(plain: Path, tmp_path: Path) -> None:
    """Check for which weights passes with prompt chunks take few rows. FP8 in blocks of 128 needs sm_90."""
    fp8 = fp8_block(plain, tmp_path / "fp8")
    hopper, ada = DeviceLimits("", 90, 132, 227 * 1024), DeviceLimits("", 89, 128, 99 * 1024)
    for folder, fields, limits, expected in (
        (plain, {}, hopper, False),
        (gptq(plain, tmp_path / "int4"), {}, hopper, True),
        (fp8, {}, hopper, True),
        (fp8, {"cuda_fp8_rows": True}, ada, True),
    ):
        (layer,) = load(folder, **fields).weights.layers
        assert is_dequantized(layer.gate_up, limits) == expected
    (layer,) = load(fp8, cuda_fp8_rows=True).weights.layers
    assert is_dequantized(layer.gate_up, hopper) != serves(layer.gate_up, hopper)
