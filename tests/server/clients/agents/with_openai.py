"""The openai package: chat completions and responses, whole and streamed, and a predicted output."""

import json
from typing import Any

from openai import OpenAI
from scenario import FORMAT, KEY, LIMIT, MESSAGES, MODEL, TOOL, URL, Answer, called, weather

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)


def chat(stream: bool, **arguments: Any) -> Any:
    """Return the message of a chat completion. The package adds up a stream."""
    asked = {"model": MODEL, "max_tokens": LIMIT, "temperature": 0.0, **arguments}
    if not stream:
        return client.chat.completions.create(**asked).choices[0].message
    with client.chat.completions.stream(**asked) as events:
        for _ in events:
            pass
        return events.get_final_completion().choices[0].message


for stream in (False, True):
    for extra in ({}, {"response_format": FORMAT}):
        history: list[Any] = list(MESSAGES)
        message = chat(stream, messages=history, tools=[TOOL], tool_choice="required", **extra)
        history.append(message.model_dump(exclude_unset=True))
        for call in message.tool_calls:
            result = weather(**json.loads(call.function.arguments))
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})
        called(1)
        message = chat(stream, messages=history, tools=[TOOL], tool_choice="auto", **extra)
        if extra and not message.tool_calls:
            Answer.model_validate_json(message.content)
        message = chat(stream, messages=history, tools=[TOOL], tool_choice="none", **extra)
        assert not message.tool_calls
        if extra:
            Answer.model_validate_json(message.content)
    message = chat(stream, messages=MESSAGES, response_format=FORMAT)
    Answer.model_validate_json(message.content)

plain = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=LIMIT, temperature=0.0)
expected = plain.choices[0].message.content
predicted = client.chat.completions.create(
    model=MODEL,
    messages=MESSAGES,
    max_tokens=LIMIT,
    temperature=0.0,
    prediction={"type": "content", "content": expected},
)
assert predicted.choices[0].message.content == expected
assert predicted.usage.completion_tokens_details.accepted_prediction_tokens > 0

parsed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Answer, max_tokens=LIMIT)
assert isinstance(parsed.choices[0].message.parsed, Answer)
parsed = client.responses.parse(model=MODEL, input=MESSAGES, text_format=Answer, max_output_tokens=LIMIT)
assert isinstance(parsed.output_parsed, Answer)
print("ok")
