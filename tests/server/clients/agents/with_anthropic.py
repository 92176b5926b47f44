"""The anthropic package against /v1/messages: a loop of tools, whole and streamed, and the count of tokens."""

from typing import Any

from anthropic import Anthropic
from scenario import INSTRUCTIONS, KEY, LIMIT, MODEL, QUESTION, TOOL, URL, called, weather

client = Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0)
FUNCTION: dict[str, Any] = TOOL["function"]
OFFERED: dict[str, Any] = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}


def message(stream: bool, **arguments: Any) -> Any:
    """Return the message of an answer. With `stream`, the package joins the events to a message."""
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": LIMIT, "system": INSTRUCTIONS, "tools": [OFFERED]}
    asked["extra_body"] = {"temperature": 0.0}  # which the package has no argument for
    if not stream:
        return client.messages.create(**asked, **arguments)
    with client.messages.stream(**asked, **arguments) as events:
        for _ in events:
            pass
        return events.get_final_message()


for stream in (False, True):
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    answer = message(stream, messages=history, tool_choice={"type": "any"})
    assert answer.stop_reason == "tool_use"
    history.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
    uses = [block for block in answer.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)} for block in uses]
    history.append({"role": "user", "content": results})
    called(1)
    answer = message(stream, messages=history, tool_choice={"type": "auto"})
    assert answer.content
    assert answer.usage.output_tokens > 0
counted = client.messages.count_tokens(
    model=MODEL, system=INSTRUCTIONS, messages=[{"role": "user", "content": QUESTION}]
)
assert counted.input_tokens > 10
print("ok")
