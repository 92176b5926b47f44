"""Each request field that the openai package documents is accepted, accepted with a warning, or rejected with a
reason."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError
from specrs.server import protocol, responses_protocol
from specrs.server.dispositions import WARNINGS, NoEffect, Rejected, dispositions, unused, warn, warning_header
from specrs.server.errors import validation_error
from specrs.server.hosted_tools import HOSTED_TOOLS

from .harness import Server

LISTED = json.loads(Path(__file__).with_name("openai_fields.json").read_text())
PAGE = Path(__file__).parents[2].joinpath("docs/server.md").read_text()
MESSAGES = [{"role": "user", "content": "x"}]
MODELS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "completions": (protocol.CompletionRequest, {"prompt": "x"}),
    "chat": (protocol.ChatCompletionRequest, {"messages": MESSAGES}),
    "responses": (responses_protocol.ResponsesRequest, {"input": "x"}),
    "chat.stream_options": (protocol.StreamOptions, {}),
    "chat.response_format.json_schema": (protocol.JSONSchema, {"name": "x", "schema": {}}),
    "chat.tools": (protocol.Tool, {"type": "function", "function": {"name": "f"}}),
    "chat.tools.function": (protocol.FunctionDefinition, {"name": "f"}),
    "chat.tool_choice": (
        protocol.AllowedToolChoice,
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    ),
    "responses.reasoning": (responses_protocol.ReasoningOptions, {}),
    "responses.stream_options": (responses_protocol.StreamOptions, {}),
    "responses.text": (responses_protocol.TextOptions, {}),
    "responses.tools": (responses_protocol.FunctionTool, {"type": "function", "name": "f"}),
    "responses.tool_choice": (responses_protocol.AllowedTools, {"type": "allowed_tools", "mode": "auto", "tools": []}),
}
SAMPLES: dict[str, Any] = {
    "access_programs": {"cyber": "standard"},
    "allowed_callers": ["programmatic"],
    "async": True,
    "client_metadata": {"a": "b"},
    "cache_control": {"type": "ephemeral"},
    "defer_loading": True,
    "generate_summary": "auto",
    "image": {"context_compression": "auto"},
    "include": ["reasoning.encrypted_content"],
    "include_obfuscation": True,
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "output_schema": {},
    "prompt_cache_key": "x",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "x",
    "service_tier": "flex",
    "store": True,
    "summary": "auto",
    "user": "x",
}
"""A sample value for each field that has no effect."""


DOCUMENTED = [(place, name) for place, fields in LISTED["fields"].items() for name in fields["all"]]


def declared(kind: type) -> list[tuple[str, str, Any]]:
    return [
        (place, name, entry)
        for place, (model, _) in MODELS.items()
        for name, entry in dispositions(model).items()
        if isinstance(entry, kind)
    ]


def test_the_list_is_of_these_models() -> None:
    assert LISTED["fields"].keys() == MODELS.keys()


@pytest.mark.parametrize(("place", "name"), DOCUMENTED)
def test_documented_fields_are_known_and_may_be_null(place: str, name: str) -> None:
    model, least = MODELS[place]
    assert name in {field.alias or key for key, field in model.model_fields.items()}
    if name not in LISTED["fields"][place]["required"] or name in ("model", "prompt"):
        body = model.model_validate_json(json.dumps({**least, name: None}))
        assert list(unused(body)) == []


@pytest.mark.parametrize(("place", "name", "entry"), declared(NoEffect))
def test_what_has_no_effect_is_named(place: str, name: str, entry: NoEffect) -> None:
    model, least = MODELS[place]
    body = model.model_validate_json(json.dumps({**least, name: SAMPLES[name]}))
    assert list(unused(body)) == [f"{name}: has no effect; {entry.reason}"]
    for value in entry.silent:
        body = model.model_validate_json(json.dumps({**least, name: value}))
        assert list(unused(body)) == []


@pytest.mark.parametrize(("place", "name", "entry"), declared(Rejected))
def test_what_is_rejected_has_a_reason(place: str, name: str, entry: Rejected) -> None:
    model, least = MODELS[place]
    near = [value for value in (0, False) if not any(value is one for one in entry.allowed)]  # 0 equals False
    for value in ("x", True, 7, 1.5, {"a": 1}, ["a"], *near):
        with pytest.raises(ValidationError) as fault:
            model.model_validate_json(json.dumps({**least, name: value}))
        error = validation_error(fault.value)
        assert error.message.startswith(f"{name}="), error.message
        assert error.message.endswith(f": not implemented; {entry.reason}")
        assert error.param == name
    for value in (None, *entry.allowed):
        body = model.model_validate_json(json.dumps({**least, name: value}))
        assert list(unused(body)) == []


@pytest.mark.parametrize("place", LISTED["values"])
def test_documented_values_are_taken(place: str) -> None:
    endpoint, _, name = place.partition(".")
    model, least = MODELS[endpoint]
    for value in LISTED["values"][place]:
        body = {**least, name: [value] if name == "include" else value}
        if value == "message.output_text.logprobs":
            with pytest.raises(ValidationError):
                model.model_validate_json(json.dumps(body))
        else:
            model.model_validate_json(json.dumps(body))


def test_documented_tools_are_known() -> None:
    assert {"function", *HOSTED_TOOLS} == {*LISTED["tools"], *LISTED["tool_choices"]} - {"allowed_tools"}
    for model, least in (MODELS["chat"], MODELS["responses"]):
        for kind in HOSTED_TOOLS:
            given: Any = model.model_validate_json(json.dumps({**least, "tools": [{"type": kind}]}))
            assert given.tools == []
            with pytest.raises(ValidationError, match="this server runs no such tool; name a function of tools"):
                model.model_validate_json(json.dumps({**least, "tool_choice": {"type": kind}}))
        for kind in ("retrieval", None, 3, ["function"]):
            with pytest.raises(ValidationError):
                model.model_validate_json(json.dumps({**least, "tools": [{"type": kind}]}))


def test_nested_fields_are_named_with_their_place() -> None:
    tool = {"type": "function", "function": {"name": "f", "cache_control": {}}}
    body = {"messages": MESSAGES, "tools": [tool], "stream_options": {"include_obfuscation": True}}
    given = protocol.ChatCompletionRequest.model_validate_json(json.dumps(body))
    assert [text.partition(":")[0] for text in unused(given)] == [
        "stream_options.include_obfuscation",
        "tools[0].function.cache_control",
    ]


def test_the_page_names_all_of_them() -> None:
    page = PAGE[PAGE.index("## Fields without effect") :].split("\n## ")[0]
    named = set(re.findall(r"`([\w.]+)`", page))
    for place, name, entry in [*declared(NoEffect), *declared(Rejected)]:
        _, _, nested = place.partition(".")
        assert (f"{nested}.{name}" if nested else name) in named, (place, name)
        assert entry.reason.replace("`", "") in page.replace("`", ""), entry.reason


def test_the_header_is_short_and_plain() -> None:
    WARNINGS.set([])
    assert warning_header() == []
    for text in ("é\n", "é\n", "b" * 2000):
        warn(text)
    ((name, value),) = warning_header()
    assert name == b"x-warning"
    assert value.startswith(rb"\xe9 ; bbb")
    assert len(value) == 1000
    assert value.endswith(b"...")


def test_an_answer_names_what_has_no_effect(server: Server) -> None:
    path, body = "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    hints = {"store": True, "user": "me", "messages": [{"role": "user", "content": [part]}], "reasoning_effort": "low"}
    for stream in (False, True):
        answer = server.post(path, {**body, **hints, "stream": stream})
        assert answer.status == 200, answer.body
        told = answer.headers["x-warning"].split("; ")
        assert [text.partition(":")[0] for text in told[::2]] == ["user", "store", "messages", "reasoning_effort='low'"]
        assert "x-warning" not in server.post(path, {**body, "stream": stream}).headers
    assert len([line for line in server.lines if "store: has no effect" in line]) == 1
    large = {**body, "tools": [{"type": "web_search"}], "metadata": {"a": "b" * 70_000}}
    assert "tools[0].type='web_search'" in server.post(path, large).headers["x-warning"]


def test_literals_are_the_documented_ones() -> None:
    efforts = {value for kind in get_args(protocol.ReasoningEffort) for value in get_args(kind)}
    assert efforts == set(LISTED["values"]["chat.reasoning_effort"])
