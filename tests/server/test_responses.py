"""`/v1/responses` answers like `/v1/chat/completions`, but in items and events."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from specrs.chat_template import render
from specrs.pair import TARGET
from specrs.server.dispositions import WARNINGS
from specrs.server.responses_protocol import ResponsesRequest, as_chat, message_places
from specrs.server.tools import RESPONSE_FIELDS
from specrs.tokenizer import Tokenizer

from .harness import Server, serving
from .test_tools import CALLS, SETTINGS, TEMPLATE, WEATHER

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "weather", "parameters": WEATHER}]
TEXT = f"<think>Hm.</think>I look.\n{CALLS}\n{CALLS}"


@pytest.fixture(scope="module")
def responding() -> Iterator[Server]:
    with serving(
        *(*SETTINGS, "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
        *("--chat-template", TEMPLATE),
    ) as server:
        yield server


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream. Checks that their names and numbers are those in their data."""
    found = []
    for number, block in enumerate(raw.decode().removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
    return found


def plain(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items without their ids, which differ each time."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def test_items_and_events(responding: Server) -> None:
    body = {"input": "x", "tools": TOOLS, "max_output_tokens": 200, "structured_outputs": {"choice": [TEXT]}}
    whole = responding.post(PATH, body).json
    call = {
        "type": "function_call",
        "name": "weather",
        "arguments": '{"city": "Rome", "days": 2}',
        "status": "completed",
    }
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert whole["output"][1]["content"][0]["text"] == "I look."
    assert plain(whole["output"])[2:] == [call, call]
    assert (whole["status"], whole["incomplete_details"]) == ("completed", None)
    assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"]
    events = events_of(responding.post(PATH, {**body, "stream": True}).body)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == "response.completed"
    assert plain(last["response"]["output"]) == plain(whole["output"])
    items: dict[str, str] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items[event["item"]["id"]] = ""
        elif event["type"].endswith(".delta"):
            items[event["item_id"]] += event["delta"]
        elif event["type"] == "response.output_item.done":
            item = event["item"]
            written = item["arguments"] if "arguments" in item else item["content"][0]["text"]
            assert items[item["id"]] == written
    assert list(items) == [item["id"] for item in last["response"]["output"]]


def test_items_keep_the_order_of_the_text(responding: Server) -> None:
    text = f"One.\n{CALLS}\nTwo.\n{CALLS}\nThree."
    body = {"input": "x", "tools": TOOLS, "max_output_tokens": 200, "structured_outputs": {"choice": [text]}}
    whole = responding.post(PATH, body).json
    kinds = ["message", "function_call", "message", "function_call", "message"]
    assert [item["type"] for item in whole["output"]] == kinds
    assert "".join(item["content"][0]["text"] for item in whole["output"][::2]).split() == ["One.", "Two.", "Three."]
    last = events_of(responding.post(PATH, {**body, "stream": True}).body)[-1]
    assert plain(last["response"]["output"]) == plain(whole["output"])


def test_a_call_that_the_limit_cuts_off_is_incomplete(responding: Server) -> None:
    body = {"input": "x", "tools": TOOLS, "temperature": 0, "structured_outputs": {"choice": [f"{CALLS}\n{CALLS}"]}}
    needed = responding.post(PATH, {**body, "max_output_tokens": 200}).json["usage"]["output_tokens"]
    seen = set()
    for limit in range(needed // 4, needed, 3):
        whole = responding.post(PATH, {**body, "max_output_tokens": limit}).json
        last = events_of(responding.post(PATH, {**body, "max_output_tokens": limit, "stream": True}).body)[-1]
        assert last["type"] == "response.incomplete"
        calls, streamed = (
            [item for item in plain(response["output"]) if item["type"] == "function_call"]
            for response in (whole, last["response"])
        )
        assert streamed == calls
        for item in calls:
            complete = item["arguments"] == '{"city": "Rome", "days": 2}'
            assert item["status"] == ("completed" if complete else "incomplete")
            seen.add(item["status"])
    assert seen == {"completed", "incomplete"}


def test_names_are_those_that_were_sent() -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "summary": []},
        {"role": "developer", "content": "x"},
    ]
    body = ResponsesRequest.model_validate({"instructions": "Write.", "input": items})
    fields = replace(RESPONSE_FIELDS, messages=message_places(body))
    for text, sent in (
        ("messages[0]['role']='system': is left out", "instructions: is left out"),
        ("messages[1]['content']: is none", "input[0]['content']: is none"),
        ("messages[2]['role']='developer': is left out", "input[2]['role']='developer': is left out"),
        ("messages: refused", "input: refused"),
        ("prompt: 9 tokens", "input: 9 tokens"),
        ("max_tokens=9: x", "max_output_tokens=9: x"),
        ("max_tokens_of=9: x", "max_tokens_of=9: x"),
        ("tool_choice.allowed_tools.tools[0]={}: x", "tool_choice.tools[0]={}: x"),
        ("verbosity='low': x", "text.verbosity='low': x"),
        ("reasoning_effort='low': x", "reasoning.effort='low': x"),
    ):
        assert fields.sent(text) == sent


def test_the_text_is_the_chats(responding: Server) -> None:
    chat = [{"role": "system", "content": "Write."}, {"role": "user", "content": "def"}]
    wanted = responding.chat(messages=chat, max_tokens=20, temperature=0)["choices"][0]["message"]["content"]
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "def"}]}]
    for given in ("def", parts):
        answer = responding.post(
            PATH, {"instructions": "Write.", "input": given, "max_output_tokens": 20, "temperature": 0}
        ).json
        assert answer["output"][0]["content"][0]["text"] == wanted
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    schema = {"type": "json_schema", "name": "s", "schema": {"const": "a b"}}
    answer = responding.post(PATH, {"input": "x", "text": {"format": schema}, "max_output_tokens": 20}).json
    assert answer["output"][0]["content"][0]["text"] == '"a b"'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "image"}]}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"type": ["message"]}]}, "input"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"reasoning": {"effort": "huge"}}, "reasoning"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
        ({"previous_response_id": 1}, "previous_response_id"),
        ({"previous_response_id": ""}, "previous_response_id"),
        ({"store": "yes"}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_refusals(responding: Server, fields: dict[str, Any], param: str) -> None:
    answer = responding.post(PATH, {"input": "x", **fields})
    assert answer.status == 400, answer.body
    assert answer.json["error"]["param"] == param, answer.json


def test_hints_are_taken_and_named(responding: Server) -> None:
    hints: dict[str, Any] = {
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "service_tier": "flex",
        "tools": [{"type": "web_search"}, *TOOLS],
        "tool_choice": "none",
    }
    answer = responding.post(PATH, {"input": "x", "max_output_tokens": 2, "truncation": "auto", **hints})
    assert answer.status == 200, answer.body
    told = answer.headers["x-warning"]
    for name in (
        "include",
        "reasoning.effort=",
        "reasoning.summary",
        "text.verbosity=",
        "service_tier",
        "tools[0]",
    ):
        assert name in told, name
    assert answer.json["truncation"] == "auto"
    assert [tool["name"] for tool in answer.json["tools"]] == ["weather"]
    plain = responding.post(PATH, {"input": "x", "max_output_tokens": 2, "truncation": "disabled", "store": False})
    assert "x-warning" not in plain.headers
    long = responding.post(PATH, {"input": "x " * 2000, "truncation": "auto"})
    assert (long.status, long.json["error"]["param"]) == (400, "input")
    assert long.json["error"]["message"].startswith("input: ")


def test_items_of_tools_that_the_server_does_not_run_are_left_out(responding: Server) -> None:
    """Check that items of tools which the server does not run are ignored, so that an answer of OpenAI's with its own
    tools can be sent back."""
    kinds = ["web_search_call", "file_search_call", "computer_call", "code_interpreter_call", "image_generation_call"]
    kinds += ["mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "custom_tool_call"]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    hosted = [{"type": kind, "id": "item_1", "status": "completed", "action": {"query": "z"}} for kind in kinds]
    options = {"max_output_tokens": 8, "temperature": 0}
    answer = responding.post(PATH, {"input": [messages[0], *hosted, messages[1]], **options})
    assert answer.status == 200, answer.body
    assert answer.headers["x-warning"] == (
        f"input: items of type {', '.join(sorted(kinds))} are left out; this server runs no such tools"
    )
    plainly = responding.post(PATH, {"input": messages, **options})
    assert answer.json["usage"] == plainly.json["usage"]
    assert "x-warning" not in plainly.headers


def test_keys_of_items_that_nothing_reads_are_named() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "x", "txet": "y"}], "nmae": "Al", "empty": None},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}], "effort": "low"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed", "argument": 1},
        {"type": "function_call_output", "call_id": "c", "output": "1", "name": "f"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": [1], "logprobs": [1]}]},
    ]
    WARNINGS.set([])
    as_chat(ResponsesRequest.model_validate({"input": items}))
    assert WARNINGS.get() == [
        "input[0]['nmae']: has no effect; nothing reads it",
        "input[0]['content'][0]['txet']: has no effect; nothing reads it; did you mean text?",
        "input[1]['effort']: has no effect; nothing reads it",
        "input[2]['argument']: has no effect; nothing reads it; did you mean arguments?",
        "input[3]['name']: has no effect; nothing reads it",
    ]
    WARNINGS.set([])
    many = {"role": "user", "content": "x", **{f"key{i}": 1 for i in range(100_000)}}
    as_chat(ResponsesRequest.model_validate({"input": [many, {"role": "user", "content": "x", "cache_control": {}}]}))
    assert 10 < len(WARNINGS.get()) < 30
    assert "input: cache_control has no effect; cached prefixes are found without it" in WARNINGS.get()


def test_allowed_tools_narrow(responding: Server) -> None:
    other = {"type": "function", "name": "now"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    body = {"input": "x", "max_output_tokens": 80, "temperature": 0, "parallel_tool_calls": False}
    narrow = responding.post(PATH, {**body, "tools": [other, *TOOLS], "tool_choice": choice}).json
    alone = responding.post(PATH, {**body, "tools": TOOLS, "tool_choice": "required"}).json
    assert plain(narrow["output"]) == plain(alone["output"])
    assert narrow["usage"] == alone["usage"]
    assert narrow["tool_choice"] == choice


def test_the_output_is_taken_back(responding: Server) -> None:
    """Check that all items of an answer can be sent back, also a call that was cut off, with the results of its
    calls."""
    text = '<think>Hm, let me see.</think>I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
    body = {"tools": TOOLS, "max_output_tokens": 200}
    first = responding.post(PATH, {**body, "input": "x", "structured_outputs": {"choice": [text]}}).json
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    assert first["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "31"}
    history = [{"role": "user", "content": "x"}, *first["output"], result]
    answer = responding.post(PATH, {**body, "input": history, "tool_choice": "none", "max_output_tokens": 2})
    assert answer.status == 200, answer.body


def test_earlier_reasoning_reaches_the_template() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}({{ m.reasoning_content }}){{ m.content }}"
        "{{ m.tool_calls | length if m.tool_calls }};{% endfor %}"
    )

    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "x"},
        thought("One."),
        call,
        call,
        thought("Two."),
        thought("Three."),
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "lost"}]},
        {"role": "user", "content": "y"},
        {"role": "developer", "content": "z"},
    ]
    chat = as_chat(ResponsesRequest.model_validate({"input": items}))
    arguments = Tokenizer(str(TARGET)).chat_arguments(chat.messages, chat_template=template)
    wanted = "user()x;assistant(One.)2;assistant(Two.\nThree.)No.;user()y;system()z;"
    assert render(arguments).text == wanted
