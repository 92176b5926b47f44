"""Request bodies of Anthropic's Messages API, field by field. `conversation.py` converts them to chats.

As in `server/protocol.py`, fields that have no effect here declare what happens to them, and unknown fields are
rejected.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WrapValidator

from specrs.sampling_lists import MAX_STOP_STRINGS
from specrs.server.dispositions import NoEffect, Rejected
from specrs.server.hosted_tools import runnable_tools, tool_or_hosted
from specrs.server.limits import MAX_FUNCTION_NAME_LENGTH, MAX_MESSAGES, MAX_TOOLS
from specrs.server.protocol import CACHED, LABEL, Body, CacheOptions, CacheSalt, DrawBody, Priority, RequestId, Stop
from specrs.server.ranges import MAX_INTEGER


class MessagesTool(BaseModel):
    """A tool that the client runs, one of a request's `tools`. `strict` is ignored; docs/server.md says when inputs
    follow their schema."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=MAX_FUNCTION_NAME_LENGTH)
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheOptions = None
    allowed_callers: Annotated[list[str] | None, NoEffect("the client calls its tools", silent=(["direct"],))] = None
    defer_loading: Annotated[bool | None, NoEffect("all tools are offered at once", silent=(False,))] = None
    eager_input_streaming: bool | None = None  # inputs are always streamed as they are written
    input_examples: Annotated[
        list[dict[str, Any]] | None, NoEffect("chat templates show no examples of inputs", silent=([],))
    ] = None


def _without_custom(tool: Any) -> Any:
    """Return a tool without the type "custom", which is the default. In OpenAI's API that type is another tool."""
    custom = isinstance(tool, dict) and tool.get("type") == "custom"
    return {key: value for key, value in tool.items() if key != "type"} if custom else tool


MessagesTools = Annotated[
    list[Annotated[MessagesTool, WrapValidator(tool_or_hosted), BeforeValidator(_without_custom)]] | None,
    Field(max_length=MAX_TOOLS),
    AfterValidator(runnable_tools),
]
"""Type of the field `tools`. Tools that Anthropic defines are left out, with a warning."""


class MessagesToolChoice(BaseModel):
    """The field `tool_choice`. `name` is the demanded tool if `type` is "tool"."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(BaseModel):
    """The field `thinking`. `type` sets the chat template's variable for reasoning."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[
        int | None, Field(ge=1, le=MAX_INTEGER), NoEffect("the model decides how long it thinks")
    ] = None
    display: Annotated[str | None, NoEffect("thinking is sent in full", silent=("summarized",))] = None


class OutputFormat(BaseModel):
    """Format that the text must have: JSON by a schema."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """The field `output_config`. `effort` is passed to chat templates that read `reasoning_effort`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Annotated[dict[str, Any] | None, NoEffect("the client counts the tokens of a task")] = None


class CountTokensRequest(Body):
    """Body of `POST /v1/messages/count_tokens`: the fields that determine the prompt. null means the default."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[dict[str, Any]] | None = None
    tools: MessagesTools = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    # vLLM's, as for chats
    chat_template_kwargs: dict[str, Any] | None = None

    cache_control: Annotated[dict[str, Any] | None, CACHED] = None
    context_management: Annotated[
        dict[str, Any] | None, NoEffect("no context is edited; send fewer messages", silent=({}, {"edits": []}))
    ] = None
    mcp_servers: Annotated[
        Any, Rejected("this server calls no other; offer a tool of your own in tools", allowed=([],))
    ] = None
    speed: Annotated[
        Literal["standard", "fast"] | None, NoEffect("all requests are served alike", silent=("standard",))
    ] = None


class MessagesRequest(CountTokensRequest, DrawBody):
    """Body of `POST /v1/messages`. null means the default, for every field but `max_tokens`."""

    max_tokens: int = Field(ge=1, le=MAX_INTEGER)
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None

    # vLLM's, as for chats
    structured_outputs: dict[str, Any] | None = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    request_id: RequestId = None

    metadata: Annotated[dict[str, Any] | None, LABEL] = None
    inference_geo: Annotated[str | None, NoEffect("there is one server")] = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None,
        NoEffect("all requests are served alike; `priority` orders them", silent=("auto", "standard_only")),
    ] = None
    diagnostics: Annotated[dict[str, Any] | None, NoEffect("usage has the tokens from the cache")] = None
    fallbacks: Annotated[Any, NoEffect("no other model is asked", silent=([],))] = None
    fallback_credit_token: Annotated[str | None, NoEffect("no other model is asked")] = None
    safeguards: Annotated[
        list[dict[str, Any]] | None, NoEffect("the client judges the calls of its tools", silent=([],))
    ] = None
    user_profile_id: Annotated[str | None, LABEL] = None
    container: Annotated[Any, Rejected("no code is run here; leave it out")] = None
