"""The CUDA forward pass, its kernels interpreted, against the CPU's in fp32 and float64, fed the same tokens."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LLAMA3_ROPE, LONG_ROPE, make_checkpoint
from kernels.cuda.tolerance import assert_argmax, assert_near, assert_same_product
from quantized_files import awq, compressed, fp8_block
from specrs.kernels.coded_weight import CodedWeight, Coding
from specrs.kernels.cuda import scaled_linear
from specrs.kernels.cuda.device import DeviceLimits
from specrs.kernels.linear import DenseWeight, Weight
from specrs.models import loader
from specrs.models.base import HiddenStates
from specrs.models.cuda import products, stream, workspace
from specrs.models.cuda.workspace import Workspace
from specrs.models.dense import Dense
from specrs.models.dense_cuda import CudaDense
from specrs.models.dense_weights import DenseWeights, ExpertWeights, LayerWeights, with_fp8_rows
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.loader import CodedLoader, load_model, open_checkpoint
from specrs.models.quantization.at_load import IntegersAtLoad
from specrs.models.quantization.base import QuantizedTensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from .harness import Feeder

LONG_ROPE_OF_4 = LONG_ROPE | {
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 6.0],
    "partial_rotary_factor": 0.5,
}
"""Of half a head of 16, cosines scaled."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {"tie": False}),
    "llama": ("llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    "windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "olmo2": ("olmo2", {}),
    "gemma3": ("gemma3_text", {"sliding_window": 7, "kv_heads": 1}),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {"attention_bias": True}),
    "phi3": ("phi3", {"rope_parameters": LONG_ROPE_OF_4, "sliding_window": 11, "hidden": 64}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "mixtral": ("mixtral", {"sliding_window": 7}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 7, "tie": False}),
    "one KV head": ("qwen3", {"kv_heads": 1, "group": 5, "head_dim": 20}),
}
LENGTH = 90


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


@functools.cache
def load(folder: Path, name: str, dtype: torch.dtype) -> Dense:
    family, fields = FAMILIES[name]
    shape = {"hidden": 40, "intermediate": 56, "vocab": 83, "kv_heads": 2, "group": 2, "head_dim": 16} | fields
    path = folder / name.replace(" ", "_")
    if not path.exists():
        make_checkpoint(path, family, **shape)
    return load_model(path, dtype=dtype)


def as_on_a_gpu(model: Dense) -> DenseWeights:
    """The same weights as `pack` leaves them on a GPU."""

    def layer(w: LayerWeights) -> LayerWeights:
        linears = {name: dense(getattr(w, name), model.dtype) for name in ("qkv", "o", "gate_up", "down")}
        return dataclasses.replace(w, experts=None if w.experts is None else experts(w.experts), **linears)

    def experts(w: ExpertWeights) -> ExpertWeights:
        gate_up, down = (tuple(dense(one, model.dtype) for one in every) for every in (w.gate_up, w.down))
        stacked = torch.stack([one.weight for one in gate_up]), torch.stack([one.weight for one in down])
        biases = [
            torch.stack([one.bias for one in of if one.bias is not None])
            for of in (gate_up, down)
            if of[0].bias is not None
        ]
        both = (biases[0], biases[1]) if biases else None
        return ExpertWeights(dense(w.router, model.dtype), gate_up, down, stacked, both)

    weights = model.weights
    layers = tuple(map(layer, weights.layers))
    return dataclasses.replace(weights, layers=layers, lm_head=dense(weights.lm_head, model.dtype))


def dense(w: Weight, dtype: torch.dtype) -> DenseWeight:
    return DenseWeight(w.dequantized().to(dtype), w.bias)


class Poisoned(CudaDense):
    """With every buffer but the counters NaN before every pass."""

    def forward(self, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int] = ()) -> HiddenStates:
        self.poison()
        hidden = super().forward(inputs, kv_cache, hidden_layers)
        assert not self.workspace.counters.any()
        return HiddenStates(*(None if x is None else x.clone() for x in hidden))  # type: ignore[arg-type]

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        self.poison()
        out = torch.full((hidden.shape[0], self.vocab_size + 3), torch.nan)[:, :-3]
        return super().compute_logits(hidden, out)

    def poison(self: CudaDense) -> None:
        buffers = [getattr(self.workspace, f.name) for f in dataclasses.fields(self.workspace)]
        if self.workspace.experts is not None:
            buffers += self.workspace.experts.tensors
        for buffer in buffers:
            if isinstance(buffer, Tensor) and buffer.is_floating_point():
                buffer.fill_(torch.nan)


def on_device(model: Dense, num_hidden_layers: int = 0) -> Poisoned:
    made = CudaDense.allocate(as_on_a_gpu(model), max_rows=LENGTH, max_seqs=4, num_hidden_layers=num_hidden_layers)
    return Poisoned(made.weights, made.workspace)


def outputs(model: Any, run: Callable[[Feeder], list[Tensor]]) -> Tensor:
    """Logits of everything that `run` feeds to three requests over blocks of 8 positions, NaN at the start."""
    torch.manual_seed(0)
    return torch.cat(run(Feeder(model, num_requests=3, block_size=8, max_len=LENGTH + 6)))


def compare(folder: Path, name: str, run: Callable[[Feeder], list[Tensor]]) -> None:
    decoder = load(folder, name, torch.float32)
    exact = outputs(load(folder, name, torch.float64), run)
    assert_near(outputs(on_device(decoder), run), exact, outputs(decoder, run), ulps=16)


def span(start: int, end: int) -> list[tuple[int, int]]:
    """(token, position) pairs."""
    return [(7 * p % 83, p) for p in range(start, end)]


# tests/runner/test_cuda_runner.py has few rows of the other families.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("granite", "smollm3", "mixtral")])
def test_decode_and_verification_rows(folder: Path, name: str) -> None:
    """Short prompts, then mixed K with masked rows, a draft's first pass, and one row each."""

    def run(feeder: Feeder) -> list[Tensor]:
        first = feeder.feed({0: span(0, 5), 1: span(0, 1), 2: span(0, 9)})
        masked = feeder.feed({0: [*span(5, 8), (0, -1)], 1: [(0, -1)], 2: span(9, 15)})
        second = feeder.feed({1: span(0, 2), 2: span(14, 16)}, no_slot=frozenset({(1, 0), (2, 14)}))
        third = feeder.feed({0: span(8, 9), 1: span(2, 3), 2: span(16, 17)})
        assert masked.isfinite().all()
        return [first, masked[[0, 1, 2, 5, 6, 7, 8, 9, 10]], second, third]

    compare(folder, name, run)


@pytest.mark.parametrize("name", ["qwen3", "llama", "windows"])
def test_prefill_chunks(folder: Path, name: str) -> None:
    """More than 64 rows at once, beside another request's chunk; then rows that attend all of it."""

    def run(feeder: Feeder) -> list[Tensor]:
        first = feeder.feed({0: span(0, 71), 1: span(0, 12)})
        return [first, feeder.feed({0: span(71, LENGTH), 1: span(12, 13)}), feeder.feed({0: span(LENGTH, LENGTH + 2)})]

    compare(folder, name, run)


@pytest.mark.parametrize("name", ["gemma3", "granite", "mixtral", "gpt_oss"])
def test_a_chunk_of_many_rows(folder: Path, name: str) -> None:
    """Of what other families have: norms around and GELU, multipliers, experts, their biases."""
    compare(folder, name, lambda feeder: [feeder.feed({0: span(0, 66)})])


@pytest.mark.parametrize("name", ["fp8", "int4", "int8 at load", "int4 at load"])
def test_weights_of_codes(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded as on a GPU, from FP8 with a projection that is not quantized: few rows, those that are read twice, and
    more than read codes, against the numbers in float64."""
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
    with monkeypatch.context() as patch:
        patch.setattr(loader, "pack", DenseWeight)
        weights = CodedLoader(config, checkpoint, torch.float32, torch.device("cpu")).load()
    last = weights.layers[-1]
    assert all(isinstance(w, CodedWeight) for w in (last.qkv, last.o, last.gate_up, last.down))
    assert isinstance(last.gate_up, CodedWeight)
    codings = {"fp8": Coding("fp8", 32, 32), "int4": Coding("int4", 32, zeros=True)}
    codings |= {"int8 at load": Coding("int8", 64), "int4 at load": Coding("int4", 64)}
    assert last.gate_up.coding == codings[name]
    assert isinstance(weights.layers[0].down, CodedWeight) == (name != "fp8"), "listed among those not to convert"
    for module in (products, workspace):
        monkeypatch.setattr(module, "CODED_ROWS", 6)
    monkeypatch.setattr(workspace, "_NUMBERS_BYTES", 4 * 64 * 24)
    made = CudaDense.allocate(weights, max_rows=16, max_seqs=4)
    for module in (products, stream):
        monkeypatch.setattr(module, "MAX_ROWS", 4)
    assert 0 < made.workspace.numbers.numel() < 64 * 64, "several pieces"

    def run(feeder: Feeder) -> list[Tensor]:
        return [feeder.feed({0: span(0, rows), 1: span(0, 1)}) for rows in (2, 5, 8)]

    numbers = source if at_load else path.with_name(path.name + ".numbers")
    exact = outputs(load_model(numbers, dtype="float64", quantization=at_load), run)
    plain = outputs(load_model(source if at_load else path, dtype="float32", quantization=at_load), run)
    assert_near(outputs(Poisoned(made.weights, made.workspace), run), exact, plain, ulps=16)


def loaded_codes(path: Path, dtype: torch.dtype = torch.float32) -> DenseWeights:
    """As on a GPU, on a CPU."""
    config, checkpoint = open_checkpoint(path, None, "auto")
    assert isinstance(checkpoint, QuantizedTensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "pack", DenseWeight)
        return CodedLoader(config, checkpoint, dtype, torch.device("cpu")).load()


@pytest.fixture(scope="session")
def fp8_weights(folder: Path) -> dict[str, DenseWeights]:
    """Two layers in FP8 by output and by block."""
    source = make_checkpoint(
        folder / "fp8-rows", "qwen2", tie=False, hidden=64, intermediate=96, kv_heads=1, group=2, head_dim=32, vocab=83
    )
    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    paths = {"channel": compressed(source, folder / "fp8-rows-channel", "float-quantized", **args)}
    paths["block"] = fp8_block(source, folder / "fp8-rows-block", block=(32, 32))
    return {name: with_fp8_rows(loaded_codes(path)) for name, path in paths.items()}


class Calls(list[tuple[Any, ...]]):
    """Of `torch._scaled_mm`, with its own products, or those that `of` gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        multiply = torch._scaled_mm if of is None else of

        def called(*args: Tensor, **kwargs: Any) -> Tensor:
            self.append(args)
            return multiply(*args, **kwargs)

        monkeypatch.setattr(torch, "_scaled_mm", called)


@pytest.mark.parametrize("name", ["channel", "block"])
def test_products_of_rows_in_fp8(
    fp8_weights: dict[str, DenseWeights], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows, those that read codes twice, and more: numbers that the law gives, multiplied in float64. Weights by
    output go through torch's own `_scaled_mm` here from few rows on."""
    for module in (products, workspace):
        monkeypatch.setattr(module, "CODED_ROWS", 6)
    monkeypatch.setattr(products, "MAX_ROWS", 4)
    made = CudaDense.allocate(fp8_weights[name], max_rows=9, max_seqs=1)
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
    fp8_weights: dict[str, DenseWeights], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same law in passes of few rows and of many as op by op: what is left is far less than what it changes. A row
    has the same bits whatever is beside it."""
    made = CudaDense.allocate(fp8_weights[name], max_rows=16, max_seqs=4)
    cut = Poisoned(made.weights, made.workspace)
    eager, plain = Dense(made.weights), Dense(without_fp8_rows(made.weights))

    def run(feeder: Feeder) -> list[Tensor]:
        return [feeder.feed({0: span(0, 7), 1: span(0, 1)})]

    expected, changed = outputs(eager, run), outputs(plain, run)
    by_law, few = (expected - changed).abs().mean(), outputs(cut, run)
    assert torch.equal(few[:7], outputs(cut, lambda feeder: [feeder.feed({0: span(0, 7)})]))
    for module in (products, stream):
        monkeypatch.setattr(module, "MAX_ROWS", 4)
    for found in (few, outputs(cut, run)):
        assert (found - expected).abs().mean() < by_law / 100


def without_fp8_rows(weights: DenseWeights) -> DenseWeights:
    def layer(w: LayerWeights) -> LayerWeights:
        names = ("qkv", "o", "gate_up", "down")
        coded = {name: made for name in names if isinstance(made := getattr(w, name), CodedWeight)}
        return dataclasses.replace(
            w, **{name: dataclasses.replace(made, fp8_rows=False) for name, made in coded.items()}
        )

    return dataclasses.replace(weights, layers=tuple(map(layer, weights.layers)))


def test_scales_by_block_as_cublas_reads_them(
    fp8_weights: dict[str, DenseWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On sm_90: what `_scaled_mm` is called with there, by torch's own check of a GPU's tensors, and multiplied by the
    layouts that cuBLAS documents. Rows are padded to four."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 127, (256, 1024), generator=generator, dtype=torch.uint8)
    scales = torch.rand(2, 8, generator=generator) + 0.5
    weight = dataclasses.replace(CodedWeight.of(values, scales, Coding("fp8", 128, outputs=128)), fp8_rows=True)
    hopper = DeviceLimits("H100", 90, 132, 227 * 1024)
    monkeypatch.setattr(scaled_linear, "CUDA", (12, 9))
    assert scaled_linear.serves(weight, hopper)
    assert not scaled_linear.serves(weight, dataclasses.replace(hopper, capability=100))
    assert not scaled_linear.serves(weight, dataclasses.replace(hopper, capability=89))
    assert not scaled_linear.serves(coded_zeros(Coding("fp8", 128, outputs=128), 256, 640), hopper), "5 blocks"
    assert not scaled_linear.serves(coded_zeros(Coding("int8", 1024), 256, 1024), hopper)
    by_output = coded_zeros(Coding("fp8", 1024), 256, 1024)
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
        CudaDense.allocate(fp8_weights["block"], max_rows=16, max_seqs=1).workspace,
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
        held = CodedWeight(*on_gpu, weight.coding, fp8_rows=True)
        rows = torch.empty(13, 1024, dtype=torch.bfloat16, device="cuda")
        outs = torch.empty(13, 256, dtype=torch.bfloat16, device="cuda")
        fake = dataclasses.replace(
            ws,
            rounded=torch.empty(16 * 1024, dtype=torch.bfloat16, device="cuda"),
            row_scales=torch.empty(16 * 8, device="cuda"),
        )
        products.wide_product(fake, "o", rows[:10], held, outs[:10])


def coded_zeros(coding: Coding, out: int, size: int) -> CodedWeight:
    scales = torch.ones(-(-out // coding.outputs), -(-size // coding.group))
    return CodedWeight.of(torch.zeros(out, size, dtype=torch.uint8), scales, coding)


def test_experts_of_codes_become_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the layer's other projections stay codes."""
    source = make_checkpoint(folder / "experts-source", "qwen3_moe", hidden=64, head_dim=32, layers=1, vocab=83)
    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    path = compressed(source, folder / "experts", "float-quantized", **args)
    config, checkpoint = open_checkpoint(path, None, "auto")
    assert isinstance(checkpoint, QuantizedTensors)
    with monkeypatch.context() as patch:
        patch.setattr(loader, "pack", DenseWeight)
        (layer,) = CodedLoader(config, checkpoint, torch.float32, torch.device("cpu")).load().layers
    assert isinstance(layer.qkv, CodedWeight)
    assert layer.experts is not None
    assert layer.experts.stacked is not None
    (numbers,) = load_model(path.with_name("experts.numbers"), dtype="float64").weights.layers
    assert numbers.experts is not None
    assert numbers.experts.stacked is not None
    for found, expected in zip(layer.experts.stacked, numbers.experts.stacked, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    for found, view in zip(layer.experts.stacked, (layer.experts.gate_up[4], layer.experts.down[4]), strict=True):
        assert isinstance(view, DenseWeight)
        assert view.weight.data_ptr() == found[4].data_ptr(), "held once"


def test_a_model_of_experts_alone_has_no_buffers_of_an_mlp(folder: Path) -> None:
    """In both of these the second layer has experts, in one the first, too."""
    sparse, mixed = (on_device(load(folder, name, torch.float32)).workspace for name in ("mixtral", "qwen3_moe"))
    assert sparse.gate_up.numel() == sparse.activated.numel() == 0
    assert mixed.gate_up.shape == (LENGTH + 3, 2 * 56)
    assert mixed.experts is not None
    assert mixed.num_bytes >= sum(tensor.nbytes for tensor in mixed.experts.tensors)


def test_argmax_agrees_with_logits(folder: Path) -> None:
    """Bit for bit with the logits of its own launch, within rounding with those of another launch or width: how a
    product of fewer columns is summed is up to the split of the work, and above 64 rows to the library."""
    model = on_device(load(folder, "qwen3", torch.float32))
    lm_head = model.weights.lm_head
    assert isinstance(lm_head, DenseWeight)
    for rows in (3, 70):
        hidden = torch.randn(2 * rows, 40, generator=torch.Generator().manual_seed(rows))[1::2]
        logits = model.compute_logits(hidden)
        for count, kept in ((None, None), (61, None), (None, torch.full_like(logits, torch.nan))):
            model.poison()
            ids, top = torch.full((rows,), -1), torch.full((rows,), torch.nan)
            model.compute_argmax(hidden, ids, top, count, kept)
            weight = lm_head.weight[:count]
            assert_argmax(ids, top, logits[:, :count], hidden, weight)
            if kept is not None:
                assert torch.equal(ids, kept.argmax(dim=1))
                assert torch.equal(top, kept.amax(dim=1))
                assert_same_product(kept, logits, hidden, weight)


def test_entries_of_layers(folder: Path) -> None:
    """Both products' streams, few rows and many, against the CPU's."""
    cpu = load(folder, "qwen3", torch.float32)
    layers = (1, 0)
    for count in (7, 71):
        feeders = [
            Feeder(model, block_size=8, max_len=LENGTH, hidden_layers=layers) for model in (on_device(cpu, 2), cpu)
        ]
        for feeder in feeders:
            feeder.feed({0: span(0, count)})
        mine, reference = (feeder.entries for feeder in feeders)
        assert mine is not None
        assert reference is not None
        assert mine.shape == (count, 2, 40)
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError, match=r"hidden_layers=\(0, 0, 1\): the workspace has room for 2"):
        Feeder(on_device(cpu, 2), max_len=LENGTH, hidden_layers=(0, 0, 1)).feed({0: span(0, 1)})


def test_a_request_does_not_depend_on_its_neighbours(folder: Path) -> None:
    """NaN in one request's K and V leaves the bits of the others."""
    model = on_device(load(folder, "qwen3", torch.float32))

    def run(spoiled: bool) -> Tensor:
        feeder = Feeder(model, num_requests=3, block_size=8, max_len=16)
        feeder.feed({0: span(0, 3), 1: span(0, 4), 2: span(0, 2)})
        if spoiled:
            feeder.cache.layers[0][feeder.table[1, 0], :, :, 2] = torch.nan
        return feeder.feed({0: span(3, 5), 1: span(4, 6), 2: span(2, 3)})

    clean, spoiled = run(False), run(True)
    assert spoiled[2:4].isnan().all()
    assert torch.equal(spoiled[[0, 1, 4]], clean[[0, 1, 4]])


def test_the_workspace_says_when_it_is_too_small(folder: Path) -> None:
    model = on_device(load(folder, "qwen3", torch.float32))
    with pytest.raises(AssertionError, match=f"rows=91: the workspace has room for {LENGTH}"):
        Feeder(model, num_requests=1, max_len=100).feed({0: span(0, 91)})


@pytest.mark.parametrize("rows", [6, 70])
def test_traces_with_fake_cuda_tensors(folder: Path, rows: int) -> None:
    """Shapes alone: no value is read, and nothing but the workspace is written."""
    config = load(folder, "qwen3", torch.float32).config
    dtype, h, d = torch.bfloat16, config.hidden_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d

    with FakeTensorMode():

        def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda")

        def linear(n: int, k: int) -> DenseWeight:
            return DenseWeight(tensor(n, k))

        layer = LayerWeights(
            input_norm=tensor(h),
            qkv=linear(q + 2 * kv, h),
            qk_norm=tensor(config.num_heads + config.num_kv_heads, d),
            o=linear(h, q),
            post_attention_norm=tensor(h),
            gate_up=linear(2 * config.intermediate_size, h),
            down=linear(h, config.intermediate_size),
        )
        weights = DenseWeights(
            config=config,
            dtype=dtype,
            device=torch.device("cuda"),
            embedding=tensor(config.vocab_size, h),
            layers=(layer,) * config.num_layers,
            final_norm=tensor(h),
            lm_head=linear(config.vocab_size, h),
            rotary=tensor(d, dtype=torch.float32),
        )
        made = Workspace.allocate(config, max_rows=96, max_seqs=16, dtype=dtype, device="cuda", num_hidden_layers=2)
        cache = KVCache.allocate(config, 4, 16, dtype, "cuda")
        i64 = functools.partial(tensor, dtype=torch.int64)
        inputs = PassInputs(i64(rows), i64(rows), i64(rows), i64(3), i64(2, 4), rows, 64)
        model = CudaDense(weights, made)
        hidden, entries = model.forward(inputs, cache, (1, 0))
        assert entries is not None
        assert entries.shape == (rows, 2, h)
        assert hidden.shape == (rows, h)
        assert hidden.untyped_storage()._cdata == made.normed.untyped_storage()._cdata
        logits = tensor(rows, config.vocab_size, dtype=torch.float32)
        model.compute_logits(hidden, logits)
        model.compute_argmax(hidden, i64(rows), tensor(rows, dtype=torch.float32))
        assert made.num_bytes > 0
