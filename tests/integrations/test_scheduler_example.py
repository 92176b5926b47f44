"""The example of a host around the scheduler: its texts are what its target writes alone, for any schedule."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/scheduler.py"
PROMPTS = [[*range(20 + i % 3), *range(i)] for i in range(9)]


@pytest.fixture(scope="module")
def host() -> ModuleType:
    module = ModuleType("scheduler_example")
    sys.modules[module.__name__] = module  # where dataclasses look their class up
    exec(compile(SCRIPT.read_text(), SCRIPT.name, "exec"), module.__dict__)
    return module


def alone(host: ModuleType, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the target's own text, without caches, blocks or drafts."""
    target, tokens = host.Model(), list(prompt)
    for _ in range(max_tokens):
        tokens.append(target.after(target.embedding[tokens]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_texts_are_the_targets_own(host: ModuleType, k: int, depth: int) -> None:
    texts, scheduler = host.generate(PROMPTS, 30, k, depth)
    assert texts == [alone(host, prompt, 30) for prompt in PROMPTS]
    assert len({token for text in texts for token in text}) > 10
    statistics = scheduler.acceptance()
    assert (0 < statistics.accepted_tokens < statistics.draft_tokens) == (k > 0)
    assert scheduler.num_cached_tokens > 0
    assert (scheduler.num_free_blocks, scheduler.has_unfinished()) == (scheduler.num_blocks, False)
    scheduler.check_integrity()


def test_it_runs_as_a_script() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    assert "acceptance length" in done.stdout
