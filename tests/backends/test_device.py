"""The device that an engine runs on, and the errors for a device that cannot serve. Needs no GPU."""

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import specrs.backends.cuda.device as device_module
import specrs.engine.build as build
import torch
from checkpoints import make_checkpoint
from mtp_reference import add_head
from safetensors.torch import load_file
from specrs.backends.cpu.backend import CpuBackend
from specrs.backends.cuda.adapters import slots_bytes
from specrs.backends.cuda.backend import CudaBackend
from specrs.backends.table import resolve_device
from specrs.config import EngineConfig
from specrs.engine.weights import load_weights
from specrs.errors import InvalidConfigError, UnsupportedConfigError
from specrs.models.loader import load_config
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import load_model
from specrs.speculative_config import SpeculativeConfig
from weight_memory import assert_needed, memory_of


def pretend(
    monkeypatch: pytest.MonkeyPatch, *, count: int = 2, capability: tuple[int, int] = (9, 0), compiler: bool = True
) -> None:
    """Make torch and the PATH report other hardware."""
    patched = {
        "is_available": lambda: count > 0,
        "device_count": lambda: count,
        "current_device": lambda: 1,
        "get_device_capability": lambda _device=None: capability,
        "get_device_name": lambda _device=None: "Some GPU",
    }
    for name, function in patched.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(device_module, "has_driver", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: name if compiler else None)


@pytest.mark.parametrize(
    ("asked", "hardware", "device"),
    [
        ("cpu", {}, "cpu"),
        ("auto", {}, "cuda:1"),
        ("auto", {"count": 0}, "cpu"),
        ("auto", {"capability": (7, 5)}, "cpu"),
        ("auto", {"compiler": False}, "cpu"),
        ("cuda", {}, "cuda:1"),
        ("cuda:0", {"capability": (8, 0)}, "cuda:0"),
    ],
)
def test_devices(asked: str, hardware: dict[str, object], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, **hardware)  # type: ignore[arg-type]
    assert resolve_device(asked) == device


@pytest.mark.parametrize(
    ("asked", "hardware", "error", "message"),
    [
        ("cuda", {"count": 0}, InvalidConfigError, r"^device='cuda': .*; allowed: 'auto' or 'cpu'$"),
        (
            "cuda:2",
            {},
            InvalidConfigError,
            "^device='cuda:2': must be one of cuda:0, cuda:1, the GPUs of this machine$",
        ),
        (
            "cuda",
            {"capability": (7, 5)},
            UnsupportedConfigError,
            "^device='cuda': Some GPU has compute capability 7.5, at least 8.0 is needed; allowed: 'cpu'$",
        ),
        (
            "cuda",
            {"compiler": False},
            InvalidConfigError,
            "^device='cuda': Triton needs a C compiler .* allowed: 'cpu'$",
        ),
    ],
)
def test_what_cannot_serve(
    asked: str, hardware: dict[str, object], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, **hardware)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        resolve_device(asked)


def test_auto_asks_no_torch_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that `auto` does not ask torch where there is no driver. Without torch, `auto` is the CPU on any
    machine."""
    pretend(monkeypatch)
    monkeypatch.setattr(device_module, "has_driver", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("torch was asked"))
    assert resolve_device("auto") == "cpu"
    monkeypatch.setattr(device_module, "has_driver", lambda: True)
    for package in ("torch", "triton"):
        monkeypatch.setitem(sys.modules, package, None)
        assert resolve_device("auto") == "cpu"
        monkeypatch.undo()
        pretend(monkeypatch)


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_gpu_without_its_packages(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"^device='cuda:0': needs {package}; install it: pip install 'specrs\[cuda\]'$"
    with pytest.raises(InvalidConfigError, match=message):
        resolve_device("cuda:0")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dtype": "float64"}, "dtype='float64'"),
        ({"enforce_eager": True}, "enforce_eager=True"),
        ({"model_impl": "transformers"}, "model='.*'"),
    ],
)
def test_what_torch_computes_on_a_cpu_without_torch(
    fields: dict[str, object], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_checkpoint(tmp_path / "target", "qwen3", seed=1, vocab=97, layers=1)
    monkeypatch.setitem(sys.modules, "torch", None)
    message = rf"^{named}: needs torch; install it: pip install 'specrs\[transformers\]'$"
    with pytest.raises(InvalidConfigError, match=message):
        load_weights(EngineConfig(model=str(target), device="cpu", **fields))  # type: ignore[arg-type]


class Loaded(Exception):
    """Exception that the test raises in place of the call that it watches, to end the build of the engine there."""


@pytest.mark.parametrize("given", [False, True], ids=["loaded", "shared"])
def test_an_engine_is_built_with_its_device_current(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that an engine is built with its device current, and that the caller's device is current again
    afterwards."""
    pretend(monkeypatch)
    entered: list[str] = []

    @contextlib.contextmanager
    def device(chosen: str) -> Iterator[None]:
        entered.append(str(chosen))
        try:
            yield
        finally:
            entered.append("back")

    def stop(*_args: object) -> None:
        entered.append("built")
        raise Loaded

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(build, "_build" if given else "load_weights", stop)
    target = SimpleNamespace(state_bytes=(0, 0))
    weights = SimpleNamespace(device="cuda:0", target=target) if given else None
    with pytest.raises(Loaded):
        build.build_engine(EngineConfig(model="none", device="cuda:0"), weights)  # type: ignore[arg-type]
    assert entered == ["cuda:0", "built", "back"]


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
def test_a_draft_in_fp8_needs_tensor_cores_for_it(
    capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, capability=capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (2**40, 2**40))
    model = str(make_checkpoint(tmp_path / "model", "qwen3", seed=1, vocab=97, layers=1, head_dim=64))
    for quantization in ("fp8", "int8", None):
        speculative = SpeculativeConfig(model=model, quantization=quantization, num_speculative_tokens=2)
        config = EngineConfig(model=model, speculative_config=speculative)
        check = partial(CudaBackend().check_config, config, "cuda:0", None)
        if quantization != "fp8" or capability >= (8, 9):
            check()
            continue
        message = (
            rf"^speculative_config.quantization='fp8': Some GPU has compute capability {capability[0]}.{capability[1]}"
            ", at least 8.9 is needed; allowed: None, 'int8' or 'int4'$"
        )
        with pytest.raises(UnsupportedConfigError, match=message):
            check()


def test_models_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_checkpoint(tmp_path / "target", "qwen3", seed=1, tie=False, vocab=97)
    draft = make_checkpoint(tmp_path / "draft", "qwen3", seed=1, tie=True, vocab=97)
    needed = sum(memory_of(load_model(path, dtype="float32").weights) for path in (target, draft))
    speculative = SpeculativeConfig(model=str(draft), num_speculative_tokens=2)
    config = EngineConfig(model=str(target), speculative_config=speculative, dtype="float32")
    assert_needed(config, needed, monkeypatch, match="GiB for model and .*GiB of the GPU are free.*")


def test_an_mtp_head_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = add_head(make_checkpoint(tmp_path / "target", "qwen3_5_text", seed=1, vocab=97))
    head = {name: t for name, t in load_file(target / "model.safetensors").items() if name.startswith("mtp.")}
    needed = memory_of(load_model(target, dtype="float32").weights) + sum(t.nbytes for t in head.values())
    speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=2)
    config = EngineConfig(model=str(target), dtype="float32", speculative_config=speculative)
    assert_needed(config, needed, monkeypatch, match="GiB for model and .* GiB for its MTP head.*")


def test_slots_of_adapters_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_checkpoint(tmp_path / "target", "qwen3", seed=1, vocab=97, layers=2)
    needed = memory_of(load_model(target, dtype="float32").weights) + slots_bytes(load_config(target), 3, 20, 4)
    config = EngineConfig(model=str(target), dtype="float32", enable_lora=True, max_loras=3, max_lora_rank=20)
    assert_needed(config, needed, monkeypatch, match="GiB for model and .* GiB for max_loras=3 adapters.*")


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_dummy_weights(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", family, seed=1, tie=False, vocab=97)
    (folder / "model.safetensors").unlink()
    models = [load_model(folder, load_format="dummy") for _ in range(2)]
    first, second = (model.weights for model in models if isinstance(model, TorchDecoder))
    assert first.embedding.equal(second.embedding)
    assert 0.015 < float(first.embedding.std()) < 0.025
    assert (first.final_norm == 1).all()
    assert len(first.layers) == first.config.num_layers


@pytest.mark.parametrize(("gigabytes", "tokens"), [(24, 2048), (79.9, 2048), (84.9, 8192), (150, 8192)])
def test_large_gpus_have_steps_of_more_tokens(gigabytes: float, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that GPUs of about 80 GB and more get steps of more tokens, so that prompts do not starve next to large
    batches."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (0, int(gigabytes * 1e9)))
    assert CudaBackend().batched_tokens("cuda:0") == tokens
    assert (CudaBackend().batched_tokens("cpu"), CpuBackend().batched_tokens("cpu")) == (2048, 2048)
