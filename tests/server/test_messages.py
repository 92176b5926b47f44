"""`/v1/messages` answers like `/v1/chat/completions`, but in Anthropic's blocks, events and errors."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from specrs.chat_template import render
from specrs.errors import InvalidRequestError, SpecrsError
from specrs.pair import TARGET
from specrs.server import errors
from specrs.server.anthropic import protocol
from specrs.server.anthropic.betas import beta_warnings
from specrs.server.anthropic.conversation import as_chat
from specrs.server.anthropic.endpoints import _or_pauses
from specrs.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from specrs.server.app import KeyCheck
from specrs.server.dispositions import WARNINGS, NoEffect, Rejected, dispositions, unused
from specrs.server.errors import APIError
from specrs.server.openapi import openapi
from specrs.server.tools import ToolSettings
from specrs.tokenizer import Tokenizer

from .agent_requests import CLAUDE_CODE, LATER_CLAUDE_CODE
from .harness import Answer, Server, serving
from .scripted import Script, ask
from .test_tools import CALLS, SETTINGS, WEATHER

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}{{ '[thinks]' if enable_thinking }}"
    "{% for m in messages %}{{ m.role }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    ": {{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments.items() | list }}{% endfor %};{% endfor %}"
)
TOOLS = [{"name": "weather", "description": "A forecast.", "input_schema": WEATHER}]
TEXT = f"<think>Hm.</think>I look.\n{CALLS}\n{CALLS}"
CALL = {"type": "tool_use", "name": "weather", "input": {"city": "Rome", "days": 2}}
WRITTEN = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "STOP"}}\n</tool_call>'
X: dict[str, Any] = {"max_tokens": 16, "messages": [{"role": "user", "content": "x"}]}
BOTH = ToolSettings(auto_choice=True, tool_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture(scope="module")
def messaging() -> Iterator[Server]:
    with serving(
        *(*SETTINGS, "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
        *("--chat-template", TEMPLATE, "--served-model-name", "bundled", "claude-sonnet-4-5"),
    ) as server:
        yield server


def message(server: Server, **body: Any) -> dict[str, Any]:
    """Return a message that must succeed."""
    answer = server.post(PATH, {**X, **body})
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


def fault(answer: Answer, kind: str) -> str:
    """Return the message of an answer that must be an error of this kind in Anthropic's form."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.json.keys() == {"type", "error", "request_id"}
    assert answer.json["type"] == "error"
    assert answer.json["error"].keys() == {"type", "message"}
    assert answer.json["error"]["type"] == kind
    assert answer.json["request_id"] == answer.headers.get("request-id")
    text: str = answer.json["error"]["message"]
    return text


def parsed(raw: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream. Checks that their names are those in their data."""
    found = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events of a stream add up to, as clients add them up. Checks that the order is
    Anthropic's."""
    first, *events = [event for event in events if event["type"] != "ping"]
    assert first["type"] == "message_start"
    found: dict[str, Any] = {**first["message"]}
    assert (found["content"], found["stop_reason"], found["usage"]["output_tokens"]) == ([], None, 0)
    *events, last, stop = events
    assert stop == {"type": "message_stop"}
    assert last["type"] == "message_delta"
    keys = {
        "text_delta": ("text", "text"),
        "thinking_delta": ("thinking", "thinking"),
        "signature_delta": ("thinking", "signature"),
        "input_json_delta": ("tool_use", "partial_json"),
    }
    is_open = False
    for event in events:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert (is_open, index) == (False, len(found["content"]))
            is_open = True
            found["content"].append({**event["content_block"]})
            continue
        assert (is_open, index) == (True, len(found["content"]) - 1)
        block = found["content"][-1]
        if event["type"] == "content_block_delta":
            kind, key = keys[event["delta"]["type"]]
            assert block["type"] == kind
            assert event["delta"][key]
            block[key] = block.get(key, "") + event["delta"][key]
        else:
            assert event["type"] == "content_block_stop"
            is_open = False
            if block["type"] == "tool_use":
                written = block.pop("partial_json", "{}")
                try:
                    block["input"] = json.loads(written)
                except ValueError:
                    block["input"] = {"INVALID_JSON": written}
    assert not is_open
    return {**found, **last["delta"], "usage": {**found["usage"], **last["usage"]}}


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """Return a message without its ids, which differ each time."""
    content = [{key: value for key, value in block.items() if key != "id"} for block in found["content"]]
    return {**{key: value for key, value in found.items() if key != "id"}, "content": content}


def prompt_of(body: dict[str, Any]) -> str:
    """Return the text of the prompt made from a body."""
    chat, places = as_chat(CountTokensRequest.model_validate(body))
    assert len(places) == len(chat.messages)
    arguments = Tokenizer(str(TARGET)).chat_arguments(
        chat.messages, chat_template=TEMPLATE, chat_template_kwargs=chat.chat_template_kwargs
    )
    return render(arguments).text


# answers


@pytest.mark.parametrize("thinking", [None, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}])
def test_blocks_and_events(messaging: Server, thinking: Any) -> None:
    body = {"tools": TOOLS, "max_tokens": 200, "structured_outputs": {"choice": [TEXT]}, "thinking": thinking}
    whole = message(messaging, **body)
    thought, text, *calls = whole["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Hm.")
    assert thought["signature"]
    assert text == {"type": "text", "text": "I look."}
    assert [{key: call[key] for key in CALL} for call in calls] == [CALL, CALL]
    assert len({call["id"] for call in calls}) == 2
    assert whole["id"].startswith("msg_")
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "bundled")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    events = parsed(messaging.post(PATH, {**X, **body, "stream": True}).body)
    assert events[1] == {"type": "ping"}
    streamed = added_up(events)
    assert plain(streamed)["content"] == plain(whole)["content"]
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert sum(event.get("delta", {}).get("type") == "input_json_delta" for event in events) > 2


@settings(max_examples=40, deadline=None)
@given(
    thought=st.none() | st.sampled_from(["", "Hm.", "STOP, no."]),
    texts=st.lists(
        st.sampled_from(["I look. ", "STOP", "naïve 🎉", "\n", "<tool", "{}", WRITTEN, WRITTEN]), max_size=6
    ),
    steps=st.integers(1, 9),
    limit=st.integers(1, 120),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "thinking": st.just({"type": "disabled"}),
            "stop_sequences": st.just(["STOP"]),
            "tool_choice": st.sampled_from(
                [{"type": "none"}, {"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": True}]
            ),
        },
    ),
)
def test_a_stream_is_the_whole_answer(
    tokenizer: Tokenizer,
    thought: str | None,
    texts: list[str],
    steps: int,
    limit: int,
    fields: dict[str, Any],
) -> None:
    written = ("" if thought is None else f"<think>{thought}</think>") + "".join(texts)
    body = {**X, "max_tokens": limit, "tools": TOOLS, **fields}

    def said(*, stream: bool) -> Any:
        engine = Script(tokenizer, written)
        engine.tokens_per_step = steps
        return ask(engine, tokenizer, "messages", {**body, "stream": stream}, BOTH)

    whole, events = said(stream=False).answer, said(stream=True).events
    streamed = added_up(events)
    assert plain(streamed) == plain(whole)
    kinds = [block["type"] for block in whole["content"]]
    if "thinking" in fields:
        assert "thinking" not in kinds
    if fields.get("tool_choice", {}).get("disable_parallel_tool_use"):
        assert kinds.count("tool_use") <= 1
    if whole["stop_reason"] == "stop_sequence":
        assert whole["stop_sequence"] == "STOP"
        assert "STOP" not in "".join(block.get("text", "") for block in whole["content"])
    elif whole["stop_reason"] != "max_tokens":
        assert whole["stop_reason"] == ("tool_use" if "tool_use" in kinds else "end_turn")
        assert "STOP" not in texts or "stop_sequences" not in fields


def test_the_text_is_the_chats(messaging: Server) -> None:
    chat = [{"role": "system", "content": "Write."}, {"role": "user", "content": "def"}]
    wanted = messaging.chat(messages=chat, max_tokens=20, temperature=0)
    for system in ("Write.", [{"type": "text", "text": "Write."}]):
        answer = message(
            messaging,
            system=system,
            messages=[{"role": "user", "content": [{"type": "text", "text": "def"}]}],
            max_tokens=20,
            temperature=0,
            model="claude-sonnet-4-5",
        )
        assert answer["content"] == [{"type": "text", "text": wanted["choices"][0]["message"]["content"]}]
        assert (answer["stop_reason"], answer["model"]) == ("max_tokens", "claude-sonnet-4-5")
        usage = answer["usage"]
        assert usage["output_tokens"] == 20
        assert usage["cache_creation_input_tokens"] == 0
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == wanted["usage"]["prompt_tokens"]


def test_a_limit_beyond_the_context_is_the_context(messaging: Server) -> None:
    """Check that a limit beyond the context counts as the rest of the context, because agents send one limit to all
    models."""
    whole = message(messaging, max_tokens=100_000, structured_outputs={"regex": "(ab)+"}, temperature=0)
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == 512
    assert whole["stop_reason"] == "model_context_window_exceeded"
    exact = message(messaging, max_tokens=usage["output_tokens"], structured_outputs={"regex": "(ab)+"}, temperature=0)
    assert exact["stop_reason"] == "max_tokens"
    assert exact["content"] == whole["content"]


def test_stop_sequences(messaging: Server) -> None:
    body = {"structured_outputs": {"choice": ["one STOP two"]}, "max_tokens": 50}
    for stream in (False, True):
        answer = messaging.post(PATH, {**X, **body, "stop_sequences": ["xyz", "STOP"], "stream": stream})
        found = added_up(parsed(answer.body)) if stream else answer.json
        assert found["content"] == [{"type": "text", "text": "one "}]
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "STOP")
    assert message(messaging, **body)["stop_reason"] == "end_turn"


def test_tool_choices(messaging: Server) -> None:
    both = [*TOOLS, {"type": "custom", "name": "now", "input_schema": {"type": "object"}}]
    body = {"tools": both, "max_tokens": 120, "temperature": 0}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        found = message(messaging, **body, tool_choice={**choice, "disable_parallel_tool_use": True})
        (call,) = found["content"]
        assert call["type"] == "tool_use"
        assert found["stop_reason"] == "tool_use"
        if choice["type"] == "tool":
            assert call["name"] == "weather"
            assert call["input"]["city"] in ("Rome", "Oslo")
    written = {**body, "structured_outputs": {"choice": [CALLS]}}
    assert message(messaging, **written)["stop_reason"] == "tool_use"
    none = message(messaging, **written, tool_choice={"type": "none"})
    assert (none["content"], none["stop_reason"]) == ([{"type": "text", "text": CALLS}], "end_turn")
    twice = {**body, "structured_outputs": {"choice": [f"{CALLS}\n{CALLS}"]}}
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(message(messaging, **twice)["content"]) == 2
    assert len(message(messaging, **twice, tool_choice=choice)["content"]) == 1


def test_output_formats(messaging: Server) -> None:
    wanted = {"type": "json_schema", "schema": {"const": "a b"}}
    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        assert message(messaging, **fields, max_tokens=20)["content"] == [{"type": "text", "text": '"a b"'}]


def test_a_loop_of_tools(messaging: Server) -> None:
    """Check a loop of tools: answers are sent back unchanged, with the results of their calls, until there are no more
    calls."""
    history: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    for text in (TEXT, f"<think>Again.</think>{CALLS}", "Warm."):
        answer = message(
            messaging, messages=history, tools=TOOLS, max_tokens=200, structured_outputs={"choice": [text]}
        )
        history.append({"role": "assistant", "content": answer["content"]})
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert (answer["stop_reason"] == "tool_use") == bool(calls)
        if calls:
            results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "31"} for call in calls]
            history.append({"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]})
    call = "weather[('city', 'Rome'), ('days', 2)]"
    assert prompt_of({"messages": [*history, {"role": "user", "content": "Thanks."}]}) == (
        f"user: x;assistant(Hm.): I look.{call}{call};tool: 31;tool: 31;user: Go on.;"
        f"assistant(Again.): {call};tool: 31;user: Go on.;assistant: Warm.;user: Thanks.;"
    )


# prompts


def test_the_requests_of_claude_code() -> None:
    prompts = [prompt_of({key: CLAUDE_CODE[i].body[key] for key in ("system", "messages")}) for i in (0, 1)]
    assert prompts[0] == (
        "system: You are an agent for code.\nUse the tools.;"
        "user: <system-reminder>\nToday is Monday.\n</system-reminder>\nWhat is in a.py?;"
    )
    assert prompts[1] == prompts[0] + (
        "assistant(I read it.): I read it first.Read[('file_path', '/a.py')]Bash[('command', ['ls'])];"
        "tool: x = 1;tool: Error: no such command;user: <system-reminder>\nGo on.\n</system-reminder>;"
    )
    later = [prompt_of({"messages": turn.body["messages"]}) for turn in LATER_CLAUDE_CODE]
    assert later[0] == "user: What is in a.py?\n<system-reminder>\n# Environment\nLinux\n</system-reminder>;"
    assert later[1] == later[0] + (
        "assistant: Read[];tool: x = 1;user: <system-reminder>\n9000 tokens left\n</system-reminder>;"
    )


def test_a_line_that_differs_in_every_request_spoils_no_cache(messaging: Server) -> None:
    rest = "Write Python. " * 12
    used = []
    for number in (1, 2):
        line = f"x-anthropic-billing-header: cc_version=2.1.0; cch={number};"
        forms = (f"{line}\n{rest}", [{"type": "text", "text": line}, {"type": "text", "text": rest}])
        used += [message(messaging, system=system, max_tokens=1)["usage"] for system in forms]
    totals = {usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in used}
    assert len(totals) == 1
    assert all(usage["cache_read_input_tokens"] > 16 for usage in used[1:])
    # elsewhere such a line is the user's own text
    assert "cch=1" in prompt_of({"messages": [{"role": "user", "content": line.replace("2;", "1;")}]})
    assert prompt_of({"system": line, **{"messages": X["messages"]}}) == "user: x;"


def test_instructions_in_the_middle_are_text_of_the_user() -> None:
    """Check that instructions in the middle of a conversation become text of the user. A template that moves them to
    the beginning would change the prompt's beginning in every turn."""
    body = {
        "system": "a",
        "messages": [
            {"role": "system", "content": "b"},
            {
                "role": "user",
                "content": [{"type": "mid_conv_system", "content": [{"type": "text", "text": "{c}"}]}, BLOCK],
            },
            {"role": "system", "content": [{"type": "tool_addition", "tool": {}}, {"type": "text", "text": "d"}]},
        ],
    }
    assert prompt_of(body) == (
        "system: a\nb;user: <system-reminder>\n{c}\n</system-reminder>\nx\n<system-reminder>\nd\n</system-reminder>;"
    )


def test_messages_of_one_role_are_one() -> None:
    body: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {
                "role": "assistant",
                "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "d"}],
            },
            {"role": "system", "content": "e"},
            {"role": "user", "content": "f"},
        ]
    }
    assert prompt_of(body) == "user: a\nb;assistant: c\nd;user: <system-reminder>\ne\n</system-reminder>\nf;"
    _, places = as_chat(CountTokensRequest.model_validate(body))
    assert places == ["messages[0]", "messages[2]", "messages[4]"]


def test_an_answer_continues_the_last_message_of_the_assistant(messaging: Server) -> None:
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "text", "text": "def f"}]}]
    wanted = messaging.chat(
        messages=[history[0], {"role": "assistant", "content": "def f"}],
        continue_final_message=True,
        add_generation_prompt=False,
        temperature=0,
        max_tokens=8,
    )
    found = message(messaging, messages=history, temperature=0, max_tokens=8)
    assert found["content"][0]["text"] == wanted["choices"][0]["message"]["content"]
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == wanted["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_a_variable_of_the_template(kind: str, thinks: bool) -> None:
    body = {**X, "thinking": {"type": kind}}
    chat, _ = as_chat(MessagesRequest.model_validate(body))
    assert chat.chat_template_kwargs == {"enable_thinking": thinks, "thinking": thinks}
    assert prompt_of({key: body[key] for key in ("messages", "thinking")}).startswith("[thinks]") == thinks
    own = {"enable_thinking": not thinks, "a": 1}
    chat, _ = as_chat(MessagesRequest.model_validate({**body, "chat_template_kwargs": own}))
    assert chat.chat_template_kwargs == {"thinking": thinks, **own}
    chat, _ = as_chat(MessagesRequest.model_validate(X))
    assert chat.chat_template_kwargs is None


def test_thinking_that_no_parser_finds_is_named(tokenizer: Tokenizer) -> None:
    WARNINGS.set([])
    ask(Script(tokenizer, "x"), tokenizer, "messages", {**X, "thinking": {"type": "enabled"}}, ToolSettings())
    # asyncio.run copies the context, whose list is the same
    assert WARNINGS.get() == ["thinking: stays in the text, because the server has no --reasoning-parser"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Write."},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": {"type": "any"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"output_config": {"effort": "high"}},
        *(
            {key: turn.body[key] for key in ("system", "messages", "tools", "thinking")}
            for turn in (*CLAUDE_CODE, *LATER_CLAUDE_CODE)
        ),
    ],
)
def test_count_tokens_counts_the_prompt(messaging: Server, fields: dict[str, Any]) -> None:
    counted = messaging.post(COUNT, {"messages": X["messages"], **fields})
    assert counted.status == 200, counted.body
    assert counted.json.keys() == {"input_tokens"}
    answer = messaging.post(PATH, {**X, **fields, "cache_salt": str(fields)[:1000], "max_tokens": 40})
    assert answer.status == 200, answer.body
    # a salt that no other request has: nothing is in the cache
    assert answer.json["usage"]["cache_read_input_tokens"] == 0
    assert counted.json["input_tokens"] == answer.json["usage"]["input_tokens"]
    stream = parsed(messaging.post(PATH, {**X, **fields, "max_tokens": 40, "stream": True}).body)
    assert stream[0]["message"]["usage"]["input_tokens"] == counted.json["input_tokens"]


def test_count_tokens_takes_prompts_beyond_the_context(messaging: Server) -> None:
    long = {"messages": [{"role": "user", "content": "a cat " * 200}]}
    count = messaging.post(COUNT, long).json["input_tokens"]
    assert count > 512
    says = fault(messaging.post(PATH, {**X, **long}), "invalid_request_error")
    assert says == f"messages: the prompt is too long: {count} tokens > 511 maximum; send fewer or shorter ones"


# wrong input

BLOCK = {"type": "text", "text": "x"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens=None: "),
    ({"max_tokens": 0}, "max_tokens=0: "),
    ({"messages": []}, "messages=[]: "),
    ({"messages": [{"content": "x"}]}, "messages[0].role=None: must be one of user, assistant, system"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role='tool': must be one of"),
    ({"messages": [{"role": "user", "content": []}], "system": "x"}, "messages: have no block that the model can read"),
    ({"messages": [{"role": "user"}]}, "messages[0].content=None: must be a string or a list of blocks"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]='x': must be a block"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text=None: "),
    ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages[0].content[0].type=['text']: "),
    (
        {"messages": [{"role": "user", "content": [BLOCK, {"type": "image", "source": {"type": "base64"}}]}]},
        "messages[0].content[1].type='image': not implemented; this server reads text alone, so leave the image out",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        "messages[0].content[0].type='document': not implemented; this server reads text alone",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": [BLOCK, {"type": "image"}]}],
                }
            ]
        },
        "messages[0].content[0].content[1].type='image': not implemented",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking"}]}]},
        "type='thinking': not implemented; allowed: ",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id=None"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": 5}]}]},
        "messages[0].content[0].content=5: must be a string or a list of text blocks",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": "no"}]}]},
        "messages[0].content[0].is_error='no': must be true or false",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}]},
        "messages[0].content[0].input=None: must be an object",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]},
        "messages: end with a tool_use block; add a message with its tool_result",
    ),
    ({"messages": [{"role": "assistant", "content": []}]}, "messages: end with an assistant's message without text"),
    ({"system": [{"type": "image"}]}, "system[0].type='image': not implemented"),
    ({"system": 5}, "system=5: "),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema: is missing"),
    ({"tools": [{"type": "retrieval", "name": "f", "input_schema": {}}]}, "tools.0.type='retrieval': "),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools='weather': two functions have this name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type='any': needs a tool that the client runs"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name: is missing; type=tool needs it"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name='f': must be a function of"),
    ({"tool_choice": "auto"}, "tool_choice='auto': "),
    (
        {"tools": [{"name": "f", "input_schema": {"type": 5}}], "tool_choice": {"type": "any"}},
        "tools['f'].input_schema",
    ),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format.schema"),
    (
        {"output_format": {"type": "json_schema", "schema": {}}}
        | {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "output_format: is there next to output_config.format",
    ),
    ({"thinking": {"type": "on"}}, "thinking.type='on': "),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens=0: "),
    ({"stop_sequences": [""]}, "stop_sequences.0='': "),
    ({"stop_sequences": "x"}, "stop_sequences='x': "),
    ({"temperature": -1}, "temperature=-1: "),
    ({"max_token": 3}, "max_token: unknown field; did you mean max_tokens?"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers=[{'type': 'url'}]: not implemented; this server calls no other"),
    ({"messages": [{"role": "user", "content": "a" * 1_000_000}]}, "messages: "),
]


@pytest.mark.parametrize(("fields", "says"), WRONG)
def test_wrong_input_is_named(messaging: Server, fields: dict[str, Any], says: str) -> None:
    answer = messaging.post(PATH, {**X, **fields})
    assert answer.status == 400, answer.body
    told = fault(answer, "invalid_request_error")
    assert says in told
    assert len(told) < 600


def test_many_results_are_not_more_messages_than_allowed(messaging: Server) -> None:
    results = [{"type": "tool_result", "tool_use_id": "t"}] * 5000
    answer = messaging.post(PATH, {**X, "messages": [{"role": "user", "content": results}]})
    assert answer.status == 400
    assert fault(answer, "invalid_request_error").startswith("messages: make more than 4096 messages")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "text", "tool_use", "user"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "a"]), inner),
    max_leaves=6,
)
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]) | VALUES},
    optional={
        "text": st.text(max_size=3) | VALUES,
        "thinking": st.text(max_size=3) | VALUES,
        "id": st.just("t") | VALUES,
        "tool_use_id": st.just("t") | VALUES,
        "name": st.just("f") | VALUES,
        "input": st.dictionaries(st.text(max_size=2), VALUES, max_size=2) | VALUES,
        "content": st.text(max_size=3) | VALUES,
        "is_error": st.booleans() | VALUES,
        "cache_control": st.just({"type": "ephemeral"}) | VALUES,
    },
)
CONVERSATIONS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"] * 5) | VALUES,
            "content": st.lists(BLOCKS, max_size=3) | VALUES,
        }
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(CONVERSATIONS)
def test_a_conversation_is_a_chat_or_an_error_that_names_its_place(conversation: list[dict[str, Any]]) -> None:
    body = CountTokensRequest.model_validate({"messages": conversation})
    try:
        chat, places = as_chat(body)
    except InvalidRequestError as fault:
        named = re.match(r"messages(\[\d+\]|: )", str(fault))
    else:
        named = None
        assert len(places) == len(chat.messages)
        for before, after in pairwise(chat.messages):
            assert before["role"] != after["role"] or after["role"] == "tool"
        blocks = [block for one in conversation for block in blocks_of(one)]
        texts = [part["text"] for one in chat.messages if one["role"] != "tool" for part in one["content"]]
        texts = [text.removeprefix("<system-reminder>\n").removesuffix("\n</system-reminder>") for text in texts]
        assert texts == [block["text"] for block in blocks if block["type"] == "text"]
        return
    assert named is not None


def blocks_of(message: dict[str, Any]) -> list[Any]:
    """Return the blocks of a message whose content may be a string."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def test_blocks_of_anthropics_own_tools_are_left_out(messaging: Server) -> None:
    blocks = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "text", "text": "y", "citations": [{"type": "web_search_result_location"}]},
    ]
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": "z"},
    ]
    answer = messaging.post(PATH, {**X, "messages": history})
    assert answer.status == 200, answer.body
    assert answer.headers["x-warning"] == (
        "messages: blocks of type server_tool_use, web_search_tool_result are left out; this server has no such tools"
    )
    assert prompt_of({"messages": history}) == "user: x;assistant: y;user: z;"


def test_keys_that_nothing_reads_are_named() -> None:
    WARNINGS.set([])
    blocks = [{"type": "text", "text": "x", "txet": "y"}, {"type": "tool_result", "tool_use_id": "t", "is_eror": True}]
    body = {"messages": [{"role": "user", "content": blocks, "name": "Al"}], "system": [{**BLOCK, "a": 1}]}
    as_chat(CountTokensRequest.model_validate(body))
    assert WARNINGS.get() == [
        "system[0]['a']: has no effect; nothing reads it",
        "messages[0]['name']: has no effect; nothing reads it",
        "messages[0].content[0]['txet']: has no effect; nothing reads it; did you mean text?",
        "messages[0].content[1]['is_eror']: has no effect; nothing reads it; did you mean is_error?",
    ]


# errors, keys and headers


async def sent_for(app: Any, path: str, headers: list[tuple[bytes, bytes]], root_path: str = "") -> tuple[int, bytes]:
    """Return status and body that an ASGI application sends for a request."""
    found: list[Any] = []

    async def send(event: Any) -> None:
        found.append(event)

    scope = {"type": "http", "path": root_path + path, "root_path": root_path, "headers": headers, "method": "POST"}
    await app(scope, None, send)
    return found[0]["status"], b"".join(event.get("body", b"") for event in found)


TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
}


@pytest.mark.parametrize("status", TYPES)
def test_errors_have_the_form_of_the_paths_api(status: int) -> None:
    error = APIError(status, "No.", param="x")
    for path in (PATH, COUNT, f"{PATH}/batches"):
        for prefix in ("", "/proxied"):
            code, body = asyncio.run(sent_for(error.response(), path, [], prefix))
            wanted = {"type": "error", "error": {"type": TYPES[status], "message": "No."}, "request_id": None}
            assert (code, json.loads(body)) == (status, wanted)
    for path in ("/v1/chat/completions", "/v1/messages_of_others", "/"):
        code, body = asyncio.run(sent_for(error.response(), path, []))
        assert (code, json.loads(body)) == (status, error.body)


def test_every_status_of_the_server_has_a_type() -> None:
    assert {int(status) for status in errors._TYPES} <= TYPES.keys()
    assert {HTTPStatus(status) for status in (400, 401, 403, 404, 413, 429, 500)} <= errors._ANTHROPIC_TYPES.keys()


def test_errors_over_http(messaging: Server) -> None:
    assert fault(messaging.get(PATH), "invalid_request_error") == "Method Not Allowed."
    assert fault(messaging.post(f"{PATH}/batches", {}), "not_found_error") == "Not Found."
    unknown = messaging.post(PATH, {**X, "model": "claude-opus-4-1"})
    assert unknown.status == 404
    assert "`claude-opus-4-1` does not exist" in fault(unknown, "not_found_error")
    wrong = messaging.request("POST", PATH, b"x=1", {"Content-Type": "text/plain"})
    assert wrong.status == 415
    assert "must be application/json" in fault(wrong, "invalid_request_error")
    assert fault(messaging.request("POST", PATH, b"{"), "invalid_request_error").startswith("body='{': is not JSON")
    large = messaging.request("POST", COUNT, b"[" + b"1," * 1_000_001 + b"1]")
    assert large.status == 413
    assert fault(large, "request_too_large") == "The body has more than 1000000 values."
    named = messaging.post(PATH, {**X, "n": 1}, **{"X-Request-Id": "mine-1"})
    fault(named, "invalid_request_error")
    assert (named.json["request_id"], named.headers["x-request-id"]) == ("mine-1", "mine-1")
    answer = messaging.post(PATH, X, **{"X-Request-Id": "mine-2"})
    assert (answer.json["id"], answer.headers["request-id"]) == ("msg_mine-2", "mine-2")


@pytest.mark.parametrize("text", ["", "I look"])
def test_a_fault_in_a_stream_is_an_event(tokenizer: Tokenizer, text: str) -> None:
    engine = Script(tokenizer, text)
    if not text:
        engine.script = lambda request: SpecrsError("x")
    events = ask(engine, tokenizer, "messages", {**X, "stream": True}).events
    if text:
        assert events[-1] == {"type": "message_stop"}
        return
    assert [event["type"] for event in events] == ["message_start", "ping", "error"]
    assert events[-1]["error"] == {
        "type": "api_error",
        "message": "The engine ended this request because of a fault.",
    }


KEYS = ("one", "two")


@pytest.mark.parametrize(
    ("headers", "known"),
    [
        ({"authorization": "Bearer one"}, True),
        ({"x-api-key": "two"}, True),
        ({"x-api-key": "three"}, False),
        ({"x-api-key": "Bearer one"}, False),
        ({"authorization": "one"}, False),
        ({"authorization": "Bearer none", "x-api-key": "one"}, True),
        ({"authorization": "Bearer one", "x-api-key": "none"}, True),
        ({"x-api-key": ""}, False),
        ({}, False),
    ],
)
def test_keys(headers: dict[str, str], known: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    for path in (PATH, "/v1/chat/completions"):
        status, body = asyncio.run(sent_for(KeyCheck(app, KEYS), path, raw))
        assert status == (200 if known else 401)
        if not known:
            assert ("authentication_error" in str(json.loads(body))) == (path == PATH)
    twice = [(b"x-api-key", b"one"), (b"x-api-key", b"one")]
    assert asyncio.run(sent_for(KeyCheck(app, KEYS), PATH, twice))[0] == 401
    # an empty key is a key, but no header is none
    for empty, status in (([(b"x-api-key", b"")], 200), ([], 401)):
        assert asyncio.run(sent_for(KeyCheck(app, [""]), PATH, empty))[0] == status


def test_betas(messaging: Server) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "effort-2025-11-24, dreams-2031-01-01"}
    for _ in range(2):
        answer = messaging.post(PATH, X, **headers)
        assert answer.status == 200
        told = "anthropic-beta='dreams-2031-01-01': has no effect; this server does not know it"
        assert answer.headers["x-warning"] == told
    assert len([line for line in messaging.lines if "dreams-2031-01-01" in line]) == 1
    assert "x-warning" not in messaging.post("/v1/chat/completions", {"messages": X["messages"]}, **headers).headers
    many = [(b"anthropic-beta", b",".join(b"x%d" % i for i in range(1000))), (b"anthropic-beta", b"y"), (b"a", b"b")]
    assert len(list(beta_warnings(many))) == 20
    known = b"claude-code-20250219,interleaved-thinking-2025-05-14,context-1m-2025-08-07,,"
    assert list(beta_warnings([(b"anthropic-beta", known)])) == []


def test_pauses_are_reported() -> None:
    async def main() -> list[int | None]:
        gate = asyncio.Event()

        async def source() -> AsyncIterator[int]:
            yield 1
            await gate.wait()
            yield 2

        found: list[int | None] = []
        async for item in _or_pauses(source(), 0.001):
            found.append(item)
            if found.count(None) == 3:
                gate.set()
        return found

    found = asyncio.run(main())
    assert [item for item in found if item is not None] == [1, 2]
    assert found.count(None) >= 3


def test_a_source_of_pauses_that_fails_or_is_left_is_ended() -> None:
    ended = []

    async def source(fails: bool) -> AsyncIterator[int]:
        try:
            yield 1
            if fails:
                raise ValueError("x")
            await asyncio.Event().wait()
        finally:
            ended.append(fails)

    async def main(fails: bool) -> None:
        pauses = _or_pauses(source(fails), 0.001)
        async for item in pauses:
            if item is None:
                break
        await pauses.aclose()

    asyncio.run(main(False))
    with pytest.raises(ValueError, match="x"):
        asyncio.run(main(True))
    assert ended == [False, True]


# fields without effect

MODELS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "": (MessagesRequest, X),
    "output_config.": (protocol.OutputConfig, {}),
    "tools.": (protocol.MessagesTool, {"name": "f", "input_schema": {}}),
    "thinking.": (protocol.ThinkingOptions, {"type": "enabled"}),
}
SAMPLES: dict[str, Any] = {
    "allowed_callers": ["code_execution_20250825"],
    "budget_tokens": 1024,
    "cache_control": {"type": "ephemeral"},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "defer_loading": True,
    "diagnostics": {"previous_message_id": None},
    "display": "omitted",
    "fallback_credit_token": "x",
    "fallbacks": [{"model": "x"}],
    "inference_geo": "us",
    "input_examples": [{}],
    "metadata": {"user_id": "x"},
    "safeguards": [{"type": "dangerous_tool_use"}],
    "speed": "fast",
    "task_budget": {"type": "tokens", "total": 1000},
    "user_profile_id": "x",
}


def test_fields_without_effect_are_named() -> None:
    page = Path(__file__).parents[2].joinpath("docs/server.md").read_text()
    rows = [row for row in page.splitlines() if "messages" in row]
    for at, (model, least) in MODELS.items():
        for name, entry in dispositions(model).items():
            assert any(f"`{at}{name}`" in row and entry.reason in row for row in rows), (at, name)
            if isinstance(entry, Rejected):
                with pytest.raises(ValidationError, match="not implemented"):
                    model.model_validate({**least, name: "x"})
                continue
            assert isinstance(entry, NoEffect)
            for value in (None, *entry.silent):
                assert list(unused(model.model_validate({**least, name: value}))) == []
            if name in SAMPLES:
                found = list(unused(model.model_validate({**least, name: SAMPLES[name]})))
                assert found == [f"{name}: has no effect; {entry.reason}"]
    assert SAMPLES.keys() <= {name for model, _ in MODELS.values() for name in dispositions(model)}


def test_the_document_has_the_errors_of_the_api() -> None:
    document = openapi("0", ["m"])
    for path, schema in ((PATH, "MessagesError"), (COUNT, "MessagesError"), ("/v1/responses", "Error")):
        found = document["paths"][path]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
        assert found == {"$ref": f"#/components/schemas/{schema}"}
        assert schema in document["components"]["schemas"]
    assert {"header": []} in document["security"]
