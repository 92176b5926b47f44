"""Phrases of old formats that may not occur in error messages, because all have one format: `field=value: must be ...`,
or `field=value: what is wrong; what to do instead`."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PHRASES = {
    r"not allowed: expected": "field=value: must be ...",
    r"allowed (?:here )?are": "must be ..., or what to use instead",
    r"expected (?:is|are)": "must be ..., or what to use instead",
    r"which is not allowed": "field=value: must be ...",
}


def python_strings(source: str) -> list[str]:
    """Return the string literals of Python source but docstrings. Adjacent literals are one string."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    literals = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings)
    return [node.value for node in literals if isinstance(node.value, str)]


def rust_strings(source: str) -> list[str]:
    """Return the lines of Rust source that have strings. Comments are left out; a string that a backslash continues on
    the next line is one line."""
    joined = re.sub(r"\\\n\s*", "", source)
    return [line for line in joined.splitlines() if '"' in line and not line.lstrip().startswith("//")]


@functools.cache
def strings() -> list[tuple[Path, str]]:
    sources = {ROOT / "python" / "specrs": ("*.py", python_strings), ROOT / "rust": ("*.rs", rust_strings)}
    return [
        (path.relative_to(ROOT), text)
        for folder, (pattern, strings_of) in sources.items()
        for path in folder.rglob(pattern)
        if "target" not in path.parts
        for text in strings_of(path.read_text())
    ]


@pytest.mark.parametrize("phrase", PHRASES)
def test_messages(phrase: str) -> None:
    pattern = re.compile(rf"\b(?:{phrase})\b")
    assert [f"{path}: {text.strip()}" for path, text in strings() if pattern.search(text)] == [], PHRASES[phrase]


def test_strings_are_found() -> None:
    """Check what counts as a string: continued literals are one, docstrings and comments are none."""
    python = '"""Ids allowed are few."""\nraise ValueError(f"{n} ids, allowed "\n    "are 2")  # expected is 2\n'
    assert "".join(python_strings(python)) == " ids, allowed are 2"
    rust = '/// "x" is not allowed: expected y\nlet a = "x is not \\\n         allowed: expected y";\n'
    assert rust_strings(rust) == ['let a = "x is not allowed: expected y";']
