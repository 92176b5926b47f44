"""Prints the fields of requests that the openai package documents, as JSON: run by the interpreter of its environment.

`python openai_fields.py > ../openai_fields.json` writes the list anew, for the version of `environments/openai.lock`.
"""

import json
from typing import Required, get_args, get_origin, get_type_hints

from openai.types import completion_create_params
from openai.types.chat import (
    ChatCompletionAllowedToolChoiceParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionToolUnionParam,
)
from openai.types.chat import (
    completion_create_params as chat_params,
)
from openai.types.responses import FunctionToolParam, ResponseIncludable, response_create_params, tool_param
from openai.types.responses.response_text_config_param import ResponseTextConfigParam
from openai.types.responses.tool_choice_allowed_param import ToolChoiceAllowedParam
from openai.types.shared_params import FunctionDefinition, Reasoning, response_format_json_schema


def fields(kind):
    """Return the names of a type's fields, and of the required ones among them."""
    hints = get_type_hints(kind, include_extras=True)
    return {"all": sorted(hints), "required": sorted(name for name in hints if get_origin(hints[name]) is Required)}


def literals(kind):
    """Return all strings in a type made of literals, unions and lists."""
    values = {part for part in get_args(kind) if isinstance(part, str)}
    return sorted(values.union(*(literals(part) for part in get_args(kind) if not isinstance(part, str))))


def types(*kinds):
    """Return the values of the field `type` in the types of unions."""
    members = [member for kind in kinds for member in get_args(kind) if hasattr(member, "__annotations__")]
    return sorted({value for member in members for value in literals(get_type_hints(member)["type"])})


base = {
    "completions": completion_create_params.CompletionCreateParamsBase,
    "chat": chat_params.CompletionCreateParamsBase,
    "responses": response_create_params.ResponseCreateParamsBase,
}
nested = {
    "chat.stream_options": ChatCompletionStreamOptionsParam,
    "chat.response_format.json_schema": response_format_json_schema.JSONSchema,
    "chat.tools": ChatCompletionFunctionToolParam,
    "chat.tools.function": FunctionDefinition,
    "chat.tool_choice": ChatCompletionAllowedToolChoiceParam,
    "responses.reasoning": Reasoning,
    "responses.stream_options": response_create_params.StreamOptions,
    "responses.text": ResponseTextConfigParam,
    "responses.tools": FunctionToolParam,
    "responses.tool_choice": ToolChoiceAllowedParam,
}
chat, responses = (get_type_hints(base[name]) for name in ("chat", "responses"))
found = {
    "fields": {name: fields(kind) for name, kind in {**base, **nested}.items()},
    "values": {
        "chat.reasoning_effort": literals(chat["reasoning_effort"]),
        "chat.service_tier": literals(chat["service_tier"]),
        "chat.verbosity": literals(chat["verbosity"]),
        "responses.include": literals(ResponseIncludable),
        "responses.service_tier": literals(responses["service_tier"]),
        "responses.truncation": literals(responses["truncation"]),
    },
    "tools": types(ChatCompletionToolUnionParam, tool_param.ToolParam),
    "tool_choices": types(chat["tool_choice"], responses["tool_choice"]),
}
print(json.dumps(found, indent=1))
