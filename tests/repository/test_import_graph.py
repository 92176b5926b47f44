"""Imports run downwards and without cycles, including imports for types and inside functions."""

import ast
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Graph = Mapping[str, frozenset[str]]

LAYERS: tuple[tuple[str, ...], ...] = (
    ("_core", "pair", "transfer", "arrays", "record_fields"),
    ("core", "errors"),
    ("options", "vllm_arguments", "extras", "instruction_sets"),
    ("processes", "parallel"),
    ("verify",),
    ("kernels",),
    ("models", "chat_template", "structured.params"),
    ("tokenizer",),
    ("sampling_lists", "model_values"),
    ("drafters", "sampling"),
    ("speculative_config", "kv_events_config"),
    ("engine_options",),
    ("config",),
    ("structured", "inputs", "outputs", "lora_request"),
    ("pooling", "backends"),
    ("reference",),  # what tests compare the others with
    ("engine",),
    ("llm", "async_llm", "integrations"),
    ("bench.results",),  # the file that sweeps write and forecasts read
    ("forecast",),
    ("bench", "server"),
    ("integrations.ray", "integrations.dynamo"),  # over the engine on its thread, and a server's application
    ("cli",),
    ("",),  # the package itself, which names what users import
)
"""Layers of the package from the lowest: a module imports from its own entry and from lower layers, not from other
entries of its layer."""

KERNELS_MAY_IMPORT = ("kernels", "core", "verify", "arrays")


def imports(source: str, module: str, known: Iterable[str]) -> frozenset[str]:
    """Return the modules among `known` that the source text of `module` imports, in any import statement."""
    names = frozenset(known)
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{module}:{node.lineno}"
            # The text of specrs.core is also that of specrs_core, which has an extension of its own next to it.
            named = node.level == 0 or module == "specrs.core"
            assert named, f"{module}:{node.lineno}: an import that does not name the package in full"
            package = f"specrs.{node.module}" if node.level else node.module
            for alias in node.names:
                whole = f"{package}.{alias.name}"
                found.add(whole if whole in names else package)
    return frozenset(found & names - {module})


def modules() -> dict[str, str]:
    """Return the source of every module of the package by its dotted name. This includes the folder kernels/, which the
    package reaches through a symlink."""
    found = {}
    for base, prefix in ((ROOT / "python/specrs", "specrs"), (ROOT / "kernels", "specrs.kernels")):
        for path in chain(base.rglob("*.py"), base.rglob("*.pyi")):
            relative = path.relative_to(base)
            if prefix == "specrs" and relative.parts[0] == "kernels":
                continue
            parts = [prefix, *relative.with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def circles(graph: Graph) -> list[list[str]]:
    """Return groups of modules that import each other, directly or not."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            new = graph[left.pop()] - seen
            seen |= new
            left += new
        return seen

    after = {module: reachable(module) for module in graph}
    groups = {tuple(sorted(m for m in after[module] if module in after[m])) for module in graph}
    return [list(group) for group in sorted(groups) if group]


def room(module: str) -> str:
    """Return the longest entry of LAYERS that contains `module`."""
    name = module.removeprefix("specrs").removeprefix(".")
    entries = [entry for entry in chain(*LAYERS) if f"{name}.".startswith(f"{entry}.") or entry == ""]
    found = max(entries, key=len)
    assert found or not name, f"{module} is in no layer"
    return found


def upward(graph: Graph) -> list[tuple[str, str]]:
    """Return imports that do not run downwards: importer, imported."""
    height = {entry: i for i, layer in enumerate(LAYERS) for entry in layer}
    return [
        (importer, imported)
        for importer, all_imported in sorted(graph.items())
        for imported in sorted(all_imported)
        if room(importer) != room(imported) and height[room(imported)] >= height[room(importer)]
    ]


@pytest.fixture(scope="module")
def graph() -> Graph:
    texts = modules()
    assert len(texts) > 150
    return {module: imports(text, module, texts) for module, text in texts.items()}


def test_no_circle(graph: Graph) -> None:
    assert circles(graph) == []


def test_imports_run_downwards(graph: Graph) -> None:
    assert upward(graph) == []


REFERENCE_MAY_IMPORT = ("reference", "core", "arrays", "verify", "models", "backends.ring", "backends.extras")
"""Modules that the reference may import: configuration, protocols and buffers, but nothing that computes what the
reference is compared with."""


def test_the_reference_imports_nothing_that_it_is_compared_with(graph: Graph) -> None:
    imported = {
        (importer, name)
        for importer, all_imported in graph.items()
        if room(importer) == "reference"
        for name in all_imported
        if not f"{name}.".startswith(tuple(f"specrs.{allowed}." for allowed in REFERENCE_MAY_IMPORT))
    }
    assert imported == set()


def test_nothing_that_serves_imports_the_reference(graph: Graph) -> None:
    """Check that nothing that serves imports the reference: it is slow, and must stay independent of what is compared
    with it."""
    importers = {
        importer
        for importer, all_imported in graph.items()
        if room(importer) != "reference" and any(room(imported) == "reference" for imported in all_imported)
    }
    assert importers == set()
    assert any(room(module) == "reference" for module in graph)


def test_kernels_import_what_they_say(graph: Graph) -> None:
    """Check that kernels import only each other, constants of the core, and the references in `verify`."""
    above = {
        imported
        for importer, all_imported in graph.items()
        if importer.startswith("specrs.kernels")
        for imported in all_imported
        if imported.split(".")[1] not in KERNELS_MAY_IMPORT
    }
    assert above == set()


@pytest.mark.parametrize(
    "line",
    [
        "import b.c",
        "from b import c",
        "from b.c import name",
        "def f():\n    from b.c import name",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from b.c import name",
    ],
)
def test_circles_are_found(line: str) -> None:
    texts = {"a": line, "b": "", "b.c": "import d", "d": "import e, os", "e": "import a", "f": "import a"}
    planted = {module: imports(text, module, texts) for module, text in texts.items()}
    assert circles(planted) == [["a", "b.c", "d", "e"]]
    straight = {**planted, "e": frozenset[str]()}
    assert circles(straight) == []


def test_upward_imports_are_found() -> None:
    planted = {
        "specrs.backends.ring": frozenset({"specrs.core", "specrs.backends.cpu.host", "specrs.engine.request"}),
        "specrs.sampling": frozenset({"specrs.structured.params", "specrs.structured.grammar", "specrs.drafters.base"}),
    }
    assert upward(planted) == [
        ("specrs.backends.ring", "specrs.engine.request"),
        ("specrs.sampling", "specrs.drafters.base"),
        ("specrs.sampling", "specrs.structured.grammar"),
    ]
