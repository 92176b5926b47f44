"""Reasoning is told from the answer, however the text is cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.server.parsers.reasoning import ReasoningParser, begins_with_reasoning

from .test_parsers import cut


def split(text: list[str], *, opened: bool) -> tuple[str, str]:
    parser = ReasoningParser(opened=opened)
    parts = [parser.feed(piece, final=False) for piece in text] + [parser.feed("", final=True)]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("text", "opened", "wanted"),
    [
        ("<think>\nwhy</think>\n\nbecause", False, ("\nwhy", "\n\nbecause")),
        ("\n<think>why", False, ("why", "")),
        ("why</think>because</think>", True, ("why", "because</think>")),
        ("why", True, ("why", "")),
        ("because <think>", False, ("", "because <think>")),
        ("<thi", False, ("", "<thi")),
        ("<think>why</thin", False, ("why</thin", "")),
    ],
)
def test_parts(text: str, opened: bool, wanted: tuple[str, str]) -> None:
    assert split([text], opened=opened) == split([*text], opened=opened) == wanted


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "<", "/think>", "a", " ", "\n"]), max_size=10).map("".join),
    places=st.lists(st.integers(0, 100), max_size=8),
    opened=st.booleans(),
)
def test_any_pieces(text: str, places: list[int], opened: bool) -> None:
    assert split(cut(text, places), opened=opened) == split([text], opened=opened)


def test_prompts() -> None:
    for name in ("qwen3", "deepseek_r1"):
        assert begins_with_reasoning(name, "<|assistant|>\n<think>\n")
        assert not begins_with_reasoning(name, "<|assistant|>\n<think>\n\n</think>\n\n")
    assert begins_with_reasoning("deepseek_r1", "<|assistant|>")
    assert not begins_with_reasoning("qwen3", "<|assistant|>")
