"""The body of `POST /v1/responses`, field by field, and the chat that it asks for. Stores nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from specrs.errors import InvalidRequestError, invalid_request
from specrs.sampling import MAX_SPECULATIVE_TOKENS, MAX_TEMPERATURE
from specrs.server.limits import MAX_FUNCTION_NAME_LENGTH, MAX_MESSAGES, MAX_REQUEST_ID_LENGTH, MAX_TOOLS
from specrs.server.protocol import Body, ChatCompletionRequest, Never, Nothing, only


class FunctionTool(BaseModel):
    """One of `tools`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=MAX_FUNCTION_NAME_LENGTH)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(BaseModel):
    """A `tool_choice` that names a function."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    name: str


class TextFormat(BaseModel):
    """What the text must be."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    """`format`: what the text must be. `verbosity` is not implemented."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: TextFormat | None = None
    verbosity: Nothing = None


class ResponsesRequest(Body):
    """`POST /v1/responses`. null means the default, whatever the field."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    stream: bool | None = None

    # vLLM's, as for chats
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = Field(None, ge=-(2**63), lt=2**63)
    cache_salt: str | None = Field(None, max_length=1024)
    num_speculative_tokens: int | None = Field(None, ge=0, le=MAX_SPECULATIVE_TOKENS)
    request_id: str | None = Field(None, max_length=MAX_REQUEST_ID_LENGTH, pattern=r"^[\x21-\x7e]*$")

    # labels: they change no text
    metadata: dict[str, str] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None

    # at the values that change nothing
    store: Never = None
    background: Never = None
    truncation: Annotated[str, only("disabled"), WithJsonSchema({"const": "disabled"})] | None = None
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    reasoning: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    previous_response_id: Nothing = None
    conversation: Nothing = None
    prompt: Nothing = None
    max_tool_calls: Nothing = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None


_SAME = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "parallel_tool_calls", "stream", "cache_salt"),
    *("chat_template_kwargs", "structured_outputs", "priority", "num_speculative_tokens", "request_id"),
)
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text")


def as_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """The chat that `body` asks for. Raises `InvalidRequestError` for items of `input` that are none."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    fields["max_completion_tokens"] = body.max_output_tokens
    fields["messages"] = _messages(body)
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    choice = body.tool_choice
    fields["tool_choice"] = (
        {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice
    )
    wanted = None if body.text is None else body.text.format
    if wanted is not None and wanted.type != "text":
        schema = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        fields["response_format"] = {"type": wanted.type} | (
            {"json_schema": schema} if wanted.type == "json_schema" else {}
        )
    return ChatCompletionRequest.model_validate(fields)


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for i, item in enumerate(body.input):
        at, kind = f"input[{i}]", item.get("type", "message")
        if kind == "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise invalid_request(f"{at}['role']", item.get("role"), f"must be one of {', '.join(_ROLES)}")
            messages.append({"role": role, "content": _text(f"{at}['content']", item.get("content"))})
        elif kind == "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            if messages and messages[-1]["role"] == "assistant":  # calls go with the message before them
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            content = _text(f"{at}['output']", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind != "reasoning":  # templates leave earlier reasoning out
            raise invalid_request(
                f"{at}['type']",
                kind,
                "not implemented; allowed: message, function_call, function_call_output, reasoning",
            )
    if not messages:
        raise InvalidRequestError("input: has no message")
    return messages


def _text(at: str, content: object) -> str:
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            raise invalid_request(at, content, f"must be a string, or a list of parts of type {' or '.join(_TEXTS)}")
    return "\n".join(part["text"] for part in parts)
