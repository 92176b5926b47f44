"""The bench of attention on a GPU: the scratch that it gives the kernel is as large as the kernel needs."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from module_files import load_file
from specrs.kernels.cuda.device import DeviceLimits
from torch._subclasses.fake_tensor import FakeTensorMode

H200 = DeviceLimits("H200", 90, 132, 227 * 1024)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the bench, which calls each function once."""
    timing = SimpleNamespace(graphed=lambda call: call, milliseconds=lambda call, **_: call() or 1.0)
    monkeypatch.setitem(sys.modules, "gpu.timing", timing)
    made = load_file("gpu_attention", Path(__file__).parents[2] / "benches/gpu/attention.py")
    monkeypatch.setattr(made, "limits_of", lambda _device: H200)
    return made


@pytest.mark.parametrize("rows", [1, 6, 17, 32, 256, 2048])
@pytest.mark.parametrize("context", [64, 1024, 8192, 131072])
def test_scratch_has_the_size_that_the_kernel_asks_for(bench: ModuleType, rows: int, context: int) -> None:
    with FakeTensorMode():
        found = bench.one(torch.device("cuda"), context, 1.0, rows)
    assert found["ms"] == 1.0
