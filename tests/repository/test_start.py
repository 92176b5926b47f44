"""docs/start.md runs as printed, and its step follows the target's distribution exactly."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

PAGE = Path(__file__).parents[2] / "docs/start.md"
STREAMS = 2000


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's one block of Python defines."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_it_runs_and_drafts_are_accepted(page: dict[str, Any]) -> None:
    with torch.random.fork_rng():
        tokens, emitted = page["generate"](page["target"], page["draft"], page["prompt"], 60, 4, 0)
    assert tokens.equal(page["alone"])
    assert {1, 5} <= set(emitted), "iterations that accept nothing, and all"


def test_its_iterations_keep_the_rules(page: dict[str, Any]) -> None:
    """Check K_r, n' and draft_len' of every iteration, from what the page's code feeds to draft and target."""
    fed: dict[Any, list[range]] = {}
    forward = page["Model"].forward

    class Watched(page["Model"]):  # type: ignore[misc]
        def forward(self, tokens: Tensor, first: int, temperature: float) -> Tensor:
            fed.setdefault(self, []).append(range(first, first + len(tokens)))
            return forward(self, tokens, first, temperature)  # type: ignore[no-any-return]

    with torch.random.fork_rng():
        torch.manual_seed(3)
        for k, temperature in ((0, 0.0), (1, 0.0), (5, 0.0), (3, 1.0), (8, 0.7)):
            target, draft = (
                Watched(context, page[name].embedding, page[name].head)
                for context, name in ((64, "target"), (30, "draft"))
            )
            tokens, draft_len, n = page["prompt"], 0, 5
            target.forward(tokens[:-1], 0, temperature)
            while n < 40:
                fed.clear()
                tokens, after, m = page["step"](target, draft, tokens, draft_len, k, 40, temperature)
                drafts = max(min(k, 40 - n - 1, 30 - n + 1), 0)
                assert fed[target] == [range(n - 1, n + drafts)]
                assert len(tokens) == n + m + 1 <= 40
                if drafts:
                    first, *later = fed[draft]
                    assert first == range(draft_len, n)
                    assert later == [range(n + i - 2, n + i - 1) for i in range(2, drafts + 1)]
                    assert after == min(n + m, later[-1].stop if later else n)
                else:
                    assert draft not in fed
                    assert after == draft_len
                n, draft_len = n + m + 1, after


def test_sampled_text_has_the_targets_distribution(page: dict[str, Any]) -> None:
    """Check by chi-square that pairs of tokens after the prompt have the target's distribution, by steps of two drafts
    and of one."""
    prompt, vocab = page["prompt"], page["VOCAB"]
    target, draft = page["target"], page["draft"]

    def alone(tokens: Tensor) -> Tensor:
        return target.forward(tokens, 0, 2.0)[-1]  # type: ignore[no-any-return]

    first = alone(prompt)
    exact = torch.stack([first[a] * alone(torch.cat((prompt, torch.tensor([a])))) for a in range(vocab)])
    counts = torch.zeros(vocab, vocab)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        for k in (1, 2):
            for _ in range(STREAMS // 2):
                tokens, _ = page["generate"](target, draft, prompt, len(prompt) + 3, k, 2.0)
                counts[tokens[-3], tokens[-2]] += 1
    # Cells of few together, so that the statistic is normal enough.
    order = exact.flatten().argsort(descending=True)
    expected, seen = exact.flatten()[order] * STREAMS, counts.flatten()[order]
    cells = [0, *range(1, 24), len(order)]
    expected, seen = (torch.stack([x[a:b].sum() for a, b in pairwise(cells)]) for x in (expected, seen))
    assert expected.min() >= 10
    degrees = len(expected) - 1
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert (chi_square - degrees) / (2 * degrees) ** 0.5 < 4.5
