"""Reasoning is separated from the answer, in whatever pieces the text arrives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.server.parsers.table import REASONING_PARSERS, begins_with_reasoning, new_reasoning_parser

from .test_parsers import cut


def split(text: list[str], *, opened: bool, name: str = "qwen3") -> tuple[str, str]:
    parser = new_reasoning_parser(name, opened=opened)
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


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f<|message|>{}"


@pytest.mark.parametrize(
    ("name", "text", "opened", "wanted"),
    [
        ("mistral", "[THINK]why[/THINK]because", False, ("why", "because")),
        ("granite", "Here is my thought process: why Here's my response: because", False, (" why ", " because")),
        ("granite", "Here is Rome.", False, ("", "Here is Rome.")),
        ("gemma4", "<|channel>thought\nwhy<channel|>because", False, ("why", "because")),
        ("gemma4", "<|channel>thoughtful<channel|>because", False, ("thoughtful", "because")),
        ("gemma4", "because", False, ("", "because")),
        ("kimi_k2", "why<|tool_calls_section_begin|>x", True, ("why", "<|tool_calls_section_begin|>x")),
        ("kimi_k2", "<think>why</think>because", True, ("why", "because")),
        ("minimax_m2", "why\n</think>\n\nbecause", True, ("why\n", "\n\nbecause")),
        ("step3", "why</think>because", True, ("why", "because")),
        (
            "openai_gptoss",
            f"{ANALYSIS}why<|end|><|start|>assistant{FINAL}x",
            False,
            ("why", f"<|start|>assistant{FINAL}x"),
        ),
        ("openai_gptoss", f"{ANALYSIS}why", False, ("why", "")),
        ("openai_gptoss", f"{ANALYSIS}why<|end|><|start|>assistant<|chan", False, ("why", "")),
        ("openai_gptoss", f"{ANALYSIS}a<|end|>{CALL}<|call|>{ANALYSIS}b", False, ("ab", f"{CALL}<|call|>")),
        ("openai_gptoss", "because", False, ("", "because")),
    ],
)
def test_parts_of_each_format(name: str, text: str, opened: bool, wanted: tuple[str, str]) -> None:
    assert split([text], opened=opened, name=name) == split([*text], opened=opened, name=name) == wanted


MARKS = ["<think>", "</think>", "<", "/think>", "a", " ", "\n", "[THINK]", "[/THINK]", "Here is my thought process:"]
MARKS += ["Here's my response:", "Here", "<|channel>", "thought\n", "thought", "<channel|>", ANALYSIS, FINAL, CALL]
MARKS += ["<|tool_calls_section_begin|>", "<|end|>", "<|start|>", "assistant", "<|channel|>", "<|message|>", "to="]


@pytest.mark.parametrize("name", REASONING_PARSERS)
@given(
    text=st.lists(st.sampled_from(MARKS), max_size=10).map("".join),
    places=st.lists(st.integers(0, 100), max_size=8),
    opened=st.booleans(),
)
def test_any_pieces(name: str, text: str, places: list[int], opened: bool) -> None:
    whole = split([text], opened=opened, name=name)
    assert split(cut(text, places), opened=opened, name=name) == whole
    assert split([*text], opened=opened, name=name) == whole


def test_the_length_of_reasoning_includes_its_marks() -> None:
    for name, text, answer in [
        ("qwen3", "<think>why</think>", "because"),
        ("gemma4", "<|channel>thought\nwhy<channel|>", "because"),
        ("kimi_k2", "<think>why", "<|tool_calls_section_begin|>x"),
        ("openai_gptoss", f"{ANALYSIS}why<|end|>", f"<|start|>assistant{FINAL}because"),
    ]:
        parser = new_reasoning_parser(name, opened=False)
        parser.feed(text, final=False)
        parser.feed(answer, final=True)
        assert parser.length == len(text)


def test_prompts() -> None:
    for name in ("qwen3", "deepseek_r1"):
        assert begins_with_reasoning(name, "<|assistant|>\n<think>\n")
        assert not begins_with_reasoning(name, "<|assistant|>\n<think>\n\n</think>\n\n")
    for name in ("deepseek_r1", "kimi_k2", "minimax_m2", "step3"):
        assert begins_with_reasoning(name, "<|assistant|>")
        assert not begins_with_reasoning(name, "<|assistant|><think></think>")
    assert begins_with_reasoning("gemma4", "<|turn>model\n<|channel>thought\n")
    assert not begins_with_reasoning("gemma4", "<|turn>model\n<|channel>thought\n<channel|>")
    assert not begins_with_reasoning("openai_gptoss", "<|start|>assistant")
    assert not begins_with_reasoning("qwen3", "<|assistant|>")
