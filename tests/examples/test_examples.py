"""Each example that loads a model, on the bundled pair: it prints what the engine writes.

Those that need another package as a client run in tests/server/clients/test_examples.py.
"""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from lora.adapters import Spec, write_adapter
from specrs import LLM, SamplingParams
from specrs.pair import TARGET

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=1, threads=1)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs an example and returns what it printed and its global names."""

    def run(name: str, *argv: str) -> tuple[str, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", [name, *argv])
        names = runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out, names

    return run


def continued(llm: LLM, text: str, tokens: int) -> str:
    """Return the greedy continuation without drafts."""
    (output,) = llm.generate(text, SamplingParams(temperature=0.0, max_tokens=tokens), use_tqdm=False)
    return output.outputs[0].text


def test_chat(run: Any, llm: LLM) -> None:
    printed, names = run("chat.py")
    first, second = (turn["content"] for turn in names["messages"] if turn["role"] == "assistant")
    assert first == continued(llm, "def mean(values):", 64)
    # the pair's template joins what was said with newlines
    assert second == continued(llm, f"def mean(values):\n{first}\ndef median(values):", 64)
    assert printed == f"> def mean(values):\n{first}\n\n> def median(values):\n{second}\n\n"


def test_stream(run: Any, llm: LLM) -> None:
    printed, _ = run("stream.py")
    text, figures = printed.split("\n\n96 tokens, ")
    assert text == continued(llm, "class Stack:", 96)
    assert re.fullmatch(r"\d+ of them drafted and accepted\n", figures)


def test_json_schema(run: Any) -> None:
    printed, names = run("json_schema.py")
    jsonschema.validate(json.loads(printed), names["SCHEMA"])


def test_lora(run: Any, llm: LLM, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, TARGET, Spec(("q_proj", "down_proj"), rank=8, alpha=16), seed=1)
    printed, _ = run("lora.py", str(adapter))
    base, tuned = printed.removeprefix("--- base\n").removesuffix("\n\n").split("\n\n--- tuned\n")
    assert base == continued(llm, "def add(a, b):", 32).rstrip("\n")
    assert tuned
    assert tuned != base


def test_drafters(run: Any) -> None:
    printed, names = run("drafters.py")
    *rows, last = printed.splitlines()
    assert [row[:20].rstrip() for row in rows] == ["no drafts", *names["methods"]]
    lengths = [float(re.findall(r"([\d.]+) tokens per step", row)[0]) for row in rows]
    assert lengths[0] == 1.0
    assert min(lengths[1:]) > 1.0
    assert last == "the same text with all of them"


def test_async_requests(run: Any, llm: LLM) -> None:
    printed, names = run("async_requests.py")
    texts = [f"> {prompt!r}\n{continued(llm, prompt, 48)}\n\n" for prompt in names["PROMPTS"]]
    assert printed == "".join(texts)


def test_the_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    """Run the notebook's cells in order and in one namespace, as a kernel does. It is stored without outputs."""
    notebook = json.loads((FOLDER / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert names["same"] == [True, True]
    assert "tokens per step with drafts" in capsys.readouterr().out


def test_the_list_names_every_example() -> None:
    named = re.findall(r"\]\(([\w/.]+)\)", (FOLDER / "README.md").read_text())
    assert all((FOLDER / name).is_file() for name in named)
    files = {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".ipynb")}
    assert files <= set(named)
