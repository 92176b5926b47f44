"""Runs what users of the openai client do, and checks each result. Run by the interpreter of the client's environment,
with an address."""

import json
import sys

import openai
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": "class Stack:"}]

# models
(model,) = client.models.list().data
assert model.id == "pair"

# completions
done = client.completions.create(model="pair", prompt="def add(a, b):", max_tokens=12, temperature=0, logprobs=2, n=2)
assert [choice.index for choice in done.choices] == [0, 1]
assert done.choices[0].text == done.choices[1].text != ""
assert done.choices[0].finish_reason == "length"
assert len(done.choices[0].logprobs.tokens) == 12
assert done.usage.completion_tokens == 24
assert done.usage.prompt_tokens_details.cached_tokens >= 0
assert done.model_extra["metrics"]["speculative_decoding"]["num_spec_tokens"] == 5

# chat, whole and streamed: the same text, the usage at the end
whole = client.chat.completions.create(
    model="pair", messages=MESSAGES, max_completion_tokens=20, temperature=0, logprobs=True, top_logprobs=2
)
text = whole.choices[0].message.content
assert whole.choices[0].message.role == "assistant"
assert "".join(item.token for item in whole.choices[0].logprobs.content) == text
assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
parts = [{"role": "user", "content": [{"type": "text", "text": "class Stack:"}]}]
chunks = list(
    client.chat.completions.create(
        model="pair",
        messages=parts,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
)
assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == text
assert chunks[0].choices[0].delta.role == "assistant"
assert chunks[-2].choices[0].finish_reason == "length"
assert chunks[-1].choices == []
assert chunks[-1].usage.completion_tokens == 20
assert chunks[-1].model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0

# what vLLM adds
chosen = client.chat.completions.create(
    model="pair",
    messages=MESSAGES,
    max_tokens=20,
    temperature=0,
    extra_body={"structured_outputs": {"choice": ["red", "blue"]}, "num_speculative_tokens": 2, "top_k": 5},
)
assert chosen.choices[0].message.content in ("red", "blue")
assert chosen.choices[0].finish_reason == "stop"

# a stream that is left
with client.completions.create(
    model="pair", prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
) as s:
    for _ in s:
        break


def failure(call, kind):
    """Return the error that a call must end with."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def fails(kind, status, param, **arguments):
    """Check that a completion fails with this error, status and parameter."""
    error = failure(lambda: client.completions.create(**{"model": "pair", "prompt": "x", **arguments}), kind)
    assert error.status_code == status, error
    assert error.body["code"] == status
    assert error.param == param, error.param
    assert error.body["message"]


fails(openai.NotFoundError, 404, "model", model="gpt-5")
fails(openai.BadRequestError, 400, "temperature", temperature=-1)
fails(openai.BadRequestError, 400, "temperature", temperature=-1, stream=True)
fails(openai.BadRequestError, 400, "nonsense", extra_body={"nonsense": 1})
fails(openai.BadRequestError, 400, "prompt", prompt=[1] * 600)
fails(openai.BadRequestError, 400, "best_of", best_of=2)
fails(openai.BadRequestError, 400, "suffix", suffix="y")
missing = failure(lambda: client.moderations.create(model="pair", input="x"), openai.NotFoundError)
assert missing.body["type"] == "NotFoundError"

# embeddings: as base64, which the client asks for, and as numbers
embedded = client.embeddings.create(model="pair", input=["x", "def add(a, b):"], dimensions=16)
numbers = client.embeddings.create(model="pair", input=["x", "def add(a, b):"], dimensions=16, encoding_format="float")
assert [item.embedding for item in embedded.data] == [item.embedding for item in numbers.data]
assert [len(item.embedding) for item in embedded.data] == [16, 16]
assert embedded.usage.prompt_tokens == embedded.usage.total_tokens > 2
wrong = failure(lambda: client.embeddings.create(model="pair", input="x", dimensions=10**6), openai.BadRequestError)
assert wrong.param == "dimensions"

# a loop of tools: the model is made to call, its calls are answered, and it goes on
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTIONS = {"weather": lambda city, days: f"{city}: {days} days of sun"}
tools = [{"type": "function", "function": {"name": "weather", "description": "A forecast.", "parameters": WEATHER}}]
conversation = [{"role": "user", "content": "How warm is it in Rome?"}]
results = []
for choice in ("required", {"type": "function", "function": {"name": "weather"}}, "auto", "none"):
    extra = {}
    if choice == "auto":  # so small a model calls only if the text is given
        call = {"name": "weather", "arguments": {"city": "Oslo", "days": 3}}
        extra["structured_outputs"] = {"choice": [f"<tool_call>{json.dumps(call)}</tool_call>"]}
    answer = client.chat.completions.create(
        model="pair",
        messages=conversation,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=60,
        temperature=0,
        extra_body=extra,
    ).choices[0]
    conversation.append(answer.message.model_dump(exclude_none=True))
    for call in answer.message.tool_calls or []:
        results.append(FUNCTIONS[call.function.name](**json.loads(call.function.arguments)))
        conversation.append({"role": "tool", "tool_call_id": call.id, "content": results[-1]})
assert len(results) == 3, conversation
assert results[-1] == "Oslo: 3 days of sun"
assert answer.message.tool_calls is None
assert answer.message.content

# the same call, streamed, as the client's own accumulator adds it up
with client.chat.completions.stream(
    model="pair",
    messages=conversation[:1],
    tools=tools,
    tool_choice="required",
    parallel_tool_calls=False,
    max_tokens=60,
    temperature=0,
) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_completion().choices[0]
assert "tool_calls.function.arguments.delta" in kinds, kinds
assert final.finish_reason == "tool_calls"
assert FUNCTIONS["weather"](**json.loads(final.message.tool_calls[0].function.arguments)) == results[0]
# responses: whole, streamed, and a loop of tools with all of its history
answer = client.responses.create(
    model="pair", instructions="Write Python.", input="class Stack:", max_output_tokens=20, temperature=0
)
assert answer.status == "incomplete"
assert answer.incomplete_details.reason == "max_output_tokens"
assert answer.usage.output_tokens == 20
assert answer.output_text
with client.responses.stream(
    model="pair", instructions="Write Python.", input="class Stack:", max_output_tokens=20, temperature=0
) as stream:
    deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
assert "".join(deltas) == answer.output_text
function = {"type": "function", "name": "weather", "parameters": WEATHER}
history = [{"role": "user", "content": [{"type": "input_text", "text": "How warm is it in Rome?"}]}]
asked = {"model": "pair", "tools": [function], "max_output_tokens": 60, "temperature": 0, "parallel_tool_calls": False}
answer = client.responses.create(input=history, tool_choice="required", **asked)
(call,) = answer.output
assert call.type == "function_call"
with client.responses.stream(input=history, tool_choice="required", **asked) as stream:
    pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
    (streamed,) = stream.get_final_response().output
assert "".join(pieces) == streamed.arguments == call.arguments
output = FUNCTIONS["weather"](**json.loads(call.arguments))
history += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": output}]
answer = client.responses.create(input=history, tool_choice="none", **asked)
assert answer.output[0].type == "message"
# the same loop with what the server stores: each request sends only what is new
first = client.responses.create(input=history[:1], tool_choice="required", **asked)
result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": output}
chained = client.responses.create(input=[result], previous_response_id=first.id, tool_choice="none", **asked)
assert chained.output_text == answer.output_text != ""
assert chained.usage.input_tokens == answer.usage.input_tokens
assert chained.previous_response_id == first.id
with client.responses.stream(
    input=[result], previous_response_id=first.id, tool_choice="none", store=False, **asked
) as stream:
    events = list(stream)
deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
left = events[-1].response
assert "".join(deltas) == answer.output_text
assert client.responses.retrieve(first.id).output == first.output
items = list(client.responses.input_items.list(chained.id, limit=1, order="asc"))
assert [(item.type, item.call_id, item.output) for item in items] == [
    ("function_call_output", result["call_id"], output)
]
(item,) = client.responses.input_items.list(first.id)
assert item.content[0].text == "How warm is it in Rome?"
client.responses.delete(first.id)
for call in (
    lambda: client.responses.retrieve(first.id),
    lambda: client.responses.retrieve(left.id),
    lambda: client.responses.create(input="x", previous_response_id=chained.id, **asked),
):
    assert failure(call, openai.NotFoundError).body["code"] == 404
# own output goes back as it came: a call that was cut off, and fields that have no effect here
cut = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Ro'}, "id": "call_1"}
history = [
    {"role": "developer", "content": "Be brief."},
    *conversation[:1],
    {"role": "assistant", "content": None, "tool_calls": [cut]},
    {"role": "tool", "tool_call_id": "call_1", "content": "31"},
]
raw = client.chat.completions.with_raw_response.create(
    model="pair",
    messages=history,
    tools=[*tools, {"type": "custom", "custom": {"name": "x"}}],
    tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{**tools[0]}]}},
    parallel_tool_calls=False,
    reasoning_effort="low",
    verbosity="low",
    store=True,
    service_tier="flex",
    user="me",
    max_tokens=60,
    temperature=0,
)
(again,) = raw.parse().choices[0].message.tool_calls
assert again.function.name == "weather"
assert raw.parse().usage.completion_tokens_details.reasoning_tokens == 0
for name in ("tools[1].type='custom'", "reasoning_effort", "verbosity", "store", "service_tier", "user"):
    assert name in raw.headers["x-warning"], name
raw = client.responses.with_raw_response.create(
    model="pair",
    input="x",
    max_output_tokens=2,
    include=["reasoning.encrypted_content"],
    reasoning={"effort": "low", "summary": "auto"},
    truncation="auto",
    tools=[{"type": "web_search"}],
)
assert raw.parse().status == "incomplete"
for name in ("tools[0].type='web_search'", "include", "reasoning.summary"):
    assert name in raw.headers["x-warning"], name
refused = failure(
    lambda: client.responses.create(model="pair", input="x", previous_response_id="resp_1"), openai.NotFoundError
)
assert refused.param == "previous_response_id"
print("ok")
