"""`/v1/responses` tells what `/v1/chat/completions` tells, in items and events."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

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
    """The events of a stream, whose names and numbers must be those of their data."""
    found = []
    for number, block in enumerate(raw.decode().removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
    return found


def plain(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without their ids, which are new each time."""
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
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"max_output_tokens": 5000}, "max_tokens"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_refusals(responding: Server, fields: dict[str, Any], param: str) -> None:
    answer = responding.post(PATH, {"input": "x", **fields})
    assert answer.status == 400, answer.body
    assert answer.json["error"]["param"] == param, answer.json
