"""Request bodies of OpenAI's and vLLM's endpoints, field by field. Checks types; `SamplingParams` checks ranges.

A field that exists elsewhere and has no effect here declares what happens to it (`dispositions`): it is accepted with a
warning, or rejected with a reason. Unknown fields are rejected.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from specrs.sampling_lists import MAX_LOGIT_BIAS, MAX_STOP_STRING_LENGTH, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from specrs.server.dispositions import NoEffect, Rejected
from specrs.server.hosted_tools import runnable_choice, runnable_tools, tool_or_hosted
from specrs.server.limits import (
    MAX_FUNCTION_NAME_LENGTH,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_REQUEST_ID_LENGTH,
    MAX_TOOLS,
)
from specrs.server.ranges import ranged

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Text = {"type": "string", "minLength": 1}
_Ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
# Read by hand: pydantic would try every form on every item, and list every item that is wrong.
PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null"},
                _Text,
                _Ids,
                {"type": "array", "items": _Text, "minItems": 1, "maxItems": MAX_PROMPTS},
                {"type": "array", "items": _Ids, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_LENGTH)]


def only(value: object) -> Any:
    """Return pydantic's metadata for a field without meaning here: only `value` is accepted, and it changes nothing."""

    def check(given: object) -> object:
        # 0 equals False, and 1 True
        if type(given) is not type(value) or given != value:
            raise PydanticCustomError(
                "not_implemented", "not implemented; allowed: {allowed}", {"allowed": repr(value)}
            )
        return given

    return BeforeValidator(check)


UNSTORED = NoEffect("nothing is stored", silent=(False,))
CACHED = NoEffect("cached prefixes are found without it")
LABEL = NoEffect("it is a label that nothing reads")
Store = Annotated[bool | None, UNSTORED]
Label = Annotated[str | None, LABEL]
CacheKey = Annotated[str | None, CACHED]
CacheOptions = Annotated[dict[str, Any] | None, CACHED]
ServiceTier = Annotated[
    Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None,
    NoEffect("all requests are served alike; `priority` orders them", silent=("auto", "default")),
]
Priority = Annotated[int | None, Field(ge=-(2**63), lt=2**63)]
CacheSalt = Annotated[str | None, Field(max_length=1024)]
RequestId = Annotated[str | None, Field(max_length=MAX_REQUEST_ID_LENGTH, pattern=r"^[\x21-\x7e]*$")]
Moderation = Annotated[Any, Rejected("nothing is moderated here; leave it out")]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
Verbosity = Literal["low", "medium", "high"] | None
Nothing: TypeAlias = None
Never = Annotated[bool, only(False), WithJsonSchema({"const": False})] | None


class Body(BaseModel):
    """Base of request bodies. JSON types are not converted, and unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: str | None = None

    @property
    def has_large_answer(self) -> bool:
        """True if the answer may hold so many numbers that it is encoded in a thread."""
        return False


class StreamOptions(BaseModel):
    """Options of a stream. `include_usage`: a last chunk has the usage. `continuous_usage_stats`: every chunk has
    it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool | None, NoEffect("chunks are never padded", silent=(False,))] = None


class JSONSchema(BaseModel):
    """The schema of a `response_format`. `strict` is ignored, because a schema is always enforced."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """Form of the answer that a request demands: text, a JSON object, or JSON by a schema."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class FunctionDefinition(BaseModel):
    """A function that a model may call. `strict` is ignored; docs/server.md says when arguments are enforced."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=MAX_FUNCTION_NAME_LENGTH)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheOptions = None


class Tool(BaseModel):
    """A function that the model may call, one of a request's `tools`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: CacheOptions = None


Tools = Annotated[
    list[Annotated[Tool, WrapValidator(tool_or_hosted)]] | None,
    Field(max_length=MAX_TOOLS),
    AfterValidator(runnable_tools),
]
"""Type of the field `tools`: functions that the model may call. Tools that the server does not run are left out, with a
warning."""


class FunctionName(BaseModel):
    """Name of the function in a `tool_choice`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str


class NamedToolChoice(BaseModel):
    """A `tool_choice` that names a function."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: FunctionName


class AllowedTools(BaseModel):
    """Subset of `tools` that may be called. Each item is `{"type": "function", "function": {"name": ...}}`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]] = Field(max_length=MAX_TOOLS)


class AllowedToolChoice(BaseModel):
    """A `tool_choice` that allows only some of the tools."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_discriminator(allowed: str, named: str) -> Discriminator:
    """Return a discriminator for the forms of a `tool_choice`. Its tags are "Mode" for a text, `allowed` for an object
    that lists allowed tools, and `named` for one that demands a function."""

    def tag(choice: object) -> str:
        if isinstance(choice, str):
            return "Mode"
        kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
        return allowed if kind == "allowed_tools" else named

    return Discriminator(tag)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("Mode")]
    | Annotated[NamedToolChoice, Tag("NamedToolChoice")]
    | Annotated[AllowedToolChoice, Tag("AllowedToolChoice")],
    choice_discriminator("AllowedToolChoice", "NamedToolChoice"),
]


class DrawBody(Body):
    """Fields of every body that generates text and that say how tokens are drawn. null means the default."""

    temperature: float | None = ranged("temperature")
    top_p: float | None = ranged("top_p")
    top_k: int | None = ranged("top_k")
    min_p: float | None = ranged("min_p")
    seed: int | None = ranged("seed")
    num_speculative_tokens: int | None = ranged("num_speculative_tokens")


DRAW_FIELDS = tuple(name for name in DrawBody.model_fields if name not in Body.model_fields)
"""Names of the fields that `DrawBody` adds."""


class SamplingBody(DrawBody):
    """Fields that completions and chats share. null means the default, for every field."""

    n: int | None = ranged("n")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    min_tokens: int | None = ranged("min_tokens")
    presence_penalty: float | None = ranged("presence_penalty")
    frequency_penalty: float | None = ranged("frequency_penalty")
    repetition_penalty: float | None = ranged("repetition_penalty")
    logit_bias: dict[str, Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = ranged("prompt_logprobs")

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    request_id: RequestId = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_strs: bool | None = None
    return_drafts: bool | None = None
    per_request_spec_decode_metrics: Literal["none", "summary", "continuous"] | None = None

    user: Label = None

    # vLLM's and OpenAI's, at the values that change nothing
    spaces_between_special_tokens: Annotated[bool, only(True), WithJsonSchema({"const": True})] | None = None
    truncate_prompt_tokens: Nothing = None
    use_beam_search: Never = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    logits_processors: Nothing = None
    vllm_xargs: Nothing = None
    kv_transfer_params: Nothing = None

    # SGLang's, likewise: routers add them to what they pass on
    no_stop_trim: Never = None
    return_hidden_states: Never = None
    separate_reasoning: Annotated[bool, only(True), WithJsonSchema({"const": True})] | None = None
    stream_reasoning: Annotated[bool, only(True), WithJsonSchema({"const": True})] | None = None
    regex: Nothing = None
    ebnf: Nothing = None
    json_schema: Nothing = None
    lora_path: Nothing = None
    session_params: Nothing = None
    sampling_seed: Nothing = None

    @property
    def tells_prompts(self) -> bool:
        """True if the answer has log probabilities of prompts, and may therefore be large."""
        echoed = getattr(self, "echo", None) and getattr(self, "logprobs", None) is not None
        return bool(echoed) or self.prompt_logprobs is not None

    @property
    def has_large_answer(self) -> bool:
        """True if the answer may be large, because it has log probabilities of all prompt tokens."""
        return self.tells_prompts

    @property
    def gives_max_tokens(self) -> bool:
        """True if the body sets a number of tokens."""
        return any(getattr(self, name, None) is not None for name in ("max_tokens", "max_completion_tokens"))


class CompletionRequest(SamplingBody):
    """Body of `POST /v1/completions`."""

    prompt: PromptField
    max_tokens: int | None = ranged("max_tokens", low=0)
    echo: bool | None = None
    logprobs: int | None = ranged("logprobs")
    add_special_tokens: bool | None = None

    best_of: Annotated[int, only(1), WithJsonSchema({"const": 1})] | None = None
    suffix: str | None = None
    prompt_embeds: Nothing = None


class PredictionPart(BaseModel):
    """Part of a predicted text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """Text that a client expects the answer to repeat. It is drafted, and never changes the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["content"]
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        """The predicted text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(SamplingBody):
    """Body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = ranged("max_tokens")
    max_completion_tokens: int | None = ranged("max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = ranged("logprobs")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    metadata: Annotated[dict[str, str] | None, LABEL] = None
    prompt_cache_key: CacheKey = None
    prompt_cache_options: CacheOptions = None
    prompt_cache_retention: CacheKey = None
    safety_identifier: Label = None
    service_tier: ServiceTier = None
    store: Store = None
    prediction: Prediction | None = None

    tools: Tools = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(runnable_choice)] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, Rejected("use tools", allowed=([],))] = None
    function_call: Annotated[Any, Rejected("use tool_choice", allowed=("none",))] = None
    web_search_options: Annotated[Any, Rejected("nothing is searched; offer a function of your own in tools")] = None
    modalities: list[Literal["text"]] | None = None
    audio: Annotated[Any, Rejected("an answer is text alone; leave it out")] = None
    moderation: Moderation = None
    reasoning_effort: ReasoningEffort = None
    verbosity: Verbosity = None
    include_reasoning: bool | None = None
    chat_template: Nothing = None
    documents: Nothing = None
    echo: Never = None


class TokenizeRequest(Body):
    """Body of `POST /tokenize`: a `prompt`, or the `messages` of a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools = None
    chat_template: Nothing = None


class DetokenizeRequest(Body):
    """Body of `POST /detokenize`."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
