"""The example of a host loop around the parts: its text is the same for every K, and its statistics agree with the
text."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PROMPT = [3, 14, 15, 9, 26]


@pytest.fixture(scope="module")
def host() -> ModuleType:
    module = ModuleType("host_loop")
    exec(compile((ROOT / "examples/host_loop.py").read_text(), "host_loop.py", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_text_does_not_depend_on_k(host: ModuleType, k: int) -> None:
    vanilla, _ = host.generate(PROMPT, 60, 0)
    text, statistics = host.generate(PROMPT, 60, k)
    assert text == vanilla
    assert len(set(text)) > 5
    assert statistics.drafts + statistics.accepted_tokens == len(text) - 1, "the first token is the prompt's pass"
    assert 0 < statistics.accepted_tokens < statistics.draft_tokens


def test_it_runs_as_a_script() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples/host_loop.py"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "tokens accepted" in done.stdout
