"""The wheels of `make wheel`: their names, what they link, and this machine's in an environment of its own.

`make test-wheel` runs this separately, because the wheels take minutes to build. This module only reads dist/.
"""

import platform
import re
import sys
import zipfile
from pathlib import Path

import pytest

from wheels.harness import ROOT, VERSION, run, wheel

PROCESSORS = ("x86_64", "aarch64")


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("package", ["specrs", "specrs_core"])
def test_it_runs_on_every_linux_since_2014_and_python_since_3_11(package: str, processor: str) -> None:
    path = wheel(package, processor)
    told = " ".join(run(sys.executable, "-m", "auditwheel", "show", path).split())
    assert f'consistent with the following platform tag: "manylinux_2_17_{processor}"' in told, told
    # auditwheel says that nothing else is linked only of the oldest tag that a processor has.
    linked = set(re.findall(r"(\S+\.so\S*) with versions", told))
    assert linked, told
    assert linked <= {"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0"}, told
    checked = run(sys.executable, "-m", "abi3audit", "--strict", "--report", path)
    assert re.search(r'"is_abi3": ?true', checked), checked
    assert not re.search(r'"non_abi3_symbols": ?\[[^\]]', checked), checked


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("package", ["specrs", "specrs_core"])
def test_the_extension_has_no_line_tables(package: str, processor: str) -> None:
    """Check that the extension has no line tables: with those of `profile.release` it takes 25 MB, without them 7."""
    with zipfile.ZipFile(wheel(package, processor)) as opened:
        (extension,) = [file for file in opened.infolist() if file.filename.endswith(".so")]
    assert extension.file_size < 10_000_000, f"{extension.filename}: {extension.file_size:,} bytes"


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_extension_is_the_processors(processor: str, tmp_path: Path) -> None:
    run(sys.executable, "-m", "zipfile", "-e", wheel("specrs_core", processor), tmp_path)
    header = next(tmp_path.glob("specrs_core/*.so")).read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == {"x86_64": 62, "aarch64": 183}[processor]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with this machine's wheel of specrs-core and its dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin/python"
    run(python, "-m", "pip", "install", "--quiet", wheel("specrs_core", platform.machine()))
    return python


def test_the_core_works_in_an_empty_environment(python: Path) -> None:
    assert "acceptance length" in run(python, ROOT / "examples/scheduler.py")
    told = run(python, "-c", "from importlib.metadata import version; print(version('specrs-core'))")
    assert told.strip() == VERSION


def test_specrs_answers_in_an_empty_environment(python: Path) -> None:
    """Check that specrs answers in an empty environment with its default dependencies alone, without torch."""
    run(python, "-m", "pip", "install", "--quiet", wheel("specrs", platform.machine()))
    assert run(python.parent / "specrs", "--version").strip() == f"specrs {VERSION}"
    installed = run(python, "-m", "pip", "list", "--format=freeze").split()
    assert not [line for line in installed if line.startswith(("torch", "triton", "transformers", "nvidia"))]
    assert run(python.parent / "specrs", "generate", "--prompt", "def add(a, b):", "--max-tokens", "8").strip()
