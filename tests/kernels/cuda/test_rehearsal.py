"""GPU mode without a GPU: the kernels' tests with the shuttle between two places of host memory, as `make
gpu-rehearsal` runs all."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[2]


def rehearse(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"SPECRS_GPU": "rehearsal", "TRITON_INTERPRET": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TESTS.parent)


def test_kernels_take_their_tensors_by_the_shuttle() -> None:
    done = rehearse("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/cuda/test_philox.py", "-x")
    assert done.returncode == 0, done.stdout


FAULTY = """
import sys
sys.path.insert(0, "tests")
import conftest, torch
from specrs.kernels.cuda.philox import fill_noise_kernel
fill_noise_kernel[(1,)](*[torch.zeros(4) for _ in fill_noise_kernel.arg_names])
"""


def test_a_kernel_launched_on_the_hosts_tensors_is_rejected() -> None:
    done = rehearse("-c", FAULTY)
    assert done.returncode == 1
    assert "fill_noise_kernel is launched on tensors of the host, past the shuttle" in done.stderr


def test_the_warning_of_the_mode_without_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that PyTorch's warning about the beta mode without synchronisation is expected, because warnings are errors
    in tests."""
    from gpu.test_runners import refuse_synchronisation

    def warn(mode: str) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", warn)
    refuse_synchronisation()
    with pytest.raises(UserWarning, match="prototype"):
        torch.cuda.set_sync_debug_mode("error")
