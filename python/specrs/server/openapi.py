"""OpenAPI document of the server. Request schemas come from the models in `protocol`; answer schemas are written
here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from specrs.server.anthropic.endpoints import STOP_REASONS
from specrs.server.messages import REASONING
from specrs.server.paths import is_anthropic
from specrs.server.routes import POSTS
from specrs.server.stored_responses import DEFAULT_PAGE, MAX_PAGE

_STRING, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_JSON = "application/json"


def _object(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_USAGE = _object(
    {
        "prompt_tokens": _INTEGER,
        "completion_tokens": _INTEGER,
        "total_tokens": _INTEGER,
        "prompt_tokens_details": _object({"cached_tokens": _INTEGER}),
        "completion_tokens_details": _object(
            {
                "reasoning_tokens": _INTEGER,
                "accepted_prediction_tokens": _INTEGER,
                "rejected_prediction_tokens": _INTEGER,
            },
            optional=("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"),
        ),
    },
    optional=("completion_tokens_details",),
)
_SPECULATION = _object(
    {
        "mean_acceptance_length": _NUMBER,
        "draft_acceptance_rate": _NUMBER,
        "acceptance_histogram": _array(_INTEGER),
        "num_spec_steps": _INTEGER,
        "num_accepted_draft_tokens": _INTEGER,
        "num_draft_tokens": _INTEGER,
        "num_spec_tokens": _INTEGER,
    }
)
_ENDING = {
    "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
    "stop_reason": _or_null({"anyOf": [_STRING, _INTEGER]}),
}
_COMPLETION_LOGPROBS = _object(
    {
        "text_offset": _array(_INTEGER),
        "token_logprobs": _array(_or_null(_NUMBER)),
        "tokens": _array(_STRING),
        "top_logprobs": _or_null(_array(_or_null({"type": "object", "additionalProperties": _NUMBER}))),
    }
)
_TOKEN_LOGPROB = {"token": _STRING, "logprob": _NUMBER, "bytes": _array(_INTEGER)}
_CHAT_LOGPROBS = _object(
    {"content": _array(_object({**_TOKEN_LOGPROB, "top_logprobs": _array(_object(_TOKEN_LOGPROB))}))}
)
_MESSAGE = _object(
    {
        "role": _STRING,
        "content": _or_null(_STRING),
        "refusal": _or_null(_STRING),
        **dict.fromkeys(REASONING, _or_null(_STRING)),
        "tool_calls": _array(
            _object(
                {
                    "id": _STRING,
                    "type": {"const": "function"},
                    "function": _object({"name": _STRING, "arguments": _STRING}),
                }
            )
        ),
    },
    optional=(*REASONING, "tool_calls"),
)
_HEAD = {"id": _STRING, "object": _STRING, "created": _INTEGER, "model": _STRING}
_TAIL = {"usage": _ref("Usage"), "metrics": _or_null(_object({"speculative_decoding": _SPECULATION}))}

_SCHEMAS: dict[str, dict[str, Any]] = {
    "Usage": _USAGE,
    "Error": _object(
        {"error": _object({"message": _STRING, "type": _STRING, "param": _or_null(_STRING), "code": _INTEGER})}
    ),
    "Completion": _object(
        {
            **_HEAD,
            "choices": _array(
                _object({"index": _INTEGER, "text": _STRING, "logprobs": _or_null(_COMPLETION_LOGPROBS), **_ENDING})
            ),
            **_TAIL,
        },
        optional=("metrics",),
    ),
    "ChatCompletion": _object(
        {
            **_HEAD,
            "choices": _array(
                _object(
                    {
                        "index": _INTEGER,
                        "message": _MESSAGE,
                        "logprobs": _or_null(_CHAT_LOGPROBS),
                        **_ENDING,
                    }
                )
            ),
            **_TAIL,
        },
        optional=("metrics",),
    ),
    "Response": _object(
        {
            **dict.fromkeys(("id", "object", "model"), _STRING),
            "created_at": _INTEGER,
            "status": {"enum": ["completed", "incomplete"]},
            "output": _array({"type": "object"}),
            "usage": {"type": "object"},
        }
    ),
    "Message": _object(
        {
            **dict.fromkeys(("id", "model"), _STRING),
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "content": _array({"type": "object"}),
            "stop_reason": {"enum": list(STOP_REASONS)},
            "stop_sequence": _or_null(_STRING),
            "usage": _object(
                dict.fromkeys(
                    (
                        "input_tokens",
                        "cache_creation_input_tokens",
                        "cache_read_input_tokens",
                        "output_tokens",
                    ),
                    _INTEGER,
                )
            ),
        }
    ),
    "MessagesError": _object(
        {
            "type": {"const": "error"},
            "error": _object({"type": _STRING, "message": _STRING}),
            "request_id": _or_null(_STRING),
        }
    ),
    "InputTokens": _object({"input_tokens": _INTEGER}),
    "Tokens": _object(
        {
            "count": _INTEGER,
            "max_model_len": _INTEGER,
            "tokens": _array(_INTEGER),
            "token_strs": _or_null(_array(_STRING)),
        }
    ),
    "Text": _object({"prompt": _STRING}),
    "Embeddings": _object(
        {
            **_HEAD,
            "data": _array(
                _object(
                    {
                        "object": {"const": "embedding"},
                        "index": _INTEGER,
                        "embedding": {"anyOf": [_array(_NUMBER), _STRING]},
                    }
                )
            ),
            "usage": _ref("Usage"),
        }
    ),
    "Ranking": _object(
        {
            "id": _STRING,
            "created": _INTEGER,
            "model": _STRING,
            "results": _array(
                _object(
                    {"index": _INTEGER, "relevance_score": _NUMBER, "document": _object({"text": _STRING})},
                    optional=("document",),
                )
            ),
            "usage": _ref("Usage"),
        }
    ),
    "Scores": _object(
        {
            **_HEAD,
            "data": _array(_object({"index": _INTEGER, "object": {"const": "score"}, "score": _NUMBER})),
            "usage": _ref("Usage"),
        }
    ),
    "Model": _object(
        {
            **dict.fromkeys(("id", "object", "owned_by", "root"), _STRING),
            "created": _INTEGER,
            "parent": _or_null(_STRING),
            "max_model_len": _or_null(_INTEGER),
            "state": {"enum": ["loaded", "loading", "unloaded"]},
        },
        optional=("state",),
    ),
    "Models": _object({"object": _STRING, "data": _array(_ref("Model"))}),
    "DeletedResponse": _object({"id": _STRING, "object": _STRING, "deleted": {"const": True}}),
    "InputItems": _object(
        {
            "object": {"const": "list"},
            "data": _array(_object({"id": _STRING, "type": _STRING})),
            "first_id": _or_null(_STRING),
            "last_id": _or_null(_STRING),
            "has_more": {"type": "boolean"},
        }
    ),
    "Load": _object({"server_load": _INTEGER}),
    "Loads": _object(
        {
            "timestamp": _NUMBER,
            "version": _STRING,
            "dp_rank_count": _INTEGER,
            "loads": _array({"type": "object"}),
            "aggregate": {"type": "object"},
        }
    ),
    "Information": {"type": "object"},
    "Version": _object({"version": _STRING}),
}


def openapi(version: str, model_names: Sequence[str]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the endpoints, without aliases and those of the profiler. `model_names` are
    the names that requests may use."""
    paths: dict[str, Any] = {
        "/health": {"get": _operation("Whether the engine runs.", {}, ("503",))},
        "/metrics": {"get": _operation("Prometheus metrics.", {"text/plain": {"schema": _STRING}}, ("401",))},
        "/version": {"get": _operation("The version.", {_JSON: {"schema": _ref("Version")}}, ("401",))},
        "/v1/models": {"get": _operation("The model's names.", {_JSON: {"schema": _ref("Models")}}, ("401",))},
        "/v1/models/{name}": {
            "get": _operation("One of the names.", {_JSON: {"schema": _ref("Model")}}, ("401", "404"))
            | {"parameters": [{"name": "name", "in": "path", "required": True, "schema": _STRING}]}
        },
        **_stored_responses(),
    }
    for path, answer, summary in (
        ("/load", "Load", "Requests that run or wait."),
        ("/v1/loads", "Loads", "What runs, waits and fills the KV pool."),
        ("/model_info", "Information", "Where the model is from."),
        ("/server_info", "Information", "What the server was started with."),
    ):
        paths[path] = {"get": _operation(summary, {_JSON: {"schema": _ref(answer)}}, ("401", "503"))}
    paths["/ping"] = dict.fromkeys(("get", "post"), paths["/health"]["get"])
    for row in POSTS:
        answered = _ref(row.answer) if isinstance(row.answer, str) else row.answer
        content: dict[str, Any] = {_JSON: {"schema": answered}}
        if row.streams:
            content["text/event-stream"] = {}
        error = "MessagesError" if is_anthropic(row.path) else "Error"
        operation = _operation(row.summary, content, ("400", "401", "404", "408", "413", "500", "503"), error)
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(row.body.__name__)}}}
        paths[row.path] = {"post": operation}
    models = [(row.body, "validation") for row in POSTS]
    names = {"anyOf": [{"enum": ["", *model_names]}, {"type": "null"}], "default": None}
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    for row in POSTS:
        schemas["$defs"][row.body.__name__]["properties"]["model"] = names
    return {
        "openapi": "3.1.0",
        "info": {"title": "specrs", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], **_SCHEMAS},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"header": []}],
    }


def _stored_responses() -> dict[str, Any]:
    """Return the paths of stored responses."""
    one = {"name": "id", "in": "path", "required": True, "schema": _STRING}
    limit = {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE}
    schemas = {"limit": limit, "order": {"enum": ["asc", "desc"], "default": "desc"}, "after": _STRING}
    page = [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in schemas.items()]
    errors = ("400", "401", "404")

    def operation(summary: str, answer: str, *parameters: dict[str, Any]) -> dict[str, Any]:
        return _operation(summary, {_JSON: {"schema": _ref(answer)}}, errors) | {"parameters": [one, *parameters]}

    return {
        "/v1/responses/{id}": {
            "get": operation("A stored response.", "Response"),
            "delete": operation("Delete a stored response.", "DeletedResponse"),
        },
        "/v1/responses/{id}/input_items": {
            "get": operation("The input of a stored response, without what came before.", "InputItems", *page)
        },
    }


def _operation(summary: str, content: dict[str, Any], errors: tuple[str, ...], error: str = "Error") -> dict[str, Any]:
    ok = {"description": summary} | ({"content": content} if content else {})
    failed = {"description": "An error.", "content": {_JSON: {"schema": _ref(error)}}}
    return {"summary": summary, "responses": {"200": ok, **dict.fromkeys(errors, failed)}}
