"""Tools and reasoning over HTTP: required calls follow their schemas, and what a model writes is parsed."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from .harness import Server, serving

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "How warm is it in Rome?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "A forecast.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
SCHEMAS = {"weather": WEATHER, "now": {"type": "object"}}
TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments.items() | list }}"
    "{% endfor %}{% endfor %}"
)
CALLS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
SETTINGS = ("--max-model-len", "512", "--disable-uvicorn-access-log")


@pytest.fixture(scope="module")
def calling() -> Iterator[Server]:
    with serving(
        *(*SETTINGS, "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
        *("--chat-template", TEMPLATE),
    ) as server:
        yield server


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """Return the message that deltas add up to, as clients add them up."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for key in ("content", "reasoning", "reasoning_content"):
                found[key] += delta.get(key) or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(found["calls"]):
                    assert call["type"] == "function"
                    assert call["id"]
                    found["calls"].append([call["function"]["name"], ""])
                assert call["index"] == len(found["calls"]) - 1
                found["calls"][-1][1] += call["function"]["arguments"]
            found["finish_reason"] = choice["finish_reason"]
    return found


def calls_of(message: dict[str, Any]) -> list[list[str]]:
    return [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_held_to_their_schemas(calling: Server, temperature: float, parallel: bool) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 120, "n": 3}
    body["temperature"] = temperature
    texts = []
    for drafts in (0, 5):
        answer = calling.chat(**body, seed=4, parallel_tool_calls=parallel, num_speculative_tokens=drafts)
        chunks = calling.stream(PATH, **body, seed=4, parallel_tool_calls=parallel, num_speculative_tokens=drafts)
        for choice in answer["choices"]:
            message = choice["message"]
            assert message["content"] is None or choice["finish_reason"] == "length"
            streamed = joined(chunks, choice["index"])
            assert calls_of(message) == streamed["calls"]
            assert choice["finish_reason"] == streamed["finish_reason"]
            texts.append((drafts, choice["index"], calls_of(message)))
            if choice["finish_reason"] == "length":
                continue
            assert choice["finish_reason"] == "tool_calls"
            assert len(message["tool_calls"]) == 1 or parallel
            for name, arguments in calls_of(message):
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    without, with_drafts = ([text[1:] for text in texts if text[0] == k] for k in (0, 5))
    if temperature == 0:
        assert without == with_drafts


def test_a_named_call_is_held_to_its_schema(calling: Server) -> None:
    body: dict[str, Any] = {
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "temperature": 0,
        "max_tokens": 120,
    }
    found = [calling.chat(**body, num_speculative_tokens=drafts)["choices"][0] for drafts in (0, 5)]
    ((name, arguments),) = calls_of(found[0]["message"])
    assert name == "weather"
    jsonschema.validate(json.loads(arguments), WEATHER)
    assert found[0]["finish_reason"] == "stop"
    assert calls_of(found[1]["message"]) == calls_of(found[0]["message"])
    assert joined(calling.stream(PATH, **body))["calls"] == [[name, arguments]]


def test_what_a_model_writes_is_read(calling: Server) -> None:
    text = f"<think>Hm.</think>I look.\n{CALLS}\n{CALLS}"
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "structured_outputs": {"choice": [text]}}
    (choice,) = calling.chat(**body)["choices"]
    message = choice["message"]
    call = ["weather", '{"city": "Rome", "days": 2}']
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    assert message["content"] == "I look."
    assert calls_of(message) == [call, call]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"
    chunks = calling.stream(PATH, **body)
    wanted = {"content": "I look.", "reasoning": "Hm.", "reasoning_content": "Hm.", "calls": [call, call]}
    wanted["finish_reason"] = "tool_calls"
    assert joined(chunks) == wanted
    assert sum("arguments" in str(chunk) for chunk in chunks) > 2  # arguments come as they are written
    alone = calling.chat(**body, parallel_tool_calls=False, include_reasoning=False)["choices"][0]["message"]
    assert calls_of(alone) == [call]
    assert not {"reasoning", "reasoning_content"} & set(alone)
    (choice,) = calling.chat(**body, tool_choice="none")["choices"]
    assert choice["message"]["content"] == text.removeprefix("<think>Hm.</think>")
    assert choice["finish_reason"] == "stop"


def test_a_conversation_with_calls_reaches_the_template(calling: Server) -> None:
    messages = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "31"}]},
    ]
    prompt = prompt_of(calling, messages=messages, tools=TOOLS)
    assert prompt == "<weather><now>user: How warm is it in Rome?assistant: weather[('city', 'Rome')]tool: 31"


def test_what_the_server_wrote_is_taken_back(calling: Server) -> None:
    """Check that calls which the server wrote are accepted in later requests, even if a limit cut them off or they are
    no object."""
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 60}
    message = calling.chat(**body, structured_outputs={"choice": [text]})["choices"][0]["message"]
    ((name, arguments),) = calls_of(message)
    assert (name, arguments) == ("weather", '{"city": "Ro')
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "31"}
    for given in (arguments, "[1]", "5", "", "no JSON"):
        message["tool_calls"][0]["function"]["arguments"] = given
        answer = calling.chat(**(body | {"messages": [*MESSAGES, message, result], "max_tokens": 2}))
        assert answer["choices"][0]["finish_reason"] == "length"


def test_parts_that_other_endpoints_have(calling: Server) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b", "annotations": []}]
    refused = [{"type": "refusal", "refusal": "No."}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": refused},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": None, "refusal": "Never."},
    ]
    assert prompt_of(calling, messages=messages) == "user: a\nbassistant: No.user: cassistant: Never."


def test_tokens_of_reasoning_are_counted(calling: Server) -> None:
    """Check that the number of reasoning tokens is the number of tokens up to the one that completes the closing
    mark."""
    for text in ("<think>Hm, let me see.</think>I look.", "<think>Hm, and on", "Plain.", " <think></think>x"):
        body = {"messages": MESSAGES, "structured_outputs": {"choice": [text]}, "n": 2, "max_tokens": 60}
        answer = calling.chat(**body, return_token_strs=True)
        end = len(text.rpartition("</think>")[0]) + len("</think>") if "</think>" in text else len(text)
        wanted = 0
        for choice in answer["choices"] if "<think>" in text else []:
            written = 0
            for token in choice["token_strs"]:
                if written >= end and "</think>" in text:
                    break
                written += len(token)
                wanted += 1
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": wanted}, text
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = calling.stream(PATH, **body, stream_options=options)
        counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
        assert counts[-1] == wanted, text
        hidden = calling.chat(**body, include_reasoning=False)
        assert hidden["usage"]["completion_tokens_details"] == {"reasoning_tokens": wanted}
    assert "completion_tokens_details" not in calling.complete(prompt="x", max_tokens=1)["usage"]


def prompt_of(server: Server, **body: Any) -> str:
    """Return the text of a chat's prompt."""
    ids = server.post("/tokenize", body).json["tokens"]
    text: str = server.post("/detokenize", {"tokens": ids}).json["prompt"]
    return text


def test_allowed_tools_are_the_only_ones(calling: Server) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    for name in SCHEMAS:
        both = calling.chat(**body, tool_choice=allowed("required", name), return_token_ids=True)
        (tool,) = [tool for tool in TOOLS if tool["function"]["name"] == name]
        alone = calling.chat(**(body | {"tools": [tool]}), tool_choice="required", return_token_ids=True)
        assert both["prompt_token_ids"] == alone["prompt_token_ids"]
        assert calls_of(both["choices"][0]["message"]) == calls_of(alone["choices"][0]["message"]) != []
    written = body | {"structured_outputs": {"choice": [CALLS]}}
    message = calling.chat(**written, tool_choice=allowed("auto", "weather"))["choices"][0]["message"]
    assert [name for name, _ in calls_of(message)] == ["weather"]
    none = calling.chat(**written, tool_choice=allowed("auto"))["choices"][0]["message"]
    assert none["content"] == CALLS


def test_tools_that_the_server_does_not_run_are_left_out(calling: Server) -> None:
    hosted = [{"type": "web_search"}, {"type": "custom", "custom": {"name": "x"}}]
    body = {"messages": MESSAGES, "tools": [hosted[0], *TOOLS, hosted[1]], "tool_choice": "none", "max_tokens": 1}
    answer = calling.post(PATH, body | {"return_token_ids": True})
    assert answer.status == 200, answer.body
    assert (
        answer.json["prompt_token_ids"]
        == calling.post("/tokenize", {"messages": MESSAGES, "tools": TOOLS}).json["tokens"]
    )
    for i, name in ((0, "web_search"), (3, "custom")):
        assert f"tools[{i}].type='{name}': left out" in answer.headers["x-warning"]
    function = {"type": "function", "function": {"name": "f", "cache_control": {}}}
    told = calling.post(PATH, body | {"tools": [hosted[0], function]}).headers["x-warning"]
    assert "tools[1].function.cache_control" in told
    wrong = calling.post(PATH, body | {"tools": [hosted[0], {"type": "retrieval"}]})
    assert "tools.1.type='retrieval'" in wrong.error["message"]
    forced = calling.post(PATH, body | {"tools": hosted, "tool_choice": "required"})
    assert "this server runs none of the tools that were sent: ['web_search', 'custom']" in forced.error["message"]
    choice = allowed("auto", "now")
    choice["allowed_tools"]["tools"].append({"type": "web_search"})
    assert calling.post(PATH, body | {"tool_choice": choice}).status == 200
    unsent = calling.post(PATH, body | {"tools": TOOLS, "tool_choice": choice})
    assert "tool_choice.allowed_tools.tools[1]={'type': 'web_search'}" in unsent.error["message"]
    alone = calling.post(PATH, {"messages": MESSAGES, "tools": hosted, "max_tokens": 1})
    assert (alone.status, alone.json["choices"][0]["finish_reason"]) == (200, "length")


def test_a_stop_string_in_content_ends_the_text_in_the_engine(calling: Server) -> None:
    """Check that a stop string in content ends the text in the engine: it counts as stopped, and its tokens end there.
    One in the reasoning or in a call's arguments does not."""
    text = f"<think>Rome?</think>I look.\n{CALLS}\nIn Rome it is warm, as it is in all of Italy."
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 300, "structured_outputs": {"choice": [text]}}
    before = calling.wait_until_idle()
    answer = calling.chat(**body, stop="Rome")
    after = calling.wait_until_idle()
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "Rome")
    assert choice["message"]["content"] == "I look.\nIn "
    assert calls_of(choice["message"]) == [["weather", '{"city": "Rome", "days": 2}']]
    whole = calling.chat(**body)["usage"]["completion_tokens"]
    assert answer["usage"]["completion_tokens"] < whole - 5
    for reason, count in (("stop", 1), ("abort", 0)):
        name = f'vllm:request_success_total{{finished_reason="{reason}"}}'
        assert after[name] - before[name] == count
    chunks = calling.stream(PATH, **body, stop="Rome")
    assert joined(chunks)["content"] == "I look.\nIn "
    assert chunks[-1]["choices"][0]["stop_reason"] == "Rome"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]}, "messages"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("required", "x")}, "tool_choice.allowed_tools.tools"),
        ({"tools": TOOLS, "tool_choice": allowed("required")}, "tool_choice.allowed_tools.tools"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"type": "object", "unevaluatedProperties": False}},
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_refusals(calling: Server, fields: dict[str, Any], param: str) -> None:
    answer = calling.post(PATH, {"messages": MESSAGES, "max_tokens": 4, **fields})
    assert answer.status == 400, answer.body
    assert answer.json["error"]["param"] == param, answer.json


def test_auto_needs_its_flags(server: Server) -> None:
    answer = server.post(PATH, {"messages": MESSAGES, "tools": TOOLS})
    assert answer.status == 400
    assert "--enable-auto-tool-choice" in answer.error["message"]
    message = server.chat(messages=MESSAGES, tools=TOOLS, tool_choice="none", max_tokens=4)["choices"][0]["message"]
    assert set(message) == {"role", "content", "refusal"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}], ids=str)
def test_tools_that_the_template_does_not_show_are_a_warning(calling: Server, server: Server, choice: Any) -> None:
    """Such a request is answered, as by vLLM: a grammar forces the call. Only the fixture `calling` has a template that
    shows tools."""
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 4}
    for serving_it, told in ((server, True), (calling, False)):
        answer = serving_it.post(PATH, body)
        assert answer.status == 200
        assert answer.headers.get("x-warning", "").startswith("tools: the chat template does not show them") == told
