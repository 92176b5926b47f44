"""Reader of messages: what it reads in any pieces is what the parsers read of the whole text, and ordinary text of an
answer reaches no parser."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from specrs.server.messages import MessageReader, Piece
from specrs.server.parsers.base import ToolParser
from specrs.server.parsers.reasoning import ReasoningParser
from specrs.server.parsers.table import REASONING_PARSERS, TOOL_PARSERS, new_reasoning_parser
from sweep import sweep

from .test_parsers import FORMATS, Calls, cut, cuts, read

CALL: Calls = [("f", {"a": "b c"})]
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>hm, <hm><|end|><|start|>assistant"


def make_reader(tools: str, reasoning: str | None = None) -> MessageReader:
    return MessageReader(
        reasoning and new_reasoning_parser(reasoning, opened=False),  # type: ignore[arg-type]
        TOOL_PARSERS[tools](),
        parallel=True,
        include_reasoning=True,
        named=False,
        new_call_id=lambda name, number: f"{name}{number}",
    )


def read_pieces(reader: MessageReader, pieces: Sequence[str]) -> tuple[str, str, list[list[str]]]:
    """Return the reasoning, the content and the calls, each a name and its arguments."""
    taken: list[Piece] = []
    for piece in pieces:
        reader.feed(piece, final=False)
        taken += reader.take_pieces()
    reader.feed("", final=True)
    taken += reader.take_pieces()
    texts = {"reasoning": "", "content": ""}
    calls: list[list[str]] = []
    for piece in taken:
        if piece.kind != "call":
            texts[piece.kind] += piece.text
            continue
        if piece.call is not None:
            calls.append([piece.call["function"]["name"], ""])
        calls[-1][1] += piece.text
    return texts["reasoning"], texts["content"], calls


parts = st.sampled_from(
    ["It", " is", " ", "\n", " fine", "<", "[", "{", " a<b", "CALL", "<think>", "</think>", "[TOOL"]
)


@pytest.mark.parametrize("form", FORMATS)
@sweep(40)
@given(parts=st.lists(parts, max_size=12), cuts=cuts)
@example(parts=["It", " is", "CALL", " ", " fine", "CALL", "\n"], cuts=list(range(400)))
@example(parts=["<think>", "It", "<", " is", "</think>", " fine", " ", "CALL", " fine"], cuts=list(range(400)))
def test_any_pieces_are_read_as_the_whole_text(form: str, parts: list[str], cuts: list[int]) -> None:
    name, write = FORMATS[form]
    text = "".join(write(CALL) if part == "CALL" else part for part in parts)
    whole = read(TOOL_PARSERS[name](), [text])
    assert read_pieces(make_reader(name), cut(text, cuts)) == ("", whole.content, whole.calls)
    reasoning, answer = new_reasoning_parser("qwen3", opened=False).feed(text, final=True)
    whole = read(TOOL_PARSERS[name](), [answer])
    assert read_pieces(make_reader(name, "qwen3"), cut(text, cuts)) == (reasoning, whole.content, whole.calls)


@given(cuts=cuts)
@example(cuts=list(range(400)))
def test_a_second_analysis_of_gpt_oss_is_reasoning(cuts: list[int]) -> None:
    text = f"{ANALYSIS}{FINAL}It is fine<|end|><|start|>assistant{ANALYSIS}{FINAL} again"
    reader = make_reader("openai", "openai_gptoss")
    reasoning, content, calls = read_pieces(reader, cut(text, cuts))
    assert (reasoning, content, calls) == ("hm, <hm>" * 2, "It is fine again", [])
    whole = new_reasoning_parser("openai_gptoss", opened=False)
    whole.feed(text, final=True)
    assert reader.reasoning_length == whole.length


@pytest.mark.parametrize("reasoning", [None, *(name for name in REASONING_PARSERS if name != "openai_gptoss")])
@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_ordinary_text_of_an_answer_reaches_no_parser(
    tools: str, reasoning: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = make_reader(tools, reasoning)
    for piece in ("<think>[THINK]hm", "[/THINK]</think><channel|>Here is my response:", "It is"):
        reader.feed(piece, final=False)
    reader.take()
    with monkeypatch.context() as patch:
        patch.setattr(ToolParser, "feed", None)
        patch.setattr(ReasoningParser, "feed", None)
        for text in (" a", " fine", "\u00a0day"):
            reader.feed(text, final=False)
            assert reader.take() == {"content": text}
    reader.feed(" \n", final=False)
    assert reader.take() == {}, "white space waits for what follows"
    reader.feed("and", final=False)
    assert reader.take() == {"content": " \nand"}
