"""The wheels for 64-bit ARM under qemu's emulator, on a Python from Debian's packages in a folder of its own.

`make test-wheel-arm64` runs this. This module only reads dist/.
"""

import shutil
from pathlib import Path

import pytest

from wheels.harness import ROOT, VERSION, run, wheel


@pytest.fixture(scope="module")
def arm_python() -> tuple[str | Path, ...]:
    """The command that starts a Python for 64-bit ARM with both wheels and numpy, under qemu's emulator."""
    folder = ROOT / ".venv-tools/arm64"
    run(ROOT / "scripts/arm64_python", folder)
    packages = folder / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    locked = (ROOT / "environments/runtime.lock").read_text().splitlines()
    numpy = next(line for line in locked if line.startswith("numpy=="))
    install = (ROOT / ".venv/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages)
    of_arm = ("--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_28_aarch64",
              "--platform", "manylinux_2_17_aarch64", "--platform", "manylinux2014_aarch64")  # fmt: skip
    run(*install, *of_arm, numpy.split()[0], wheel("specrs_core", "aarch64"), wheel("specrs", "aarch64"))
    return "qemu-aarch64", "-L", folder, "-E", f"PYTHONPATH={packages}", folder / "usr/bin/python3.11"


def test_the_core_for_arm_decides_what_it_decides_here(arm_python: tuple[str | Path, ...]) -> None:
    told = run(*arm_python, ROOT / "examples/scheduler.py")
    assert "acceptance length" in told
    assert told == run(ROOT / ".venv/bin/python", ROOT / "examples/scheduler.py")


def test_the_extension_for_arm_is_loaded(arm_python: tuple[str | Path, ...]) -> None:
    told = run(*arm_python, "-c", "import platform, specrs; print(platform.machine(), specrs.__version__)")
    assert told.split() == ["aarch64", VERSION]
    run(*arm_python, "-c", "import specrs._core, specrs.core, specrs.errors, specrs.config")
