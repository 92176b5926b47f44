"""Every block of code in the README and the docs runs, or is checked by the parser that it is meant for. Models are the
bundled pair.

The block of docs/start.md has a test of its own, which runs it (tests/repository/test_start.py).
"""

import ast
import asyncio
import importlib.util
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from specrs import pair
from specrs.cli import parser
from specrs.cli.arguments import spell
from specrs.cli.config_file import with_config_file

from . import curl

ROOT = Path(__file__).parents[2]
MAKEFILES = ["Makefile", "environments/targets.mk", "scripts/checks.mk"]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))
LANGUAGES = {"python", "sh", "json", "toml", "yaml", ""}
OTHERS = {"claude", "torchrun", "vllm-router", "export", "for", "done"}
"""First words of commands that are neither specrs's nor checked: other programs, and words of the shell."""


def blocks(language: str) -> list[Any]:
    """Return the code blocks of a language, each with its page and line."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if match[1] == language:
                line = text.count("\n", 0, match.start()) + 1
                found.append(pytest.param(match[2], id=f"{page.relative_to(ROOT)}:{line}"))
    return found


def commands() -> list[Any]:
    """The commands of all shell blocks."""
    return [
        pytest.param(words, id=f"{block.id} {' '.join(words[:2])}")
        for block in blocks("sh")
        for words in _commands(str(block.values[0]))
    ]


def _commands(block: str) -> Iterator[list[str]]:
    for line in block.replace("\\\n", " ").splitlines():
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for word in [*lexer, ";"]:
            if word in (";", "&", "&&", "|"):
                if words[:1] == ["do"]:
                    words = words[1:]
                if words:
                    yield words
                words = []
            else:
                words.append("8001" if word == "$port" else word)


def test_every_block_has_a_language_that_is_checked() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    fences = re.findall(r"^```(\w*)$", text, re.MULTILINE)
    assert len(fences) % 2 == 0
    assert set(fences[::2]) == LANGUAGES
    assert set(fences[1::2]) == {""}


@pytest.mark.parametrize("words", commands())
def test_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = words
    if name.rpartition("/")[2] == "specrs":
        try:
            parser().parse_args(spell(rest))
        except SystemExit:
            pytest.fail(capsys.readouterr().err)
    elif name == "make":
        makefiles = "".join((ROOT / path).read_text() for path in MAKEFILES)
        targets = {name for names in re.findall(r"^([\w -]+):", makefiles, re.MULTILINE) for name in names.split()}
        assert {word for word in rest if "=" not in word} <= targets
    elif name == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = re.fullmatch(r"specrs(?:\[(.*)\])?", rest[-1])
        assert asked is not None
        assert set((asked[1] or "bench").split(",")) <= set(extras)
    elif name == "curl":
        curl.read(rest)  # tests/docs/test_curl.py sends it
    elif name in ("python", "python3"):
        module = rest[1] if rest[0] == "-m" else None
        if module is None:
            assert (ROOT / rest[0]).is_file()
        elif module.startswith("specrs."):
            assert importlib.util.find_spec(module) is not None
    elif "/" in name:
        assert (ROOT / name).is_file()
    else:
        assert name in OTHERS


@pytest.mark.parametrize("block", blocks("toml"))
def test_toml(block: str) -> None:
    assert tomllib.loads(block)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_yaml(block: str, tmp_path: Path) -> None:
    """Check that the block is a file for `specrs serve --config`."""
    file = tmp_path / "specrs.yaml"
    file.write_text(block)
    parser().parse_args(with_config_file(["serve", "--config", str(file)]))


@pytest.mark.parametrize("block", blocks("json"))
def test_json(block: str) -> None:
    json.loads(block)


@pytest.mark.parametrize("block", [block for block in blocks("python") if "start.md" not in str(block.id)])
def test_python(
    block: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "from ray" in block:
        _is_there(block)
        return
    for model, path in (("Qwen/Qwen3-1.7B", pair.TARGET), ("Qwen/Qwen3-0.6B", pair.DRAFT)):
        block = block.replace(model, str(path))
    draft = block.replace('{"model": "..."', f'{{"model": "{pair.DRAFT}"').replace('"..."', f'"{pair.TARGET}"')
    monkeypatch.chdir(tmp_path)  # blocks may write files
    names: dict[str, Any] = {}
    exec("from specrs import LLM, AsyncLLM, SamplingParams", names)
    body = compile(draft, "block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    made = eval(body, names)
    if inspect.iscoroutine(made):
        asyncio.run(made)
    assert len(capsys.readouterr().out.split()) > 1


def _is_there(block: str) -> None:
    """Check a block whose packages are not installed: specrs modules define the names that it imports from them."""
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("specrs"):
            source = (ROOT / "python" / f"{node.module.replace('.', '/')}.py").read_text()
            defined = {each.name for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)}
            assert {alias.name for alias in node.names} <= defined
