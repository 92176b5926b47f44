"""Content of a built wheel and sdist. The kernels are reached by a link, which maturin could drop silently."""

import tarfile
import zipfile
from pathlib import Path

import pytest

from repository.building import ROOT, maturin

pytestmark = pytest.mark.timeout(900)  # whatever Rust has not been built yet is built here

SOURCES = {path.relative_to(ROOT / "python").as_posix() for path in (ROOT / "python/specrs").rglob("*.py")}
KERNELS = {
    f"specrs/kernels/{path.relative_to(ROOT / 'kernels').as_posix()}"
    for path in (*ROOT.glob("kernels/**/*.py"), *ROOT.glob("kernels/**/*.json"))
}
PAIR = {
    f"specrs/pair/{model}/{file}"
    for model in ("target", "draft", "hybrid")
    for file in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    )
} | {f"specrs/pair/eagle3/{file}" for file in ("config.json", "model.safetensors")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    maturin("build", "--release", "--locked", "--out", str(out))
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def sdist_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    out = tmp_path_factory.mktemp("sdist")
    maturin("sdist", "--out", str(out))
    (path,) = out.iterdir()
    with tarfile.open(path) as archive:
        return {name.split("/", 1)[1] for name in archive.getnames()}


def test_wheel_serves_every_supported_python(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name


def test_wheel_has_every_source_kernel_and_pair_file(wheel_files: set[str]) -> None:
    assert "specrs/kernels/__init__.py" in KERNELS
    expected = SOURCES | KERNELS | PAIR | {"specrs/py.typed", "specrs/_core.pyi", "specrs/_core.abi3.so"}
    assert expected - wheel_files == set()


def test_wheel_has_licence_and_command(wheel: Path, wheel_files: set[str]) -> None:
    (licence,) = (name for name in wheel_files if name.endswith("/LICENSE"))
    (entry_points,) = (name for name in wheel_files if name.endswith("/entry_points.txt"))
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        assert "specrs=specrs.cli:main" in archive.read(entry_points).decode().replace(" ", "")


def test_wheel_has_nothing_else(wheel_files: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in wheel_files} == {"specrs"}
    assert [name for name in wheel_files if "test" in name or "__pycache__" in name] == []


def test_weights_in_the_wheel_are_the_committed_ones(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(PAIR):
            assert archive.read(name) == (ROOT / "python" / name).read_bytes(), name


def test_sdist_builds_alone(sdist_files: set[str]) -> None:
    rust = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("rust/*/src/**/*.rs")}
    python = {f"python/{name}" for name in SOURCES | KERNELS | PAIR}
    expected = rust | python | {"Cargo.toml", "Cargo.lock", "pyproject.toml", "LICENSE", "README.md"}
    assert expected - sdist_files == set()
