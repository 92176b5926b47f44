"""Code outside `backends/` neither compares a device's name nor asks for the class of a model or drafter."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

import pytest

from repository.test_import_graph import modules

DEVICE = re.compile(r"cuda(:.*)?")
"""Strings that are the name of a GPU, or begin one as in `f"cuda:{index}"`."""
NAME_DEVICES = {
    "specrs.engine_options": "the values of `device`, and the options that only GPUs have",
    "specrs.extras": "the names of the package's extras",
}
"""The only modules, at most three, that may name devices as data, with the names that they use."""
ROOTS = frozenset({"Model", "Eagle3Facts", "DrafterCounts", "Runner"})
"""Protocols and classes that models, heads, drafters and runners derive from."""


Trees = Mapping[str, ast.Module]


def elsewhere(trees: Trees) -> dict[str, ast.Module]:
    """Return the modules outside `specrs.backends` and `specrs.kernels`."""
    inside = re.compile(r"specrs\.(backends|kernels)(\.|$)")
    return {name: tree for name, tree in trees.items() if not inside.match(name)}


def literals(tree: ast.Module) -> list[int]:
    """Return the lines of strings that name a GPU. Docstrings are longer, and so no names."""
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [node.lineno for node in strings if DEVICE.fullmatch(str(node.value))]


def derived(trees: Trees) -> set[str]:
    """Return the names of the classes that are models, heads, drafters or runners.

    Such classes derive from `ROOTS`, directly or not, or count the passes that they run.
    """
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = {node.name for node in classes if fields(node) & {"num_passes", "num_target_passes"}} | ROOTS
    while True:
        more = {node.name for node in classes if {name for base in node.bases for name in names(base)} & found}
        if more <= found:
            return found
        found |= more


def fields(node: ast.ClassDef) -> set[str]:
    """Return the names that a class annotates or assigns to, in its body or its methods."""
    targets: list[ast.expr] = []
    for part in ast.walk(node):
        match part:
            case ast.AnnAssign(target=target):
                targets.append(target)
            case ast.Assign(targets=several):
                targets += several
    return {name for target in targets for name in names(target)}


def names(expression: ast.expr) -> Iterator[str]:
    """Yield the last part of each name in an expression, as of `a.B` and `A | B`."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def asked(tree: ast.Module, classes: Iterable[str]) -> list[str]:
    """Return `line: class` for each class of `classes` that `isinstance`, `issubclass` or `match` asks for."""
    found = []
    for node in ast.walk(tree):
        wanted: Iterable[str] = ()
        match node:
            case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, kinds]):
                wanted = names(kinds)
            case ast.MatchClass(cls=kind):
                wanted = names(kind)
        found += [f"{node.lineno}: {name}" for name in wanted if name in classes]  # type: ignore[attr-defined]
    return found


@pytest.fixture(scope="module")
def trees() -> Trees:
    return {name: ast.parse(text) for name, text in modules().items()}


def test_no_literal_names_a_gpu(trees: Trees) -> None:
    assert len(NAME_DEVICES) <= 3
    found = {name: lines for name, tree in elsewhere(trees).items() if (lines := literals(tree))}
    assert found.keys() == NAME_DEVICES.keys(), found
    assert any(literals(tree) for name, tree in trees.items() if name.startswith("specrs.backends.cuda"))


def test_nothing_asks_for_a_class_of_model_or_drafter(trees: Trees) -> None:
    classes = derived(trees)
    known = {
        "NativeDecoder",
        "TorchDecoder",
        "CudaDecoder",
        "NativeEagle3Head",
        "ModelPasses",
        "CpuDrafter",
        "CpuRunner",
    }
    assert known <= classes
    assert {name: lines for name, tree in elsewhere(trees).items() if (lines := asked(tree, classes))} == {}
    assert any(asked(tree, classes) for name, tree in trees.items() if name.startswith("specrs.backends"))


@pytest.mark.parametrize("line", ['x == "cuda"', 'f"cuda:{index}"', 'f(device="cuda:0")', 'x.startswith("cuda")'])
def test_a_literal_is_found(line: str) -> None:
    assert literals(ast.parse(f'"""Serves cuda."""\nx = 1\n{line}')) == [3]


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(x, B)",
        "isinstance(x, int | m.B)",
        "isinstance(x, (A, int))",
        "issubclass(x, A)",
        "match x:\n case B(): 1",
    ],
)
def test_a_question_for_a_class_is_found(line: str) -> None:
    tree = ast.parse(f"class A(Model): 1\nclass B(m.A): 1\nclass C: 1\nisinstance(x, C)\n{line}")
    classes = derived({"a": tree})
    assert classes - ROOTS == {"A", "B"}
    assert len(asked(tree, classes)) == 1
