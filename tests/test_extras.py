"""The error if a package of an extra is missing, and that each extra installs the packages it is named for."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from specrs import extras
from specrs.cli import main
from specrs.errors import InvalidConfigError
from specrs.extras import missing, require

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def distribution(name: str) -> str:
    """Return the normalised name of a requirement's distribution, or of a package as a message writes it."""
    found = re.match(r"[\w.-]+", name)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


EXTRAS = {
    extra: {distribution(requirement) for requirement in requirements}
    for extra, requirements in PROJECT["optional-dependencies"].items()
}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield each call of `require` or `missing` in the package, with its file and line.

    A constant of the module stands for its value.
    """
    for path in sorted((ROOT / "python/specrs").rglob("*.py")):
        source = path.read_text()
        if not re.search(r"\b(require|missing)\(", source):
            continue  # most files: parsing all of them takes every worker a second
        tree = ast.parse(source)
        constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if named and node.func.id in ("require", "missing") and path.name != "extras.py":
                node.args = [constants.get(arg.id, arg) if isinstance(arg, ast.Name) else arg for arg in node.args]
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


CALLS = list(calls())


def test_an_installed_package_is_no_error() -> None:
    require("numpy", "cuda", "--x=1")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    message = r"^--device=cuda: needs torch; install it: pip install 'specrs\[cuda\]'$"
    with pytest.raises(InvalidConfigError, match=message):
        require("torch", "cuda", "--device=cuda")
    assert re.fullmatch(message.strip("^$"), str(missing("torch", "cuda", "--device=cuda")))


def test_calls_are_found() -> None:
    assert len(CALLS) >= 10


@pytest.mark.parametrize("call", [call for _, call in CALLS], ids=[place for place, _ in CALLS])
def test_the_extra_of_a_call_installs_its_package(call: ast.Call) -> None:
    package, extra = call.args[:2]
    assert isinstance(extra, ast.Constant)
    if isinstance(package, ast.Constant):
        name = distribution(package.value)
    else:  # "OpenTelemetry (module)", whose module is known when it is missing
        assert isinstance(package, ast.JoinedStr)
        assert isinstance(package.values[0], ast.Constant)
        name = distribution(package.values[0].value)
    assert [item for item in EXTRAS[extra.value] if item.startswith(name)]


def test_the_modules_of_each_extra_are_those_of_its_packages() -> None:
    names = {extra: {module.replace(".", "-") for module in modules} for extra, (_, modules) in extras.EXTRAS.items()}
    others = {"kv-events": {"pyzmq"}, "cublaslt": {"nvmath-python"}}
    assert names | others == EXTRAS
    assert {extra: names[extra] for extra in others} == {"kv-events": {"zmq"}, "cublaslt": {"nvmath"}}


def test_an_extra_is_there_if_all_its_modules_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.EXTRAS, "x", ("", ("json", "no_such_package.part")))
    monkeypatch.setitem(extras.EXTRAS, "y", ("", ("json", "email.message")))
    assert not extras.has("x")
    assert extras.has("y")


def test_extras_that_messages_and_pages_name_exist() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "python/specrs").rglob("*.py")]
    named = {
        extra.strip()
        for path in pages
        for group in re.findall(r"specrs\[([a-z, -]+)\]", path.read_text())
        for extra in group.split(",")
    }
    assert named
    assert named <= EXTRAS.keys()


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("demo --plot x.png", "matplotlib", "bench"),
        ("bench serve", "aiohttp", "bench"),
        ("bench sweep --output x.parquet --drafter ngram --k 1", "pyarrow", "bench"),
        ("bench plot x.parquet", "matplotlib", "bench"),
        ('serve --profiler-config {"torch_profiler_dir":"x"}', "torch", "transformers"),
        ("tune --model x", "torch", "cuda"),
        ("convert-head x y", "torch", "transformers"),
        ("forecast --roofline h100", "torch", "cuda"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(
    command: str,
    package: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == package else find_spec(name))
    assert main(command.split()) == 2
    assert f"needs {package}; install it: pip install 'specrs[{extra}]'" in capsys.readouterr().err
