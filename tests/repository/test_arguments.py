"""No function takes more than eight arguments: what belongs together is a struct.

Not counted, with the reason:
- a Triton kernel: what a GPU is handed are pointers and numbers, it knows no structs. The function before it does;
- what a constructor takes by keyword alone: settings, each of which is read at the call by its name;
- functions of the Rust extension, in `rust/py`: numpy arrays by name, and a struct of them would be a Python object
  made at every call. clippy counts all other Rust, to seven.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 8
FOLDERS = ("python/specrs", "kernels", "scripts", "examples", "benches")


def too_many(source: str) -> dict[str, int]:
    """Return the functions of a module that take more than `MOST` arguments, with the numbers of arguments. Kernels are
    left out, and keyword-only arguments of `__init__` do not count."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_kernel(node):
            continue
        a = node.args
        names = [arg.arg for arg in (*a.posonlyargs, *a.args, *(() if node.name == "__init__" else a.kwonlyargs))]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > MOST:
            found[node.name] = count
    return found


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)


def sources() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if "specrs/kernels" not in path.as_posix()  # the link to kernels/
    }


def test_nothing_takes_more_than_eight() -> None:
    found = {path: too_many(source) for path, source in sources().items()}
    assert {path: functions for path, functions in found.items() if functions} == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a, b, c, d, e, f, g, h): ...", {}),
        ("def f(a, b, c, d, e, f, g, h, i): ...", {"f": 9}),
        ("async def f(a, b, c, d, /, e, f, g, *, h, i=1): ...", {"f": 9}),
        ("class C:\n    def f(self, a, b, c, d, e, f, g, h): ...", {}),
        ("class C:\n    def f(self, a, b, c, d, e, f, g, h, i): ...", {"f": 9}),
        ("class C:\n    def __init__(self, a, *, b, c, d, e, f, g, h, i, j): ...", {}),
        ("class C:\n    def __init__(self, a, b, c, d, e, f, g, h, i): ...", {"__init__": 9}),
        ("@triton.jit(do_not_specialize=['a'])\ndef f(a, b, c, d, e, f, g, h, i): ...", {}),
        ("@torch.library.custom_op('x', mutates_args=())\ndef f(a, b, c, d, e, f, g, h, i): ...", {"f": 9}),
        ("def f():\n    def g(a, b, c, d, e, f, g, h, i): ...", {"g": 9}),
    ],
)
def test_the_count_sees(source: str, expected: dict[str, int]) -> None:
    assert too_many(source) == expected


def test_clippy_is_silenced_in_the_extension_alone() -> None:
    silenced = {
        path.relative_to(ROOT).as_posix()
        for folder in ("rust", "benches", "fuzz")
        for path in (ROOT / folder).rglob("*.rs")
        if "target" not in path.parts and re.search(r"too_many_arguments", path.read_text(encoding="utf-8"))
    }
    assert {path for path in silenced if not path.startswith("rust/py/src/")} == set()
    assert "too-many-arguments-threshold" not in "".join(
        path.read_text() for path in (ROOT / "clippy.toml", ROOT / ".clippy.toml") if path.exists()
    )
