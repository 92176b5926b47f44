"""Modules of each Rust crate import each other without circles."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from repository.test_import_graph import circles

ROOT = Path(__file__).parents[2]
CRATES = sorted(path.parent.parent.name for path in ROOT.glob("rust/*/src/lib.rs"))

Module = tuple[str, ...]
"""A module's path in its crate; empty for the crate's root."""


def code(source: str) -> str:
    """Return `source` without comments, strings and test modules."""
    source = re.sub(r'//[^\n]*|/\*.*?\*/|\'(?:\\.|[^\'\\])\'|"(?:\\.|[^"\\])*"', "", source, flags=re.DOTALL)
    while found := re.search(r"#\[cfg\(test\)\]\s*mod \w+ \{", source):
        depth, end = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(source[end], 0)
            end += 1
        source = source[: found.start()] + source[end:]
    return source


def expand(tree: str) -> Iterator[tuple[str, ...]]:
    """Return the paths of a `use` tree such as `a::{b, c::{d, e as f}}`, without `self` and aliases."""
    head, brace, rest = tree.partition("{")
    prefix = tuple(part for part in re.split(r"\s*::\s*", re.sub(r"\s+as\s+\w+", "", head).strip()) if part)
    if not brace:
        yield tuple(part for i, part in enumerate(prefix) if part != "self" or i == 0)
        return
    depth, start, inner = 0, 0, rest[: rest.rindex("}")]
    for i, letter in enumerate(f"{inner},"):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            if branch := inner[start:i].strip():
                below = ((),) if branch == "self" else expand(branch)
                yield from (prefix + path for path in below)
            start = i + 1


class Crate:
    """The modules of a crate and what each names in others."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """Read a crate. `files`: sources by their path in `src`. Test modules in files of their own are left out."""
        self.modules: dict[Module, str] = {}
        for name, source in files.items():
            parts = name.removesuffix(".rs").split("/")
            module = tuple(parts[:-1] if parts[-1] in ("lib", "mod") else parts)
            if "tests" not in module:
                self.modules[module] = code(source)
        self.reexports: dict[Module, dict[str, Module]] = {module: {} for module in self.modules}
        self.globs: dict[Module, list[Module]] = {module: [] for module in self.modules}
        for module, text in self.modules.items():
            for tree in re.findall(r"pub(?:\([^)]*\))?\s+use\s+([^;]+);", text):
                for path in expand(tree):
                    place, names = self._split(self._absolute(module, path))
                    if place is not None and place != module and names[:1] == ("*",):
                        self.globs[module].append(place)
                    elif place is not None and place != module:
                        self.reexports[module][path[-1]] = place

    def graph(self) -> dict[str, frozenset[str]]:
        """Return the modules that each module names. Names that its ancestors define do not count."""
        return {
            self._name(module): frozenset(
                self._name(named) for named in self._named(module) if named != module[: len(named)]
            )
            for module in self.modules
        }

    def _named(self, module: Module) -> Iterator[Module]:
        text = self.modules[module]
        use = r"\buse\s+([^;]+);"
        paths = [path for tree in re.findall(use, text) for path in expand(tree)]
        text = re.sub(use, "", text)
        paths += [tuple(path.split("::")) for path in re.findall(r"\b(?:(?:crate|super|self)::)+\w+(?:::\w+)*", text)]
        children = {known[-1] for known in self.modules if known and known[:-1] == module}
        paths += [(child,) for child in re.findall(r"\b(\w+)::", text) if child in children]
        for path in paths:
            place, names = self._split(self._absolute(module, path))
            if place is not None:
                yield self._home(place, names[0] if names else None)

    def _absolute(self, module: Module, path: tuple[str, ...]) -> Module | None:
        """Return `path` from the crate's root; None if it leads to another crate."""
        if path[:1] == ("crate",):
            return path[1:]
        place = module
        while path[:1] in (("super",), ("self",)):
            place, path = place[:-1] if path[0] == "super" else place, path[1:]
        if place != module or (*place, *path[:1]) in self.modules:
            return place + path
        return None

    def _split(self, path: Module | None) -> tuple[Module | None, tuple[str, ...]]:
        """Return the module that `path` leads to, and the names in it."""
        if path is None:
            return None, ()
        end = next(end for end in range(len(path), -1, -1) if path[:end] in self.modules)
        return path[:end], path[end:]

    def _home(self, place: Module, name: str | None) -> Module:
        """Return the module that defines what `place` has under `name`."""
        if name in self.reexports[place]:
            return self._home(self.reexports[place][name], name)
        globs = self.globs[place]
        defined = rf"\b(?:fn|struct|enum|trait|const|type|static|macro_rules!)\s+{name}\b"
        if name is None or not globs or re.search(defined, self.modules[place]):
            return place
        return next((glob for glob in globs if re.search(rf"\b{name}\b", self.modules[glob])), place)

    @staticmethod
    def _name(module: Module) -> str:
        return "::".join(("crate", *module))


@pytest.mark.parametrize("crate", CRATES)
def test_no_circle(crate: str) -> None:
    folder = ROOT / "rust" / crate / "src"
    graph = Crate({path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.rs")}).graph()
    assert sum(map(len, graph.values())) > len(graph) / 2, "imports are read"
    assert circles(graph) == []


def test_kernels_need_no_other_crate() -> None:
    """Check that the crate of the kernels, which takes longest to compile, is compiled only when it changes itself."""
    manifest = tomllib.loads((ROOT / "rust/cpu-kernels/Cargo.toml").read_text())
    tables = [manifest, *manifest["target"].values()]
    assert {name for table in tables for name in table["dependencies"]} == {"libc", "thiserror"}
    assert manifest["lib"]["test"] is False, "unit tests would compile the kernels once more"


@pytest.mark.parametrize(
    "line",
    [
        "use crate::b::X;",
        "use crate::{c::Y, b::{self, X}};",
        "pub(crate) use crate::b::X as Z;",
        "fn f(x: crate::b::X) {}",
        "use super::X;",
        "use crate::X;",
        "use crate::b::inner::W;",
    ],
)
def test_circles_are_found(line: str) -> None:
    files = {
        "lib.rs": "mod a;\nmod b;\nmod c;\npub use b::X;",
        "a.rs": line,
        "b/mod.rs": "mod inner;\npub use inner::*;\nuse crate::a::A;\npub struct X;",
        "b/inner.rs": "use crate::a::A;\npub struct W;",
        "c.rs": "use crate::a::A;\npub struct Y;",
    }
    found = circles(Crate(files).graph())
    assert len(found) == 1
    assert "crate::a" in found[0]
    assert {"crate::b", "crate::b::inner"} & {*found[0]}


@pytest.mark.parametrize(
    "line",
    [
        "// use crate::b::X;",
        'const T: &str = "crate::b::X";',
        "#[cfg(test)]\nmod tests { use crate::b::X; mod more { } }",
        "use crate::Root;",
        "use std::{b::X, fmt};",
        "use other::b::X;",
    ],
)
def test_only_imports_of_modules_count(line: str) -> None:
    files = {"lib.rs": "mod a;\nmod b;\npub struct Root;", "a.rs": line, "b.rs": "use crate::a::A;\npub struct X;"}
    assert circles(Crate(files).graph()) == []


def test_names_are_found_where_they_are_defined() -> None:
    """Check that the graph of modules finds names where they are defined. A name that a glob re-exports counts for the
    module that defines it, and a child that uses a name of its ancestor counts as no dependency."""
    files = {
        "lib.rs": "pub mod a;\nmod b;",
        "a/mod.rs": "mod deep;\nmod other;\npub use deep::*;\npub struct Top;",
        "a/deep.rs": "use super::Top;\npub struct Deep;",
        "a/other.rs": "use super::Deep;",
        "b.rs": "use crate::a::{Deep, Top};",
    }
    graph = Crate(files).graph()
    assert graph["crate::b"] == {"crate::a", "crate::a::deep"}
    assert graph["crate::a::other"] == {"crate::a::deep"}
    assert graph["crate::a::deep"] == frozenset()
