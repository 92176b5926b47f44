"""litellm: its completion call, and its translation of Anthropic's messages to chat completions."""

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices of models are not asked for over the network

import litellm
from scenario import (
    FORMAT,
    INSTRUCTIONS,
    KEY,
    LIMIT,
    MESSAGES,
    MODEL,
    QUESTION,
    SCHEMA,
    TOOL,
    URL,
    Answer,
    called,
    weather,
)

SHARED = {
    "model": f"openai/{MODEL}",
    "api_base": URL,
    "api_key": KEY,
    "max_tokens": LIMIT,
    "temperature": 0.0,
    "num_retries": 0,
}


def chat(stream: bool, **arguments: Any) -> Any:
    """Return the message of a completion. With `stream`, litellm joins the chunks to a message."""
    if not stream:
        return litellm.completion(**SHARED, **arguments).choices[0].message
    chunks = list(litellm.completion(**SHARED, **arguments, stream=True))
    return litellm.stream_chunk_builder(chunks).choices[0].message


for stream in (False, True):
    for extra in ({}, {"response_format": FORMAT}):
        history: list[Any] = list(MESSAGES)
        message = chat(stream, messages=history, tools=[TOOL], tool_choice="required", **extra)
        history.append(message.model_dump())
        for call in message.tool_calls:
            result = weather(**json.loads(call.function.arguments))
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})
        called(1)
        message = chat(stream, messages=history, tools=[TOOL], **extra)
        assert message.tool_calls or message.content
        if extra and not message.tool_calls:
            Answer.model_validate_json(message.content)
    Answer.model_validate_json(chat(stream, messages=MESSAGES, response_format=Answer).content)

tool = {"name": "weather", "description": "Current weather of a city.", "input_schema": SCHEMA}
history = [{"role": "user", "content": QUESTION}]
asked = {**SHARED, "system": INSTRUCTIONS, "tools": [tool]}
answer = litellm.anthropic.messages.create(**asked, messages=history, tool_choice={"type": "any"})
history.append({"role": "assistant", "content": answer["content"]})
results = [
    {"type": "tool_result", "tool_use_id": block["id"], "content": weather(**block["input"])}
    for block in answer["content"]
    if block["type"] == "tool_use"
]
called(1)
history.append({"role": "user", "content": results})
answer = litellm.anthropic.messages.create(**asked, messages=history)
assert answer["content"], answer
print("ok")
