"""The body of `POST /v1/responses`, field by field, and the chat that it asks for. Looks up no stored responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Tag, WrapValidator

from specrs.errors import InvalidRequestError, invalid_request
from specrs.server.dispositions import NoEffect, Rejected, warn
from specrs.server.hosted_tools import RunnableTools, left_out, runnable_choice, runnable_tools, tool_or_hosted
from specrs.server.input_items import is_hosted_item, item_type, item_warnings
from specrs.server.limits import MAX_FUNCTION_NAME_LENGTH, MAX_MESSAGES, MAX_TOOLS
from specrs.server.message_fields import without_marks
from specrs.server.protocol import (
    DRAW_FIELDS,
    LABEL,
    CacheKey,
    CacheOptions,
    CacheSalt,
    ChatCompletionRequest,
    DrawBody,
    Label,
    Moderation,
    Priority,
    ReasoningEffort,
    RequestId,
    ServiceTier,
    Verbosity,
    choice_discriminator,
)
from specrs.server.ranges import ranged


class FunctionTool(BaseModel):
    """A function that the client offers in `tools`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=MAX_FUNCTION_NAME_LENGTH)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    async_: Annotated[bool | None, NoEffect("the client calls its functions", silent=(False,))] = Field(
        None, alias="async"
    )
    allowed_callers: Annotated[list[str] | None, NoEffect("the client calls its functions", silent=(["direct"],))] = (
        None
    )
    defer_loading: Annotated[bool | None, NoEffect("all tools are offered at once", silent=(False,))] = None
    output_schema: Annotated[dict[str, Any] | None, NoEffect("results are not checked")] = None


class NamedTool(BaseModel):
    """A `tool_choice` that names a function."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    name: str


class AllowedTools(BaseModel):
    """A `tool_choice` that narrows the tools to those named: `{"type": "function", "name": ...}`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]] = Field(max_length=MAX_TOOLS)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("Mode")]
    | Annotated[NamedTool, Tag("NamedTool")]
    | Annotated[AllowedTools, Tag("AllowedTools")],
    choice_discriminator("AllowedTools", "NamedTool"),
]


class ReasoningOptions(BaseModel):
    """The field `reasoning`. `effort` is passed to chat templates that read `reasoning_effort`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    effort: ReasoningEffort = None
    summary: Annotated[
        Literal["auto", "concise", "detailed"] | None, NoEffect("the answer has the full reasoning, and no summary")
    ] = None
    generate_summary: Annotated[
        Literal["auto", "concise", "detailed"] | None, NoEffect("the answer has the full reasoning, and no summary")
    ] = None
    context: Annotated[
        Any, Rejected("the chat template decides which reasoning it shows", allowed=("auto", "current_turn"))
    ] = None
    mode: Annotated[Any, Rejected("there is one mode; leave it out", allowed=("standard",))] = None


class StreamOptions(BaseModel):
    """Options of a stream. Unlike in chats there is none for usage, which the last event always has."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_obfuscation: Annotated[bool | None, NoEffect("events are never padded", silent=(False,))] = None


class TextFormat(BaseModel):
    """Format that the text must have: plain text, a JSON object, or JSON by a schema."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    """The field `text`. `format` is the format of the text; `verbosity` is passed to chat templates that read it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: TextFormat | None = None
    verbosity: Verbosity = None


Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesRequest(DrawBody):
    """Body of `POST /v1/responses`. null means the default, for every field."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = ranged("max_tokens")
    tools: Annotated[
        list[Annotated[FunctionTool, WrapValidator(tool_or_hosted)]] | None,
        Field(max_length=MAX_TOOLS),
        AfterValidator(runnable_tools),
    ] = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(runnable_choice)] = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None  # a prompt that does not fit is an error

    # vLLM's, as for chats
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    request_id: RequestId = None

    # labels that the response repeats
    metadata: dict[str, str] | None = None
    user: str | None = None

    prompt_cache_key: CacheKey = None
    prompt_cache_options: CacheOptions = None
    prompt_cache_retention: CacheKey = None
    safety_identifier: Label = None
    service_tier: ServiceTier = None
    store: bool | None = None
    """null means true, as in OpenAI's API."""
    previous_response_id: str | None = Field(None, min_length=1)
    access_programs: Annotated[dict[str, Any] | None, NoEffect("access programs are OpenAI's own")] = None
    image: Annotated[dict[str, Any] | None, NoEffect("an input has no images")] = None
    client_metadata: Annotated[dict[str, str] | None, LABEL] = None  # Codex sends it
    include: Annotated[
        list[Included] | None,
        NoEffect("items have no such parts; reasoning items have their text in content", silent=([],)),
    ] = None
    max_tool_calls: Annotated[int | None, Field(ge=1, lt=2**31), NoEffect("the server runs no tools")] = None

    background: Annotated[
        Any, Rejected("the answer comes on the connection of its request; leave it out", allowed=(False,))
    ] = None
    context_management: Annotated[Any, Rejected("no context is compacted; send a shorter input", allowed=([],))] = None
    conversation: Annotated[Any, Rejected("there are no conversations; use previous_response_id")] = None
    moderation: Moderation = None
    prompt: Annotated[Any, Rejected("no prompts are stored; send instructions and input")] = None
    top_logprobs: Annotated[Any, Rejected("responses have no log probabilities; ask for a chat", allowed=(0,))] = None


_SAME = (
    *DRAW_FIELDS,
    *("model", "parallel_tool_calls", "stream", "cache_salt"),
    *("chat_template_kwargs", "structured_outputs", "priority", "request_id"),
)
_FUNCTION = {"name", "description", "parameters", "strict"}
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Content part types, each with the field that holds its text."""


def as_chat(body: ResponsesRequest, earlier: Sequence[dict[str, Any]] = ()) -> ChatCompletionRequest:
    """Convert `body` to a chat request. `earlier` are the items of the conversation that it continues.

    Raises `InvalidRequestError` if an item of `input` is not valid, or if there are too many messages.
    """
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    fields["max_completion_tokens"] = body.max_output_tokens
    fields["messages"] = [message for _, message in _messages(body, earlier)]
    if len(fields["messages"]) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"input: makes {len(fields['messages'])} messages, with those of instructions and previous_response_id; "
            f"must be at most {MAX_MESSAGES}"
        )
    if isinstance(body.input, list):
        for warning in item_warnings(body.input):
            warn(warning)
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(include=_FUNCTION, exclude_none=True)}
            for tool in body.tools
        ]
    fields["tool_choice"] = _choice(body.tool_choice)
    fields["reasoning_effort"] = None if body.reasoning is None else body.reasoning.effort
    fields["verbosity"] = None if body.text is None else body.text.verbosity
    wanted = None if body.text is None else body.text.format
    if wanted is not None:
        schema = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        has_schema = wanted.type == "json_schema" or wanted.schema_ is not None
        fields["response_format"] = {"type": wanted.type} | ({"json_schema": schema} if has_schema else {})
    chat = ChatCompletionRequest.model_validate(fields)
    if left_out(body.tools):
        tools = RunnableTools(chat.tools or [])
        tools.left_out = left_out(body.tools)
        chat.tools = tools
    return chat


def _choice(choice: str | NamedTool | AllowedTools | None) -> Any:
    """Convert the `tool_choice` of a Responses request to that of a chat request, which nests a function's name in
    `function`. Strings are kept."""
    if isinstance(choice, NamedTool):
        return _function(choice.model_dump())
    if isinstance(choice, AllowedTools):
        allowed = {"mode": choice.mode, "tools": [_function(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert a function tool to the form of chat requests, `{"type": "function", "function": {"name": ...}}`. Other
    tools are kept."""
    return {"type": "function", "function": {"name": tool.get("name")}} if tool.get("type") == "function" else tool


def message_places(body: ResponsesRequest, earlier: Sequence[dict[str, Any]] = ()) -> list[str]:
    """Return the field of `body` that each message of `as_chat` comes from: `instructions`, `previous_response_id`,
    `input` or one of its items."""
    return [place for place, _ in _messages(body, earlier)]


def _items(body: ResponsesRequest, earlier: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the items of the whole conversation, each with the field of `body` that it comes from."""
    for item in earlier:
        yield "previous_response_id", item
    if isinstance(body.input, str):
        yield "input", {"role": "user", "content": body.input}
    else:
        for i, item in enumerate(body.input or []):
            yield f"input[{i}]", item


def _messages(body: ResponsesRequest, earlier: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the messages of the chat that `body` asks for, each with the field that it comes from."""
    messages: list[tuple[str, dict[str, Any]]] = []
    if body.instructions:
        messages.append(("instructions", {"role": "system", "content": body.instructions}))
    thoughts: list[str] = []  # of the assistant's message that comes next

    def add(message: dict[str, Any]) -> None:
        own = {"reasoning": "\n".join(thoughts)} if thoughts and message["role"] == "assistant" else {}
        messages.append((at, message | own))
        thoughts.clear()

    for at, given in _items(body, earlier):
        if is_hosted_item(given):
            continue
        item = without_marks("input", given)
        kind = item_type(item)
        if kind == "message":
            role = item.get("role")
            if role not in _ROLES:
                raise invalid_request(f"{at}['role']", role, f"must be one of {', '.join(_ROLES)}")
            add({"role": role, "content": _text(f"{at}['content']", item.get("content"))})
        elif kind == "function_call":
            if thoughts or not messages or messages[-1][1]["role"] != "assistant":
                add({"role": "assistant", "content": None})
            # calls go with the message before them
            messages[-1][1].setdefault("tool_calls", []).append(_call(at, item))
        elif kind == "function_call_output":
            content = _text(f"{at}['output']", item.get("output"))
            add({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "reasoning":
            thoughts += _reasoning(at, item)
        else:
            raise invalid_request(
                f"{at}['type']",
                kind,
                "not implemented; allowed: message, function_call, function_call_output, reasoning",
            )
    if not messages:
        raise InvalidRequestError("input: has no message")
    return messages


def _call(at: str, item: dict[str, Any]) -> dict[str, Any]:
    for key in ("name", "arguments"):
        if not isinstance(item.get(key), str):
            raise invalid_request(f"{at}[{key!r}]", item.get(key), "must be a string")
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _reasoning(at: str, item: dict[str, Any]) -> list[str]:
    """Return the texts of a reasoning item. An item with only a summary or encrypted content has none."""
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise invalid_request(f"{at}['content']", parts, "must be a list of parts of type reasoning_text")
    for j, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise invalid_request(f"{at}['content'][{j}]", part, "must be a part of type reasoning_text")
    return [part["text"] for part in parts]


def _text(at: str, content: object) -> str:
    if isinstance(content, str):
        return content
    texts = []
    parts: list[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        key = _TEXTS.get(str(part.get("type"))) if isinstance(part, dict) else None
        if key is None or not isinstance(part.get(key), str):
            raise invalid_request(at, content, f"must be a string, or a list of parts of type {' or '.join(_TEXTS)}")
        texts.append(without_marks("input", part)[key])
    return "\n".join(texts)
