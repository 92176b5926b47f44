"""Imports that native serving needs: only the default dependencies, so no torch.

`tests/llm/test_without_torch.py` shows the same by serving. This test names the module that is at fault.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from repository.test_import_graph import modules

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
ENTRIES = (
    "specrs.llm",
    "specrs.async_llm",
    "specrs.engine.build",
    "specrs.server.run",
    "specrs.cli",
    "specrs.cli.generate",
    "specrs.cli.serve",
    "specrs.cli.demo",
    "specrs.cli.bench.throughput",
    "specrs.cli.bench.latency",
    "specrs.cli.bench.acceptance",
    "specrs.bench.offline",
    "specrs.structured.grammar",
    "specrs.structured.worker",
    "specrs.server.template_worker",
)
"""Modules that an engine on a CPU starts from, some of them imported when they are first needed."""
IMPORT_NAMES = {"pyyaml": "yaml"}
"""Distributions whose module has another name."""
ALLOWED = {IMPORT_NAMES.get(name, name) for name in (item.split(">")[0] for item in PROJECT["dependencies"])}
ALLOWED |= {"pydantic_core"}  # pydantic's own


def loaded(source: str) -> Iterator[str]:
    """Yield the modules that a module with this text imports at its top level, with the packages they are in."""

    def visit(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            match node:
                case ast.Import(names=names):
                    yield from (alias.name for alias in names)
                case ast.ImportFrom(module=str(module), names=names, level=0):
                    yield module
                    yield from (f"{module}.{alias.name}" for alias in names)
                case ast.If(test=test):
                    if "TYPE_CHECKING" not in ast.unparse(test):
                        yield from visit([*node.body, *node.orelse])
                case ast.Try():
                    yield from visit([*node.body, *node.orelse, *node.finalbody])
                    yield from (name for handler in node.handlers for name in visit(handler.body))
                case ast.ClassDef() | ast.With():
                    yield from visit(node.body)

    for name in visit(ast.parse(source).body):
        parts = name.split(".")
        yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def closure(texts: Mapping[str, str], entries: tuple[str, ...]) -> dict[str, set[str]]:
    """Return the third-party modules that importing `entries` imports, by the module of the package that names them."""
    found: dict[str, set[str]] = {}
    left, seen = list(entries), set(entries)
    while left:
        module = left.pop()
        names = set(loaded(texts[module]))
        new = {name for name in names if name in texts} - seen
        seen |= new
        left += new
        tops = {name for name in names if "." not in name} - sys.stdlib_module_names - {"specrs"}
        if tops:
            found[module] = tops
    return found


def test_the_native_path_needs_the_default_dependencies_alone() -> None:
    found = closure(modules(), ENTRIES)
    assert {module: names - ALLOWED for module, names in found.items() if names - ALLOWED} == {}
    assert {"numpy", "llguidance", "uvicorn"} <= set().union(*found.values())


@pytest.mark.parametrize(
    "line",
    [
        "import torch",
        "import torch.nn.functional as F",
        "from torch import Tensor",
        "try:\n    import torch\nexcept ImportError:\n    pass",
        "if True:\n    import torch",
        "class A:\n    import torch",
    ],
)
def test_an_import_is_found(line: str) -> None:
    texts = {"specrs.a": "from specrs.b import c", "specrs.b": "", "specrs.b.c": line}
    assert closure(texts, ("specrs.a",)) == {"specrs.b.c": {"torch"}}


@pytest.mark.parametrize(
    "line",
    [
        "def f():\n    import torch",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "class A:\n    def f(self):\n        import torch",
    ],
)
def test_imports_in_functions_and_for_types_are_none(line: str) -> None:
    assert closure({"specrs.a": line}, ("specrs.a",)) == {}
