"""docs/environment.md has each environment variable that the package and its kernels read, and no other. Rust code
reads none."""

import ast
import re
from pathlib import Path

import pytest
from module_files import load_file

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("python/specrs", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]
made = load_file("environment_page", ROOT / "scripts/environment_page.py")
CONSTANT = re.compile(r"[A-Z_]*VARIABLES?")
"""Names of constants that hold names of variables."""


def constants(text: str) -> dict[str, set[str]]:
    """Return the constants of a file that are named `*VARIABLE` or `*VARIABLES`, with the strings in each."""
    return {
        node.targets[0].id: {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and CONSTANT.fullmatch(node.targets[0].id)
    }


def reads(text: str, known: dict[str, set[str]]) -> set[str]:
    """Return the variables that a file reads. A key is a string, or comes from a constant among `known`.

    Raises `AssertionError` for a read of another form, which this test could not follow.
    """
    keys: list[ast.expr] = []
    mentions = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            assert not {alias.name for alias in node.names} & {"environ", "getenv"}
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
            mentions += 1
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            keys.append(node.slice)
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[-1]) == "os.environ":
            keys.append(node.left)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
            keys.append(node.args[0])
        elif isinstance(node, ast.Dict):  # copies for child processes
            mentions -= sum(key is None and ast.unparse(value) == "os.environ" for key, value in _items(node))
    assert mentions == len(keys), "the environment is read in a form that this test does not follow"
    names = {key.value for key in keys if isinstance(key, ast.Constant)}
    if len(names) < len({ast.unparse(key) for key in keys}):
        mentioned = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)} & known.keys()
        assert mentioned, "a key that is neither a string nor from a constant *VARIABLE"
        names = names.union(*(known[name] for name in mentioned))
    return {str(name) for name in names}


def _items(node: ast.Dict) -> list[tuple[ast.expr | None, ast.expr]]:
    return list(zip(node.keys, node.values, strict=True))


def test_the_page_has_what_the_code_reads() -> None:
    known: dict[str, set[str]] = {}
    for path in SOURCES:
        for name, values in constants(path.read_text()).items():
            known[name] = known.get(name, set()) | values
    found = set().union(*(reads(path.read_text(), known) for path in SOURCES))
    listed = {name for variables in made.OWN.values() for name in variables}
    assert listed - found == set(), "listed, but not read"
    assert found - listed == set(), "read, but not listed"


def test_rust_reads_none() -> None:
    sources = list(ROOT.glob("rust/*/src/**/*.rs"))
    assert sources
    pattern = re.compile(r"env::vars?\b|env::var_os|getenv|option_env!")
    assert [path for path in sources if pattern.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("os.environ['A'] + os.environ.get('B', '') + os.getenv('C')", {"A", "B", "C"}),
        ("x = 'A' in os.environ or 'B' not in os.environ", {"A", "B"}),
        ("d = {**os.environ, 'A': '1'}", set()),
        ("next(n for n in VARIABLES if os.environ.get(n))", {"V", "W"}),
    ],
)
def test_reads_are_found(text: str, names: set[str]) -> None:
    assert reads(text, {"VARIABLES": {"V", "W"}}) == names


@pytest.mark.parametrize("text", ["from os import environ", "e = os.environ", "os.environ.get(x)", "os.environ[f()]"])
def test_other_reads_are_an_error(text: str) -> None:
    with pytest.raises(AssertionError):
        reads(text, {"VARIABLES": {"V"}})
