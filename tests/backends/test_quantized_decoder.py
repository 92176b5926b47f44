"""The CUDA forward pass with quantized weights and FP8 activations, with interpreted kernels, against dequantized
weights in float64."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from gguf_files import write_gguf
from kernels.cuda.tolerance import assert_near
from models.cuda_models import Poisoned, outputs, span
from models.harness import Feeder
from quantized_files import awq, compressed, fp8_block, mxfp4
from specrs.backends.cuda import products, workspace
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.loader import QuantizedLoader
from specrs.kernels.coding import Coding
from specrs.kernels.cuda import scaled_linear
from specrs.kernels.cuda.device import DeviceLimits
from specrs.kernels.linear import DenseWeight
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.loader import open_checkpoint
from specrs.models.quantization.at_load import IntegersAtLoad, quantized_at_load
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.shards import Shard
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import load_model
from specrs.models.torch_weights import TorchLayer, TorchWeights, with_fp8_rows
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@pytest.mark.parametrize("name", ["fp8", "int4", "int8 at load", "int4 at load"])
def test_quantized_weights(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check passes over quantized weights, loaded as on a GPU: for few rows, for row counts whose products read the
    weights twice, and for more. In the FP8 checkpoint one projection is not quantized."""
    path, kind = folder / name, name.split()[0]
    source = folder / f"{name}-source"
    if not source.exists():
        make_checkpoint(
            source, "qwen2", tie=False, hidden=64, intermediate=64, kv_heads=1, group=2, head_dim=32,
            layers=1 + (name == "fp8"), vocab=83, dtype=torch.bfloat16,
        )  # fmt: skip
        if name == "fp8":
            fp8_block(source, path, block=(32, 32))
        elif name == "int4":
            awq(source, path)
    at_load = kind if name.endswith("at load") else None
    config, checkpoint = open_checkpoint(source if at_load else path, None, "auto")
    if at_load:
        checkpoint = IntegersAtLoad(checkpoint, kind)
    assert isinstance(checkpoint, QuantizedTensors)
    weights = QuantizedLoader(config, checkpoint, torch.float32, torch.device("cpu")).load()
    last = weights.layers[-1]
    assert all(isinstance(w, QuantizedWeight) for w in (last.qkv, last.o, last.gate_up, last.down))
    assert isinstance(last.gate_up, QuantizedWeight)
    codings = {"fp8": Coding("fp8", 32, 32), "int4": Coding("int4", 32, zeros=True)}
    codings |= {"int8 at load": Coding("int8", 64), "int4 at load": Coding("int4", 64)}
    assert last.gate_up.coding == codings[name]
    assert isinstance(weights.layers[0].down, QuantizedWeight) == (name != "fp8"), "listed among those not to convert"
    for module in (products, workspace):
        monkeypatch.setattr(module, "QUANTIZED_ROWS", 6)
    monkeypatch.setattr(workspace, "_NUMBERS_BYTES", 4 * 64 * 24)
    made = CudaDecoder.allocate(weights, max_rows=16, max_seqs=4)
    monkeypatch.setattr(products, "MAX_ROWS", 4)
    assert 0 < made.workspace.numbers.numel() < 64 * 64, "several pieces"

    def run(feeder: Feeder) -> list[Tensor]:
        return [feeder.feed({0: span(0, rows), 1: span(0, 1)}) for rows in (2, 5, 8)]

    numbers = source if at_load else path.with_name(path.name + ".numbers")
    exact = outputs(load_model(numbers, dtype="float64", quantization=at_load), run)
    plain = outputs(load_model(source if at_load else path, dtype="float32", quantization=at_load), run)
    assert_near(outputs(Poisoned(made.weights, made.workspace), run), exact, plain, ulps=16)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q4_1", "MXFP4"])
def test_gguf_files(folder: Path, kind: str) -> None:
    """Check that blocks of a GGUF file become quantized weights, and that a pass over them is near that of the file's
    numbers in float64."""
    source = folder / "gguf-source"
    if not source.exists():
        sizes: dict[str, Any] = {"hidden": 64, "intermediate": 64, "kv_heads": 1, "head_dim": 32, "layers": 1}
        make_checkpoint(source, "llama", tie=False, vocab=83, **sizes)
    path = write_gguf(source, folder / f"{kind}.gguf", kind)
    weights = loaded_quantized(path)
    assert isinstance(weights.layers[0].down, QuantizedWeight)
    made = CudaDecoder.allocate(weights, max_rows=16, max_seqs=4)

    def run(feeder: Feeder) -> list[Tensor]:
        return [feeder.feed({0: span(0, rows), 1: span(0, 1)}) for rows in (2, 7)]

    exact, plain = (outputs(load_model(path, dtype=dtype), run) for dtype in ("float64", "float32"))
    assert_near(outputs(Poisoned(made.weights, made.workspace), run), exact, plain, ulps=16)


def loaded_quantized(path: Path, dtype: torch.dtype = torch.float32) -> TorchWeights:
    """Load a checkpoint on the CPU with quantized weights as a GPU keeps them."""
    config, checkpoint = open_checkpoint(path, None, "auto")
    assert isinstance(checkpoint, QuantizedTensors)
    return QuantizedLoader(config, checkpoint, dtype, torch.device("cpu")).load()


@pytest.fixture(scope="session")
def fp8_weights(folder: Path) -> dict[str, TorchWeights]:
    """Return models of two layers in FP8 that also round activations, by their scales: `channel` (one for each output)
    and `block`."""
    source = make_checkpoint(
        folder / "fp8-rows", "qwen2", tie=False, hidden=64, intermediate=96, kv_heads=1, group=2, head_dim=32, vocab=83
    )
    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    paths = {"channel": compressed(source, folder / "fp8-rows-channel", "float-quantized", **args)}
    paths["block"] = fp8_block(source, folder / "fp8-rows-block", block=(32, 32))
    return {name: with_fp8_rows(loaded_quantized(path)) for name, path in paths.items()}


class Calls(list[tuple[Any, ...]]):
    """Records the arguments of `torch._scaled_mm`. Its calls return their own products, or those of `of`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        multiply = torch._scaled_mm if of is None else of

        def called(*args: Tensor, **kwargs: Any) -> Tensor:
            self.append(args)
            return multiply(*args, **kwargs)

        monkeypatch.setattr(torch, "_scaled_mm", called)


@pytest.mark.parametrize("name", ["channel", "block"])
def test_products_of_rows_in_fp8(
    fp8_weights: dict[str, TorchWeights], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check products of FP8 activations, with three sizes of passes, against float64 products of the rounded rows.
    Weights with a scale per output use torch's own `_scaled_mm`."""
    for module in (products, workspace):
        monkeypatch.setattr(module, "QUANTIZED_ROWS", 6)
    monkeypatch.setattr(products, "MAX_ROWS", 4)
    made = CudaDecoder.allocate(fp8_weights[name], max_rows=9, max_seqs=1)
    assert made.workspace.rounds_rows
    calls, layer = Calls(monkeypatch), made.weights.layers[1]
    for rows in (3, 5, 9):
        for product_of in ("qkv", "o", "gate_up", "down"):
            w = getattr(layer, product_of)
            x = torch.randn(rows, w.shape[1], generator=torch.Generator().manual_seed(rows))
            if product_of == "gate_up" and rows <= (4 if name == "channel" else 6):
                continue  # gated: see the passes
            out = torch.full((rows + 3, w.shape[0]), torch.nan)[:rows]
            Poisoned.poison(made)
            products.product(made.workspace, product_of, x, w, out)
            rounded, exact = w.multiplied(x.double()), scaled_linear.scaled_linear_reference(x, w)
            assert not torch.equal(rounded, x.double())
            off = 2 * (w.shape[1] + 2) * 2**-24 * (rounded.abs() @ w.dequantized().abs().t() + exact.abs())
            assert ((out.double() - exact).abs() <= off).all(), (product_of, rows)
    assert len(calls) == (8 if name == "channel" else 0)


@pytest.mark.parametrize("name", ["channel", "block"])
def test_passes_of_rows_in_fp8(
    fp8_weights: dict[str, TorchWeights], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that passes of few and of many rows round activations to FP8 as the eager model does. The difference is far
    below that of rounding at all. A row's bits do not depend on other rows."""
    made = CudaDecoder.allocate(fp8_weights[name], max_rows=16, max_seqs=4)
    cut = Poisoned(made.weights, made.workspace)
    eager, plain = TorchDecoder(made.weights), TorchDecoder(without_fp8_rows(made.weights))

    def run(feeder: Feeder) -> list[Tensor]:
        return [feeder.feed({0: span(0, 7), 1: span(0, 1)})]

    expected, changed = outputs(eager, run), outputs(plain, run)
    by_rounding, few = (expected - changed).abs().mean(), outputs(cut, run)
    assert torch.equal(few[:7], outputs(cut, lambda feeder: [feeder.feed({0: span(0, 7)})]))
    monkeypatch.setattr(products, "MAX_ROWS", 4)
    for found in (few, outputs(cut, run)):
        assert (found - expected).abs().mean() < by_rounding / 100


@pytest.mark.parametrize("name", ["channel", "block"])
def test_a_draft_rounds_rows_of_wide_passes_alone(
    fp8_weights: dict[str, TorchWeights], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of few rows have the bits of passes that round nothing. Passes of more rows round where the device has a
    product for the weights: near the eager model that rounds, far from the one that does not."""
    plain = without_fp8_rows(fp8_weights[name])
    draft = with_fp8_rows(plain, wide_only=True)
    assert with_fp8_rows(plain, wide_only=True).layers[0].qkv.shard(0, 0, 1).fp8_wide_rows  # type: ignore[union-attr]
    made = CudaDecoder.allocate(draft, max_rows=16, max_seqs=4)
    assert not made.workspace.rounds_rows
    unrounded = CudaDecoder.allocate(plain, max_rows=16, max_seqs=4)

    def run(feeder: Feeder) -> list[Tensor]:
        return [feeder.feed({0: span(0, 7), 1: span(0, 1)})]

    def passed(model: CudaDecoder) -> Tensor:
        return outputs(Poisoned(model.weights, model.workspace), run)

    calls = Calls(monkeypatch)
    assert torch.equal(passed(made), passed(unrounded))
    assert not calls
    monkeypatch.setattr(products, "MAX_ROWS", 4)
    wide = passed(made)
    if name == "block":
        assert torch.equal(wide, passed(unrounded)), "the interpreter has no product for blocks"
        return
    assert len(calls) == 4 * len(draft.layers)
    expected, other = outputs(TorchDecoder(fp8_weights[name]), run), outputs(TorchDecoder(plain), run)
    assert (wide - expected).abs().mean() < (expected - other).abs().mean() / 100


def without_fp8_rows(weights: TorchWeights) -> TorchWeights:
    def layer(w: TorchLayer) -> TorchLayer:
        names = ("qkv", "o", "gate_up", "down")
        quantized = {name: made for name in names if isinstance(made := getattr(w, name), QuantizedWeight)}
        return dataclasses.replace(
            w, **{name: dataclasses.replace(made, fp8_rows=False) for name, made in quantized.items()}
        )

    return dataclasses.replace(weights, layers=tuple(map(layer, weights.layers)))


def test_scales_by_block_as_cublas_reads_them(
    fp8_weights: dict[str, TorchWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the arguments of `_scaled_mm` on sm_90: torch's own check accepts them, and a multiplication by the layouts
    that cuBLAS documents gives the product. Rows are padded to a multiple of four."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 127, (256, 1024), generator=generator, dtype=torch.uint8)
    scales = torch.rand(2, 8, generator=generator) + 0.5
    weight = dataclasses.replace(QuantizedWeight.of(values, scales, Coding("fp8", 128, outputs=128)), fp8_rows=True)
    hopper = DeviceLimits("H100", 90, 132, 227 * 1024)
    monkeypatch.setattr(scaled_linear, "CUDA", (12, 9))
    assert scaled_linear.serves(weight, hopper)
    assert not scaled_linear.serves(weight, dataclasses.replace(hopper, capability=100))
    assert not scaled_linear.serves(weight, dataclasses.replace(hopper, capability=89))
    assert not scaled_linear.serves(quantized_zeros(Coding("fp8", 128, outputs=128), 256, 640), hopper), "5 blocks"
    assert not scaled_linear.serves(quantized_zeros(Coding("int8", 1024), 256, 1024), hopper)
    by_output = quantized_zeros(Coding("fp8", 1024), 256, 1024)
    served = [c for c in (80, 89, 90, 100, 120) if scaled_linear.serves(by_output, DeviceLimits("", c, 1, 1))]
    assert served == [89, 90, 100, 120]
    monkeypatch.setattr(scaled_linear, "CUDA", (12, 8))
    assert not scaled_linear.serves(weight, hopper)
    monkeypatch.setattr(scaled_linear, "CUDA", (12, 9))

    def multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, bias: None, **kwargs: Any) -> Tensor:
        assert (a.shape, scale_a.shape, scale_a.stride()) == ((12, 1024), (12, 8), (1, 12))
        assert (b.shape, b.stride()) == ((1024, 256), (1, 1024))
        assert (scale_b.shape, scale_b.stride()) == ((8, 2), (1, 8))
        left = a.double() * scale_a.double().repeat_interleave(128, 1)
        right = b.double() * scale_b.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        out: Tensor = kwargs["out"]
        assert out.shape == (12, 256)
        return out.copy_(left @ right)

    calls = Calls(monkeypatch, multiply)
    ws = dataclasses.replace(
        CudaDecoder.allocate(fp8_weights["block"], max_rows=16, max_seqs=1).workspace,
        limits=hopper,
        rounded=torch.zeros(16 * 1024),
        row_scales=torch.zeros(16 * 8),
    )
    x = torch.randn(10, 1024, generator=generator)
    out = torch.zeros(13, 256)
    products.wide_product(ws, "o", x, weight, out[:10])
    assert len(calls) == 1
    torch.testing.assert_close(out[:10].double(), weight.product(x.double()), rtol=1e-5, atol=1e-5)
    assert not out[12:].any()

    monkeypatch.undo()
    monkeypatch.setattr(scaled_linear, "CUDA", (12, 9))
    with FakeTensorMode():
        on_gpu = torch.empty(256, 512, dtype=torch.int16, device="cuda"), torch.empty(2, 8, device="cuda")
        held = QuantizedWeight(*on_gpu, weight.coding, fp8_rows=True)
        rows = torch.empty(13, 1024, dtype=torch.bfloat16, device="cuda")
        outs = torch.empty(13, 256, dtype=torch.bfloat16, device="cuda")
        fake = dataclasses.replace(
            ws,
            rounded=torch.empty(16 * 1024, dtype=torch.bfloat16, device="cuda"),
            row_scales=torch.empty(16 * 8, device="cuda"),
        )
        products.wide_product(fake, "o", rows[:10], held, outs[:10])


def quantized_zeros(coding: Coding, out: int, size: int) -> QuantizedWeight:
    scales = torch.ones(-(-out // coding.outputs), -(-size // coding.group))
    return QuantizedWeight.of(torch.zeros(out, size, dtype=torch.uint8), scales, coding)


EXPERTS = {
    "fp8 outputs": Coding("fp8", 64),
    "fp8 blocks": Coding("fp8", 32, outputs=32),
    "int4 at load": Coding("int4", 64),
    "int8 at load": Coding("int8", 64),
    "q4_k at load": Coding("int4", 32, minima="blocks"),
    "mxfp4": Coding("mxfp4", 32),
    "fp8 blocks, shared": Coding("fp8", 32, outputs=32),
    "int4, shared at load": Coding("int4", 64),
}
"""Coding of experts by the name of a checkpoint. In the last ones a further expert is shared by all rows."""


def expert_files(folder: Path, name: str) -> tuple[Path, Path, str | None]:
    """A checkpoint of quantized experts, one with their numbers, and how to quantize it at load."""
    if name == "mxfp4":
        numbers = make_checkpoint(
            folder / "oss", "gpt_oss", hidden=64, intermediate=64, head_dim=32, layers=1, vocab=83, tie=False
        )
        config = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "*.router", "lm_head"],
        }
        return mxfp4(numbers, folder / "oss-mxfp4", config), numbers, None
    source, path = folder / f"{name}-experts", folder / f"{name}-experts-coded"
    size = 256 if name == "q4_k at load" else 64
    sizes: dict[str, Any] = {"hidden": size, "head_dim": 32, "layers": 1, "vocab": 83, "moe_intermediate_size": size}
    if "shared" in name:
        sizes |= {"layer_types": ["full_attention"], "shared_expert_intermediate_size": 96}
    make_checkpoint(source, "qwen3_5_moe_text" if "shared" in name else "qwen3_moe", **sizes)
    if name.endswith("at load"):
        return source, source, name.split()[0].rstrip(",")
    if name.startswith("fp8 blocks"):
        gates = [f"model.layers.0.mlp.{gate}" for gate in ("gate", "shared_expert_gate")]
        fp8_block(source, path, block=(32, 32), modules_to_not_convert=["lm_head", *gates])
    else:
        compressed(source, path, "float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel")
    return path, path.with_name(path.name + ".numbers"), None


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_codes(folder: Path, name: str) -> None:
    """Check that quantized experts stay quantized and are stored once, and that passes are near those of the
    dequantized weights in float64."""
    path, numbers, at_load = expert_files(folder, name)
    config, checkpoint = open_checkpoint(path, None, "auto")
    if at_load:
        checkpoint = quantized_at_load(checkpoint, at_load)
    assert isinstance(checkpoint, QuantizedTensors)
    weights = QuantizedLoader(config, checkpoint, torch.float32, torch.device("cpu")).load()
    (layer,) = weights.layers
    assert layer.experts is not None
    assert layer.experts.stacked is None
    assert layer.experts.stacked_quantized is not None
    for found, views in zip(layer.experts.stacked_quantized, (layer.experts.gate_up, layer.experts.down), strict=True):
        assert isinstance(found, QuantizedWeight)
        assert found.coding == EXPERTS[name]
        held = [view.codes.data_ptr() for view in views if isinstance(view, QuantizedWeight)]
        each = len(found.codes) // len(views)
        assert held == [found.codes[i * each :].data_ptr() for i in range(len(views))], "held once"
    shared = layer.experts.shared
    assert (shared is not None) == ("shared" in name)
    if shared is not None:
        assert isinstance(shared.gate_up, QuantizedWeight)
        assert isinstance(shared.down, QuantizedWeight)
        assert isinstance(shared.gate, DenseWeight)
    made = CudaDecoder.allocate(weights, max_rows=16, max_seqs=4)

    def run(feeder: Feeder) -> list[Tensor]:
        return [feeder.feed({0: span(0, rows), 1: span(0, 1)}) for rows in (2, 8)]

    exact = outputs(load_model(numbers, dtype="float64", quantization=at_load), run)
    plain = outputs(load_model(numbers, dtype="float32", quantization=at_load), run)
    assert_near(outputs(Poisoned(made.weights, made.workspace), run), exact, plain, ulps=16)


def test_experts_of_codes_are_cut_for_ranks(folder: Path) -> None:
    """Check the part of quantized experts that a rank holds. Of an expert's down projection, which Mixtral calls w2, it
    is some of the inputs; of the other projections some of the outputs."""
    source = make_checkpoint(folder / "mixtral", "mixtral", hidden=64, intermediate=128, head_dim=32, kv_heads=2)
    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    path = compressed(source, folder / "mixtral-fp8", "float-quantized", **args)
    config, checkpoint = open_checkpoint(path, None, "auto")
    assert isinstance(checkpoint, QuantizedTensors)

    def experts(shard: Shard | None) -> list[Tensor]:
        loader = QuantizedLoader(config, checkpoint, torch.float32, torch.device("cpu"), shard)
        layer = loader.load().layers[1]
        assert layer.experts is not None
        assert layer.experts.stacked_quantized is not None
        return [weight.dequantized() for weight in layer.experts.stacked_quantized]

    count, (gate_up, down) = config.experts.count if config.experts else 0, experts(None)
    for rank in range(2):
        own_gate_up, own_down = experts(Shard(rank, 2))
        assert own_gate_up.equal(gate_up.view(2 * count, 2, -1, 64)[:, rank].flatten(0, 1))
        assert own_down.equal(down.chunk(2, 1)[rank])


def test_the_gate_of_a_shared_expert_is_dequantized(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a file in which the gate of a shared expert is quantized, too. The kernel reads its numbers."""
    path, _, at_load = expert_files(folder, "int4, shared at load")
    config, checkpoint = open_checkpoint(path, None, "auto")
    assert at_load is not None
    checkpoint = IntegersAtLoad(checkpoint, at_load)
    loader = QuantizedLoader(config, checkpoint, torch.float32, torch.device("cpu"))
    name, codes = "model.layers.0.mlp.shared_expert_gate", quantized_zeros(Coding("int8", 64), 1, 64)
    read = loader.quantized
    monkeypatch.setattr(loader, "quantized", lambda own: codes if own == f"{name}.weight" else read(own))
    assert isinstance(loader.linear([name], bias=False), QuantizedWeight)
    experts = loader.load().layers[0].experts
    assert experts is not None
    assert experts.shared is not None
    assert isinstance(experts.shared.gate, DenseWeight)
    assert experts.shared.gate.weight.equal(loader.read(f"{name}.weight"))


def test_experts_of_several_codings_become_numbers(folder: Path) -> None:
    """Check a layer in which one expert's projection is not quantized: all experts of the layer are dequantized. Other
    projections stay quantized."""
    source = make_checkpoint(folder / "mixed-source", "qwen3_moe", hidden=64, head_dim=32, layers=1, vocab=83)
    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    path = compressed(source, folder / "mixed", "float-quantized", **args)
    config, checkpoint = open_checkpoint(path, None, "auto")
    assert isinstance(checkpoint, QuantizedTensors)
    loader = QuantizedLoader(config, checkpoint, torch.float32, torch.device("cpu"))
    read = loader.quantized
    loader.quantized = lambda name: None if ".experts.2.up_proj" in name else read(name)  # type: ignore[method-assign]
    (layer,) = loader.load().layers
    assert isinstance(layer.qkv, QuantizedWeight)
    assert layer.experts is not None
    assert layer.experts.stacked_quantized is None
    assert layer.experts.stacked is not None
    (numbers,) = load_model(path.with_name("mixed.numbers"), dtype="float64").weights.layers
    assert numbers.experts is not None
    assert numbers.experts.stacked is not None
    for found, expected in zip(layer.experts.stacked, numbers.experts.stacked, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    for found, view in zip(layer.experts.stacked, (layer.experts.gate_up[4], layer.experts.down[4]), strict=True):
        assert isinstance(view, DenseWeight)
        assert view.weight.data_ptr() == found[4].data_ptr(), "held once"
