"""Text that readers hold back, because it may begin a mark, is sent when the text ends, whole and streamed."""

import time
from typing import Any

import pytest
from specrs.server.messages import MessageReader
from specrs.server.tools import ToolSettings
from specrs.tokenizer import Tokenizer

from .scripted import Script, ask
from .test_tools import joined

TOOLS = [{"type": "function", "function": {"name": "look"}}]
MARKS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v31": "<｜tool▁call▁begin｜>",
    "gemma4": "<|tool_call>",
    "glm45": "<tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "minimax_m2": "<minimax:tool_call>",
    "openai": "<|channel|>",
    "step3": "<｜tool_calls_begin｜>",
    "hermes": "<tool_call>",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "lfm2": "<|tool_call_start|>",
    "pythonic": "<|python_end|>",
    "qwen3_coder": "<tool_call>",
}


def answered(tokenizer: Tokenizer, text: str, settings: ToolSettings, **fields: Any) -> tuple[str, str]:
    """Return content and reasoning of a chat completion whose model generates `text`. Checks that the answer is the
    same with and without streaming."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100, **fields}
    message = ask(Script(tokenizer, text), tokenizer, "chat", body, settings).answer["choices"][0]["message"]
    chunks = ask(Script(tokenizer, text), tokenizer, "chat", {**body, "stream": True}, settings).events
    streamed = joined(chunks)
    whole = message["content"] or "", message.get("reasoning_content") or ""
    assert (streamed["content"], streamed["reasoning_content"]) == whole
    assert streamed["calls"] == []
    return whole


@pytest.mark.parametrize("parser", MARKS)
def test_a_text_that_ends_in_a_part_of_a_mark(tokenizer: Tokenizer, parser: str) -> None:
    settings = ToolSettings(auto_choice=True, tool_parser=parser)
    for text in (f"a {MARKS[parser][:-1]}", f"a {MARKS[parser][:1]}", "a \n"):
        assert answered(tokenizer, text, settings, tools=TOOLS) == (text, "")


def test_a_text_that_ends_in_a_part_of_the_end_of_reasoning(tokenizer: Tokenizer) -> None:
    settings = ToolSettings(reasoning_parser="qwen3")
    assert answered(tokenizer, "<think>a</thi", settings) == ("", "a</thi")
    assert answered(tokenizer, "<think>a</think>b", settings) == ("b", "a")
    assert answered(tokenizer, "<thi", settings) == ("<thi", "")


def test_a_text_that_ends_within_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a日", add_special_tokens=False)[:-1]
    engine = Script(tokenizer, ids)
    said = ask(engine, tokenizer, "chat", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100})
    assert said.answer["choices"][0]["message"]["content"].startswith("a\ufffd")
    assert answered(tokenizer, "a <tool_c", ToolSettings()) == ("a <tool_c", "")


def test_a_stream_has_one_reader(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[MessageReader] = []
    init = MessageReader.__init__

    def counted(self: MessageReader, *arguments: Any, **named: Any) -> None:
        made.append(self)
        init(self, *arguments, **named)

    monkeypatch.setattr(MessageReader, "__init__", counted)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100, "stream": True}
    engine = Script(tokenizer, "a b c d e f")
    engine.before_step = lambda engine: time.sleep(0.02)  # else all tokens are in one event
    said = ask(engine, tokenizer, "chat", body, ToolSettings(reasoning_parser="qwen3"))
    assert len(said.events) > 2
    assert len(made) == 1


def test_the_second_arguments_of_a_call_do_not_count(tokenizer: Tokenizer) -> None:
    text = '<tool_call>{"name": "look", "arguments": {"a": 1}, "arguments": {"b": 2}}</tool_call>'
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100, "tools": TOOLS}
    settings = ToolSettings(auto_choice=True, tool_parser="hermes")
    for written in (text, text.replace('"arguments": {"b"', '"parameters": {"b"'), text.replace('{"b": 2}', '"{}"')):
        message = ask(Script(tokenizer, written), tokenizer, "chat", body, settings).answer["choices"][0]["message"]
        assert [one["function"]["arguments"] for one in message["tool_calls"]] == ['{"a": 1}']
    late = '<tool_call>{"arguments": {"a": 1}, "parameters": {"b": 2}, "name": "look"}</tool_call>'
    message = ask(Script(tokenizer, late), tokenizer, "chat", body, settings).answer["choices"][0]["message"]
    assert [one["function"]["arguments"] for one in message["tool_calls"]] == ['{"a": 1}']
