"""A model calls a function, reads its result, and answers. The server parses the calls.

pip install openai
specrs serve --enable-auto-tool-choice --tool-call-parser hermes &
python examples/tools.py [URL]
"""

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def weather(city: str) -> str:
    """The function that the model may call."""
    return f"{city}: 21 degrees, sunny"


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "How warm is it in Rome?"}]

# "required" makes a model call a tool; with "auto" it chooses, which small models are bad at
asked = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=[TOOL],
    tool_choice="required",
    parallel_tool_calls=False,
    max_tokens=128,
    temperature=0,
)
message = asked.choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls:
    result = weather(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) -> {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

answer = client.chat.completions.create(
    model=model, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=48, temperature=0
)
print(answer.choices[0].message.content)
