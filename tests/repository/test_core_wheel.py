"""The wheel specrs-core: its module is that of specrs.core, in a fresh environment that has only numpy."""

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from repository.building import ROOT, maturin

pytestmark = pytest.mark.timeout(900)  # whatever Rust has not been built yet is built here

PROJECT = ROOT / "rust/py"


def run(*command: str | Path, **changes: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, env=environment | changes)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel. It shares the target folder with the wheel of specrs, so that the extension is compiled once."""
    out = tmp_path_factory.mktemp("wheel")
    maturin("build", "--release", "--locked", "--out", out, project=PROJECT)
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment's interpreter, with the wheel installed and this environment's numpy linked."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin/python"
    run(sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python, wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    numpy = Path(np.__file__).parent
    for name in ("numpy", "numpy.libs"):
        if (numpy.parent / name).exists():
            (site / name).symlink_to(numpy.parent / name)
    return python


def test_it_holds_the_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert files == {f"specrs_core/{name}" for name in ("__init__.py", "_core.abi3.so", "_core.pyi", "py.typed")}
        assert archive.read("specrs_core/__init__.py") == (ROOT / "python/specrs/core.py").read_bytes()
        assert archive.read("specrs_core/_core.pyi") == (ROOT / "python/specrs/_core.pyi").read_bytes()
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert (metadata["Name"], metadata.get_all("Requires-Dist")) == ("specrs-core", ["numpy>=2.0"])
    assert "-cp311-abi3-" in wheel.name


def test_sources_build_alone(tmp_path: Path) -> None:
    """Check that the sources build alone. The package's Python files are links, which must be files in the sdist."""
    maturin("sdist", "--out", tmp_path, project=PROJECT)
    (path,) = tmp_path.iterdir()
    with tarfile.open(path) as archive:
        members = {member.name.split("/", 1)[1]: member for member in archive.getmembers()}
    python = {f"python/specrs_core/{name}" for name in ("__init__.py", "_core.pyi", "py.typed")}
    rust = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("rust/[cp]*/src/**/*.rs")}
    assert python | {"LICENSE", "README.md", "pyproject.toml", "Cargo.lock"} <= set(members)
    assert {name for name in rust if name.startswith(("rust/core/", "rust/py/"))} <= set(members)
    assert [name for name, member in members.items() if not (member.isfile() or member.isdir())] == []


def test_a_host_runs_with_numpy_alone(python: Path) -> None:
    assert "acceptance length" in run(python, ROOT / "examples/scheduler.py")
    code = """
import importlib.util, pickle, specrs_core
assert not [name for name in ("specrs", "torch", "transformers") if importlib.util.find_spec(name)]
names = [specrs_core.Scheduler, specrs_core.SpecrsError, specrs_core.InvalidConfigError]
assert {item.__module__ for item in names} == {"specrs_core._core"}
"""
    run(python, "-c", code)
