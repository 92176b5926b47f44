"""litellm as a client of Anthropic's Messages API, which it translates its completions to: a loop of tools."""

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices of models are not asked for over the network

import litellm
from scenario import KEY, LIMIT, MESSAGES, MODEL, TOOL, URL, called, weather

SHARED = {
    "model": f"anthropic/{MODEL}",
    "api_base": URL.removesuffix("/v1"),
    "api_key": KEY,
    "max_tokens": LIMIT,
    "temperature": 0.0,
    "num_retries": 0,
    "tools": [TOOL],
}


def message(stream: bool, **arguments: Any) -> Any:
    """Return the message of a completion. With `stream`, litellm joins the chunks to a message."""
    if not stream:
        return litellm.completion(**SHARED, **arguments).choices[0].message
    chunks = list(litellm.completion(**SHARED, **arguments, stream=True))
    return litellm.stream_chunk_builder(chunks).choices[0].message


for stream in (False, True):
    history: list[Any] = list(MESSAGES)
    answer = message(stream, messages=history, tool_choice="required")
    history.append(answer.model_dump())
    for call in answer.tool_calls:
        result = weather(**json.loads(call.function.arguments))
        history.append({"role": "tool", "tool_call_id": call.id, "content": result})
    called(1)
    answer = message(stream, messages=history)
    assert answer.tool_calls or answer.content
print("ok")
