"""Chats of whole model families: tool parser and reasoning parser together, and the parsers that a chat template
selects."""

from typing import Any

import pytest
from specrs.errors import InvalidConfigError
from specrs.server.protocol import ChatCompletionRequest
from specrs.server.tools import ToolSettings, read_tools
from specrs.tokenizer import Tokenizer

from .harness import serving
from .scripted import Script, ask
from .test_tools import CALLS, MESSAGES, SETTINGS, TOOLS, calls_of, joined

ROME = '{"city": "Rome", "days": 2}'
LOOK = [{"type": "function", "function": {"name": "look"}}]
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    f"<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ROME}<|call|>"
)
FAMILIES = {
    ("deepseek_v31", "deepseek_v3"): "<think>Hm.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look"
    f"<｜tool▁sep｜>{ROME}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ("gemma4", "gemma4"): "<|channel>thought\nHm.<channel|>I look."
    '<|tool_call>call:look{city:<|"|>Rome<|"|>,days:2}<tool_call|>',
    ("hermes", "glm45"): f'<think>Hm.</think>I look.<tool_call>{{"name": "look", "arguments": {ROME}}}</tool_call>',
    ("kimi_k2", "kimi_k2"): "Hm.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
    f"<|tool_call_argument_begin|>{ROME}<|tool_call_end|><|tool_calls_section_end|>",
    ("mistral", "mistral"): f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS]look{ROME}",
    ("openai", "openai_gptoss"): HARMONY,
}


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "tools": LOOK, **fields}


@pytest.mark.parametrize(("names", "text"), FAMILIES.items(), ids=str)
def test_reasoning_content_and_calls_come_apart(tokenizer: Tokenizer, names: tuple[str, str], text: str) -> None:
    settings = ToolSettings(auto_choice=True, tool_parser=names[0], reasoning_parser=names[1])
    answer = ask(Script(tokenizer, text), tokenizer, "chat", body(), settings).answer
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"], calls_of(message)) == ("Hm.", "I look.", [["look", ROME]])
    assert 0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < answer["usage"]["completion_tokens"]
    streamed = joined(ask(Script(tokenizer, text), tokenizer, "chat", body(stream=True), settings).events)
    assert (streamed["reasoning"], streamed["content"], streamed["calls"]) == ("Hm.", "I look.", [["look", ROME]])


def test_gpt_oss_without_tools_shows_no_marks(tokenizer: Tokenizer) -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    engine = Script(tokenizer, text)
    message = ask(engine, tokenizer, "chat", body(tools=None), ToolSettings(reasoning_parser="openai_gptoss")).answer
    assert message["choices"][0]["message"]["content"] == "Yes."
    assert message["choices"][0]["message"]["reasoning"] == "Hm."


@pytest.mark.parametrize(("reasoning", "kept"), [("openai_gptoss", True), ("mistral", True), ("qwen3", False)])
def test_marks_of_reasoning_that_are_special_tokens_stay_in_the_text(reasoning: str, kept: bool) -> None:
    asked = ChatCompletionRequest.model_validate({"messages": MESSAGES})
    assert read_tools(asked, ToolSettings(reasoning_parser=reasoning)).keeps_special_tokens == kept


def test_calls_of_kimi_are_numbered_through_the_conversation(tokenizer: Tokenizer) -> None:
    settings = ToolSettings(auto_choice=True, tool_parser="kimi_k2")
    text = "<|tool_call_begin|>functions.look:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    call = {"id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "b"}
    messages = [*body()["messages"], {"role": "assistant", "tool_calls": [call]}, result, *body()["messages"]]
    message = ask(Script(tokenizer, text * 2), tokenizer, "chat", body(messages=messages), settings).answer
    ids = [call["id"] for call in message["choices"][0]["message"]["tool_calls"]]
    assert ids == ["functions.look:1", "functions.look:2"]


def test_auto_takes_the_parser_that_the_template_shows() -> None:
    auto = ToolSettings(auto_choice=True, tool_parser="auto")
    assert auto.chosen_for("... <tool_call> ...") == ToolSettings(auto_choice=True, tool_parser="hermes")
    for template in ("{{ messages }}", None):
        with pytest.raises(InvalidConfigError, match=r"--tool-call-parser='auto': .*one of deepseek_v3, .*, step3"):
            auto.chosen_for(template)
        assert ToolSettings(tool_parser="auto").chosen_for(template) == ToolSettings()
        named = ToolSettings(auto_choice=True, tool_parser="mistral")
        assert named.chosen_for(template) == named


def test_a_server_reads_the_calls_of_its_template() -> None:
    template = "{% if tools %}Write <tool_call>.{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    with serving(*SETTINGS, "--enable-auto-tool-choice", "--chat-template", template) as server:
        asked = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "structured_outputs": {"choice": [CALLS]}}
        (choice,) = server.chat(**asked)["choices"]
        assert calls_of(choice["message"]) == [["weather", '{"city": "Rome", "days": 2}']]
