"""Response formats next to tools, and the errors for schemas that cannot be served."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from .harness import Server, serving
from .test_responses import events_of
from .test_tools import MESSAGES, SETTINGS, TEMPLATE, calls_of, joined

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
WEATHER = {
    "$id": "https://example.com/weather",
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"$ref": "#days"},
        "more": {"type": "array", "items": {"$ref": "weather#/$defs/days"}, "maxItems": 2, "uniqueItems": True},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"$anchor": "days", "type": "integer", "minimum": 1, "maximum": 9}},
}
# the same $id once more: schemas of different tools know nothing of each other
STOP = {"$id": "https://example.com/weather", "type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "stop": STOP}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
FLAT_TOOLS = [{"type": "function", "name": name, "parameters": SCHEMAS[name]} for name in SCHEMAS]
ANSWER = {
    "type": "object",
    "properties": {"who": {"enum": ["Al", "Bo"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["who", "age"],
    "additionalProperties": False,
}
FORMATS: dict[str, dict[str, Any]] = {
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}},
    "structured_outputs": {"structured_outputs": {"json": ANSWER}},
    "json_object": {"response_format": {"type": "json_object"}},
}
WEATHER_CALL = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def formats() -> Iterator[Server]:
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with serving(*SETTINGS, *flags, "--chat-template", TEMPLATE) as server:
        yield server


def first_token(server: Server, text: str) -> int:
    token: int = server.post("/tokenize", {"prompt": text}).json["tokens"][0]
    return token


def check(message: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Check that a message is calls that follow their schemas, or content that follows `schema`. Return whether it is
    calls."""
    calls = calls_of(message)
    assert bool(message["content"]) != bool(calls), message
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    if not calls:
        jsonschema.validate(json.loads(message["content"]), schema)
    return bool(calls)


@pytest.mark.parametrize(
    ("name", "begin"),
    [("json_schema", "<tool_call>"), ("json_schema", "{"), ("structured_outputs", "<tool_call>"), ("json_object", "{")],
)
def test_a_chat_may_call_or_answer_in_the_format(formats: Server, name: str, begin: str) -> None:
    schema = {"type": "object"} if name == "json_object" else ANSWER
    # the random model writes neither by itself; with this bias, several calls would have no end
    bias = {str(first_token(formats, begin)): 40}
    body = {"messages": MESSAGES, "tools": TOOLS, **FORMATS[name], "logit_bias": bias, "parallel_tool_calls": False}
    body |= {"temperature": 0, "max_tokens": 120}
    (choice,) = formats.chat(**body, num_speculative_tokens=5)["choices"]
    streamed = joined(formats.stream(CHAT, **body, num_speculative_tokens=0))
    assert streamed["calls"] == calls_of(choice["message"])
    assert streamed["content"] == (choice["message"]["content"] or "")
    assert streamed["finish_reason"] == choice["finish_reason"]
    if choice["finish_reason"] == "length":
        assert name == "json_object"
        return
    called = check(choice["message"], schema)
    assert called == (begin == "<tool_call>")
    assert choice["finish_reason"] == ("tool_calls" if called else "stop")


@pytest.mark.parametrize("name", [*FORMATS, "choice"])
@pytest.mark.parametrize("tool_choice", ["required", WEATHER_CALL], ids=["required", "named"])
def test_a_demanded_call_drops_the_format(formats: Server, name: str, tool_choice: Any) -> None:
    wanted = FORMATS.get(name, {"structured_outputs": {"choice": ["no"]}})
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": tool_choice, "parallel_tool_calls": False}
    (choice,) = formats.chat(**body, **wanted, max_tokens=150, temperature=0)["choices"]
    ((called, arguments),) = calls_of(choice["message"])
    jsonschema.validate(json.loads(arguments), SCHEMAS[called])
    assert choice["message"]["content"] is None
    assert joined(formats.stream(CHAT, **body, **wanted, max_tokens=150, temperature=0))["calls"] == [
        [called, arguments]
    ]


@pytest.mark.parametrize("name", ["json_schema", "structured_outputs"])
def test_without_a_call_only_the_format_is_left(formats: Server, name: str) -> None:
    bias = {str(first_token(formats, "<tool_call>")): 40}
    fields: dict[str, Any]
    for fields in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        (choice,) = formats.chat(messages=MESSAGES, **fields, **FORMATS[name], logit_bias=bias)["choices"]
        assert not check(choice["message"], ANSWER)


def test_a_response_may_call_or_answer_in_the_format(formats: Server) -> None:
    wanted = {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER}}
    body = {"input": "x", "tools": FLAT_TOOLS, "text": wanted, "max_output_tokens": 80, "parallel_tool_calls": False}
    kinds = set()
    for seed in range(3):
        body |= {"temperature": 1.5, "seed": seed}
        whole = formats.post(RESPONSES, body).json
        last = events_of(formats.post(RESPONSES, body | {"stream": True}).body)[-1]["response"]
        assert [item.get("arguments", item.get("content")) for item in last["output"]] == [
            item.get("arguments", item.get("content")) for item in whole["output"]
        ]
        if whole["status"] == "completed":
            (item,) = whole["output"]
            kinds.add(item["type"])
            if item["type"] == "function_call":
                jsonschema.validate(json.loads(item["arguments"]), SCHEMAS[item["name"]])
            else:
                jsonschema.validate(json.loads(item["content"][0]["text"]), ANSWER)
    assert kinds
    for choice in ("required", {"type": "function", "name": "stop"}):
        whole = formats.post(RESPONSES, body | {"tool_choice": choice}).json
        assert [item["type"] for item in whole["output"]] == ["function_call"]


NOT = {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}}}}}
LOOK = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}


def tools_of(*schemas: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": s}} for i, s in enumerate(schemas)]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


@pytest.mark.parametrize(
    ("fields", "begin"),
    [
        ({"response_format": schema_format(NOT)}, "response_format.json_schema.schema="),
        ({"response_format": schema_format(LOOK)}, "response_format.json_schema.schema="),
        ({"structured_outputs": {"json": NOT}}, "structured_outputs.json="),
        ({"tools": tools_of(STOP, NOT), "tool_choice": "required"}, "tools['f1'].function.parameters="),
        ({"tools": tools_of(NOT), "response_format": {"type": "json_object"}}, "tools['f0'].function.parameters="),
        ({"tools": tools_of(STOP), "response_format": schema_format(NOT)}, "response_format.json_schema.schema="),
        (
            {"tools": tools_of(STOP, LOOK), "tool_choice": {"type": "function", "function": {"name": "f1"}}},
            "tools['f1'].function.parameters=",
        ),
    ],
)
def test_an_error_about_a_schema_names_the_field_and_the_keyword(
    formats: Server, fields: dict[str, Any], begin: str
) -> None:
    answer = formats.post(CHAT, {"messages": MESSAGES, "max_tokens": 4, **fields})
    assert answer.status == 400, answer.body
    message = answer.json["error"]["message"]
    assert message.startswith(begin)
    assert "properties.a.items.not: " in message or "properties.a.pattern: " in message
    assert answer.json["error"]["param"] == begin.removesuffix("=").partition("[")[0]


@pytest.mark.parametrize(
    ("path", "fields", "begin"),
    [
        (
            CHAT,
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "response_format.json_schema=",
        ),
        (
            CHAT,
            {"response_format": {"type": "text", "json_schema": {"schema": ANSWER}}},
            "response_format.json_schema=",
        ),
        (CHAT, {"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema="),
        (CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": {"json": "{}"}}, "response_format="),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema: "),
        (
            CHAT,
            {
                "tools": TOOLS,
                "tool_choice": "required",
                "response_format": {"type": "text", "json_schema": {"schema": ANSWER}},
            },
            "response_format.json_schema=",
        ),
        (RESPONSES, {"text": {"format": {"type": "json_object", "schema": ANSWER}}}, "text.format.schema="),
        (RESPONSES, {"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema="),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema: "),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": NOT}}}, "text.format.schema="),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"json": "{}"}},
            "text.format=",
        ),
        (
            RESPONSES,
            {"tools": [{"type": "function", "name": "f", "parameters": NOT}], "tool_choice": "required"},
            "tools['f'].parameters=",
        ),
        (
            RESPONSES,
            {"tools": FLAT_TOOLS, "tool_choice": {"type": "function", "name": "other"}},
            "tool_choice.name=",
        ),
        (
            "/v1/completions",
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "response_format.json_schema=",
        ),
    ],
)
def test_contradictions_are_errors_that_name_the_field(
    formats: Server, path: str, fields: dict[str, Any], begin: str
) -> None:
    start = {CHAT: {"messages": MESSAGES}, RESPONSES: {"input": "x"}}.get(path, {"prompt": "x"})
    answer = formats.post(path, {**start, **fields})
    assert answer.status == 400, answer.body
    assert answer.json["error"]["message"].startswith(begin), answer.json


def test_keywords_that_the_grammar_ignores_are_named_in_the_log(formats: Server) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3, "minItems": 3, "uniqueItems": True}
    text = formats.chat(messages=MESSAGES, response_format=schema_format(schema))["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(text), {**schema, "uniqueItems": False})
    wanted = "response_format.json_schema.schema: the grammar does not enforce uniqueItems"
    assert sum(wanted in line for line in formats.lines) == 1


UNIQUE = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 1, "uniqueItems": True}


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        (
            {"response_format": schema_format(UNIQUE)},
            "response_format.json_schema.schema: the grammar does not enforce",
        ),
        ({"structured_outputs": {"json": UNIQUE}}, "structured_outputs.json: the grammar does not enforce"),
        (
            {"tools": TOOLS, "tool_choice": WEATHER_CALL},
            "tools['weather'].function.parameters: the grammar does not enforce",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required"},
            "tools['weather'].function.parameters: the grammar does not enforce",
        ),
        ({"tools": TOOLS, **FORMATS["json_object"]}, "tools['weather'].function.parameters: the grammar does not"),
        ({"tools": TOOLS, "tool_choice": "required", **FORMATS["json_object"]}, "response_format: has no effect"),
        ({"tools": TOOLS, "tool_choice": WEATHER_CALL, **FORMATS["structured_outputs"]}, "structured_outputs: has no"),
    ],
)
def test_each_answer_warns_of_what_its_grammar_leaves_out(
    formats: Server, fields: dict[str, Any], warning: str
) -> None:
    for _ in range(2):  # the second grammar comes from the cache
        answer = formats.post(CHAT, {"messages": MESSAGES, "max_tokens": 2, **fields})
        assert answer.status == 200, answer.body
        assert warning in answer.headers["x-warning"]


def test_errors_show_what_was_sent(formats: Server) -> None:
    wanted = {"type": "json_object", "json_schema": {"name": "x"}}
    answer = formats.post(CHAT, {"messages": MESSAGES, "response_format": wanted})
    assert answer.json["error"]["message"].startswith(
        "response_format.json_schema={'name': 'x'}: needs type=json_schema"
    )
    answer = formats.post(CHAT, {"messages": MESSAGES, "tools": [*TOOLS, TOOLS[1]]})
    assert answer.json["error"]["message"] == "tools='stop': two functions have this name; give each its own"
