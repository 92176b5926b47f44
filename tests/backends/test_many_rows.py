"""Products of 65 to 2,048 rows: who computes them, in passes with interpreted kernels, and what cuBLASLt is asked. A
module that stands for nvmath-python computes with torch and notes each call."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from kernels.cuda.tolerance import assert_near
from models.cuda_models import LENGTH, Poisoned, as_on_a_gpu, load, outputs, span
from models.harness import Feeder
from specrs.backends.cuda import products
from specrs.backends.cuda.cublaslt import WORKSPACE_BYTES, CublasLt
from specrs.backends.cuda.decoder import CudaDecoder, with_buffers
from specrs.backends.cuda.many_rows import ManyRowsTimer, choose, measure
from specrs.backends.cuda.providers import BUCKETS, CUBLAS, CUBLASLT, DEFAULT, OWN, Choice, Providers, key_of_shape
from specrs.backends.cuda.stream import FusedStream, PlainStream, stream_of
from specrs.backends.cuda.workspace import layer_shapes
from specrs.kernels.coding import Coding
from specrs.kernels.cuda.configs import LinearShape
from specrs.kernels.cuda.device import INTERPRETER
from torch import Tensor

VERSION = 130401
RESULT = numpy.dtype([("algo", "u8", (8,)), ("workspace_size", "u8"), ("rest", "u8", (3,))])
ALGORITHM = bytes(range(RESULT.itemsize))
LT = Choice(CUBLASLT, ALGORITHM, VERSION)


class RefusedError(Exception):
    """Stands for cuBLASLt's error for an algorithm that does not serve a shape."""


class Nvmath:
    """Module that stands for nvmath. `calls` are those of all products, in order; `refused` are the rows that no
    algorithm serves."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.refused: set[int] = set()
        self.capturing = False

    def modules(self) -> dict[str, ModuleType]:
        nvmath = self

        class Algorithm:
            def __init__(self, array: Any) -> None:
                self.array = array

            @classmethod
            def from_numpy(cls, array: Any) -> "Algorithm":
                assert array.dtype == RESULT
                assert array.shape == (1,)
                return cls(array)

            def as_numpy(self) -> Any:
                return self.array

        class Matmul:
            def __init__(self, a: Tensor, b: Tensor, /, c: Tensor, *, beta: float, options: dict[str, Any]) -> None:
                assert beta == 0
                assert options["inplace"]
                assert options["memory_limit"] == WORKSPACE_BYTES
                self.operands, self.allocator = (a, b, c), options["allocator"]
                self.algorithms: list[Algorithm] = []
                nvmath.calls.append(("new", len(a)))

            def plan(self, *, algorithms: Any = None) -> None:
                assert not nvmath.capturing, "plans ask the device"
                proposed = [numpy.frombuffer(ALGORITHM[::-1], RESULT), numpy.frombuffer(ALGORITHM, RESULT)]
                self.algorithms = list(algorithms or map(Algorithm, proposed))
                nvmath.calls.append("plan" if algorithms is None else ("plan", algorithms[0].array.tobytes()))

            def autotune(self) -> None:
                assert not nvmath.capturing, "timing waits"
                self.algorithms.reverse()
                nvmath.calls.append("autotune")

            def reset_operands_unchecked(self, *, a: Tensor, b: Tensor, c: Tensor) -> None:
                self.operands = (a, b, c)

            def execute(self) -> None:
                a, b, c = self.operands
                if len(a) in nvmath.refused:
                    raise RefusedError("not supported")
                assert self.allocator.memalloc(1024).device_ptr == self.allocator.buffer.data_ptr()
                c.copy_(a @ b)
                nvmath.calls.append("captured" if nvmath.capturing else "execute")

            def free(self) -> None:
                nvmath.calls.append("free")

            def __enter__(self) -> "Matmul":
                return self

            def __exit__(self, *_: object) -> None:
                self.free()

        bindings = SimpleNamespace(
            get_version=lambda: VERSION, cuBLASLtError=RefusedError, matmul_heuristic_result_dtype=RESULT
        )
        pointer = lambda device_ptr, size, finalizer: SimpleNamespace(device_ptr=device_ptr)  # noqa: E731
        contents: dict[str, dict[str, Any]] = {
            "nvmath": {},
            "nvmath.bindings": {"cublasLt": bindings},
            "nvmath.bindings.cublasLt": vars(bindings),
            "nvmath.linalg": {"advanced": SimpleNamespace(Matmul=Matmul, Algorithm=Algorithm)},
            "nvmath.memory": {"MemoryPointer": pointer},
        }
        found = {}
        for name, values in contents.items():
            found[name] = ModuleType(name)
            vars(found[name]).update(values)
        return found


@pytest.fixture
def nvmath(monkeypatch: pytest.MonkeyPatch) -> Nvmath:
    made = Nvmath()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    return made


def aligned(rows: int, size: int, first: int = 0) -> Tensor:
    """Return random bfloat16 `[rows, size]` that begins `first` bytes after a multiple of 256."""
    memory = torch.empty(2 * rows * size + 512, dtype=torch.uint8)
    at = -memory.data_ptr() % 256 + first
    return memory[at : at + 2 * rows * size].view(torch.bfloat16).view(rows, size).normal_()


def test_a_plan_is_made_before_a_capture_and_executed_in_it(nvmath: Nvmath) -> None:
    lt = CublasLt(torch.device("cpu"))
    x, weight, other, out = aligned(70, 64), aligned(32, 64), aligned(32, 64), aligned(70, 32)
    assert lt.multiply(x, weight, out, LT)
    assert nvmath.calls == [("new", 70), ("plan", ALGORITHM), "execute", "execute"]
    nvmath.calls.clear()
    nvmath.capturing = True
    assert lt.multiply(x, other, out, LT)
    assert nvmath.calls == ["captured"]
    assert torch.equal(out, x @ other.t())
    with pytest.raises(AssertionError, match="a pass must run before it is captured"):
        lt.multiply(aligned(71, 64), weight, aligned(71, 32), LT)


def test_what_cublaslt_cannot_do_is_left_to_cublas(nvmath: Nvmath) -> None:
    lt = CublasLt(torch.device("cpu"))
    x, weight, out = aligned(70, 64), aligned(32, 64), aligned(70, 32)
    before = out.clone()
    assert not lt.multiply(x, weight, out, Choice(CUBLASLT, ALGORITHM, VERSION + 1)), "of another version"
    assert not lt.multiply(aligned(70, 64, first=128), weight, out, LT), "not aligned"
    assert not lt.multiply(x.float(), weight.float(), out.float(), LT), "32 bits"
    assert nvmath.calls == []
    assert not lt.multiply(aligned(72, 64), weight, aligned(72, 32), Choice(CUBLASLT, b"1", VERSION)), "of other size"
    nvmath.refused = {70}
    assert not lt.multiply(x, weight, out, LT)
    assert nvmath.calls == [("new", 70), ("plan", ALGORITHM), "free"]
    assert not lt.multiply(x, weight, out, LT)
    assert len(nvmath.calls) == 3, "a shape is tried once"
    assert torch.equal(out, before)


def test_tuning_keeps_the_fastest_algorithm_as_bytes(nvmath: Nvmath) -> None:
    lt = CublasLt(torch.device("cpu"))
    assert lt.autotune(aligned(96, 64), aligned(32, 64), aligned(96, 32)) == LT
    assert nvmath.calls == [("new", 96), "plan", "autotune", "free"]


def test_without_nvmath_cublas_is_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("specrs.backends.cuda.cublaslt.find_spec", lambda name: None)
    with caplog.at_level("INFO"):
        assert CublasLt.load(torch.device("cpu")) is None
    assert "pip install 'specrs[cublaslt]'" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr("specrs.backends.cuda.cublaslt.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "nvmath", ModuleType("nvmath"))
    assert CublasLt.load(torch.device("cpu")) is None
    assert "No module named 'nvmath" in caplog.text


def chosen(monkeypatch: pytest.MonkeyPatch, entries: dict[str, dict[int, Choice]]) -> None:
    monkeypatch.setattr(Providers, "of", lambda gpu: Providers(entries))


def shapes_of(folder: Path, name: str = "qwen3") -> dict[str, LinearShape]:
    config = load(folder, name, torch.float32).config
    return {name: shape for name, (shape,) in layer_shapes(config, torch.float32, "cpu").items()}


def decoder(folder: Path, name: str = "qwen3") -> CudaDecoder:
    weights = load(folder, name, torch.float32).weights
    model = load(folder, name, torch.float32)
    made = with_buffers(type(model)(as_on_a_gpu(model)), LENGTH, 4)
    assert isinstance(made, CudaDecoder)
    assert made.weights.config == weights.config
    return Poisoned(made.weights, made.workspace)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("many_rows")


OWN_BOTH = {96: Choice(OWN), 128: Choice(OWN)}


def run(feeder: Feeder) -> list[Tensor]:
    return [feeder.feed({0: span(0, 71), 1: span(0, 5)})]


@pytest.mark.parametrize(("name", "left"), [("qwen3", None), ("qwen2", "lm_head")])
def test_own_products_serve_passes_of_up_to_128_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, left: str | None
) -> None:
    """Check that a pass is fused if our kernel computes all products, and is near the CPU's; else each product that the
    table names is ours, with or without a bias."""
    shapes = shapes_of(folder, name)
    chosen(monkeypatch, {key_of_shape(shape): OWN_BOTH for of, shape in shapes.items() if of != left})
    mine = decoder(folder, name)
    ws = mine.workspace
    assert ws.fuses_more == (left is None)
    assert len(ws.own_configs) == len({(s.n * s.sides, s.k) for of, s in shapes.items() if of != left})
    for rows, fused in ((64, True), (65, left is None), (129, False)):
        stream = stream_of(torch.empty(rows, 40), torch.zeros(rows), ws, mine.config)
        assert isinstance(stream, FusedStream if fused else PlainStream)
    launched: list[int] = []
    skinny = products.skinny_linear
    monkeypatch.setattr(products, "skinny_linear", lambda x, *a: (launched.append(len(x)), skinny(x, *a)))
    cpu = load(folder, name, torch.float32)
    found = outputs(mine, run)
    assert launched.count(76) == 4 * cpu.config.num_layers + (left is None), "logits are fused, too"
    assert_near(found, outputs(load(folder, name, torch.float64), run), outputs(cpu, run), ulps=16)


def test_bits_of_own_products_do_not_depend_on_the_number_of_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = shapes_of(folder)["down"]
    chosen(monkeypatch, {key_of_shape(down): OWN_BOTH})
    mine = decoder(folder)
    assert not mine.workspace.fuses_more
    x = torch.randn(90, down.k, generator=torch.Generator().manual_seed(0))
    outs = []
    for rows in (65, 77, 90):
        out = torch.empty(rows, down.n)
        products.product(mine.workspace, "down", x[:rows], mine.weights.layers[0].down, out)
        outs.append(out)
    assert torch.equal(outs[0], outs[2][:65])
    assert torch.equal(outs[1], outs[2][:77])


def test_experts_and_adapters_are_not_fused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = shapes_of(folder)
    chosen(monkeypatch, {key_of_shape(shape): OWN_BOTH for shape in shapes.values()})
    model = load(folder, "qwen3", torch.float32)
    made = with_buffers(type(model)(as_on_a_gpu(model)), LENGTH, 4, loras=(1, 8))
    assert isinstance(made, CudaDecoder)
    assert not made.workspace.fuses_more
    monkeypatch.setattr(Providers, "are_own", lambda self, shapes: True)
    assert not decoder(folder, "mixtral").workspace.fuses_more
    assert decoder(folder).workspace.fuses_more


def test_cublaslt_serves_products_that_the_table_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    down = shapes_of(folder)["down"]
    chosen(monkeypatch, {key_of_shape(down): {96: LT}})
    asked: list[tuple[int, Choice]] = []
    serves = True

    class Fake:
        def multiply(self, x: Tensor, weight: Tensor, out: Tensor, choice: Choice) -> bool:
            asked.append((len(x), choice))
            if serves:
                out.fill_(7)
            return serves

    monkeypatch.setattr(CublasLt, "load", lambda device: Fake())
    mine = decoder(folder)
    weight = mine.weights.layers[0].down
    x = torch.randn(97, down.k)
    for rows in (65, 96, 97):
        out = torch.empty(rows, down.n)
        products.product(mine.workspace, "down", x[:rows], weight, out)
        assert bool((out == 7).all()) == (rows <= 96)
    assert asked == [(65, LT), (96, LT)]
    serves = False
    out = torch.empty(65, down.n)
    products.product(mine.workspace, "down", x[:65], weight, out)
    torch.testing.assert_close(out, x[:65] @ weight.weight.t())


def test_who_is_chosen() -> None:
    own = Choice(OWN)
    assert choose({DEFAULT: 1.0}) == DEFAULT
    assert choose({DEFAULT: 1.0, LT: 0.985}) == DEFAULT
    assert choose({DEFAULT: 1.0, LT: 0.97}) == LT
    assert choose({DEFAULT: 1.0, LT: 0.97, own: 0.98}) == own
    assert choose({DEFAULT: 1.0, LT: 0.97, own: 1.0}) == LT
    assert choose({DEFAULT: 1.0, own: 1.01}) == own
    assert choose({DEFAULT: 1.0, own: 1.03}) == DEFAULT


def test_each_dense_weight_is_measured_once_per_bucket() -> None:
    gated = LinearShape(64, 32, torch.bfloat16, gated=True)
    others = LinearShape(128, 32, torch.bfloat16), LinearShape(64, 32, torch.bfloat16, head_dim=64)
    left_out = (
        LinearShape(48, 32, torch.bfloat16, coding=Coding("int8", 32)),
        LinearShape(48, 32, torch.bfloat16, experts=(8, 2)),
    )
    timed = list(measure([gated, *others, *left_out], lambda shape, rows: {DEFAULT: 1e-6 * rows}))
    assert [(one.shape, one.rows) for one in timed] == [(others[0], rows) for rows in BUCKETS]
    assert timed[1].by_provider == {CUBLAS: pytest.approx(128e-6)}


def test_an_lm_head_is_measured_for_passes_that_are_fused() -> None:
    head = LinearShape(2**16, 32, torch.bfloat16)
    timed = list(measure([head], lambda shape, rows: {DEFAULT: 3.0, LT: 1.0, Choice(OWN): 2.0}))
    assert [(one.rows, one.choice.provider) for one in timed] == [(96, OWN), (128, OWN)]


def test_a_timer_leaves_out_who_cannot(nvmath: Nvmath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrs.backends.cuda.cublaslt.ALIGNMENT", 16)

    def clock(launch: Any) -> float:
        for i in range(3):
            launch(i)
        return 1.0

    shape, lt = LinearShape(32, 32, torch.bfloat16), CublasLt(torch.device("cpu"))
    timer = ManyRowsTimer(INTERPRETER, torch.device("cpu"), lt, clock)
    assert {choice.provider for choice in timer(shape, 96)} == {CUBLAS, CUBLASLT, OWN}
    assert {choice.provider for choice in timer(shape, 160)} == {CUBLAS, CUBLASLT}
    nvmath.refused = {96, 192}
    assert {choice.provider for choice in timer(shape, 192)} == {CUBLAS}
    without = ManyRowsTimer(INTERPRETER, torch.device("cpu"), None, clock)
    assert {choice.provider for choice in without(shape, 96)} == {CUBLAS, OWN}
