"""Chooses the grammar that the text of an answer must follow. It comes from a response format, from structured outputs,
from demanded tool calls, or from a format that leaves the model the choice of calling tools.

Compiles nothing and reads no text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from specrs.errors import InvalidRequestError, invalid_request
from specrs.server.dispositions import warn
from specrs.server.parsers.grammars import CALL_GRAMMARS, CallRules, required_calls
from specrs.server.protocol import SamplingBody
from specrs.server.tools import FieldNames, ToolUse
from specrs.structured.composed import ComposedGrammar, SchemaPart
from specrs.structured.params import StructuredOutputsParams
from specrs.structured.schemas import drop_ignored
from specrs.tokenizer import Tokenizer

WHITE_SPACE = " ?"
"""Grammar of the white space between the parts of a required call: one blank or none."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint on the text of an answer: tool calls, a response format, or both."""

    grammar: StructuredOutputsParams | None = None
    """Grammar that the text must follow; None: any text."""
    openings: tuple[tuple[str, ...], ...] | None = None
    """Strings that tool calls begin with, if the text is either calls or the format's JSON. Empty: the text can have no
    call. None: calls may be anywhere in the text."""


@dataclass(frozen=True, slots=True)
class _Format:
    """JSON schema that all of a message's content must follow. `options` says which white space is allowed, as fields
    of `StructuredOutputsParams`."""

    part: SchemaPart
    options: dict[str, Any]
    alone: StructuredOutputsParams


def content_constraint(body: SamplingBody, names: FieldNames) -> Constraint:
    """Return the constraint of a body without tools. `names` are the field names for errors. Raises
    `InvalidRequestError` for fields that contradict each other."""
    wanted = _wanted(body, names)
    return _told(Constraint(wanted.alone if isinstance(wanted, _Format) else wanted))


def chat_constraint(body: SamplingBody, tools: ToolUse, names: FieldNames, tokenizer: Tokenizer | None) -> Constraint:
    """Return the constraint of a chat.

    A demanded call has its own grammar, and the response format does not apply. If the model may choose to call tools,
    the text is either calls or JSON of the response format. `regex`, `choice` and `grammar` of structured_outputs apply
    to the whole text, calls included.

    Raises `InvalidRequestError` for fields that contradict each other.
    """
    wanted = _wanted(body, names)
    if wanted is not None and tools.choice in ("named", "required"):
        field = names.response_format if body.structured_outputs is None else "structured_outputs"
        warn(f"{field}: has no effect; tool_choice demands a call")
    try:
        if tools.choice == "named":
            (function,) = tools.functions
            part = _part(function.place, function.parameters)
            return _told(Constraint(_alone(part, {"whitespace_pattern": WHITE_SPACE})))
        if tools.choice == "required":
            rules = CallRules(tools.functions, tools.parallel, lambda _: None)
            required_calls(rules)
            return _told(Constraint(_composed("start: calls", rules, {"whitespace_pattern": WHITE_SPACE})))
        if tools.choice == "auto" and isinstance(wanted, _Format):
            return _told(_calls_or_format(wanted, tools, tokenizer))
    except RecursionError:
        raise InvalidRequestError("tools: a schema nests too deep; use a flatter one") from None
    return _told(Constraint(wanted.alone if isinstance(wanted, _Format) else wanted))


def _told(constraint: Constraint) -> Constraint:
    """Return `constraint` unchanged. Warns the client of each schema keyword that the grammar does not enforce."""
    grammar, fields = constraint.grammar, dict[str, dict[str, None]]()
    parts: tuple[SchemaPart, ...] = ()
    if isinstance(grammar, ComposedGrammar):
        parts = grammar.parts
    elif grammar is not None and grammar.json is not None:
        parts = (SchemaPart("structured_outputs.json", str(grammar.json)),)
    for part in parts:
        try:
            ignored = drop_ignored(json.loads(part.schema))
        except (ValueError, RecursionError):
            continue  # the compiler rejects it
        fields.setdefault(part.field, {}).update(dict.fromkeys(ignored))
    for field, keywords in fields.items():
        if keywords:
            warn(f"{field}: the grammar does not enforce {', '.join(keywords)}", log=False)  # the compiler logs it
    return constraint


def _calls_or_format(wanted: _Format, tools: ToolUse, tokenizer: Tokenizer | None) -> Constraint:
    name = str(tools.settings.tool_parser)
    special = {} if tokenizer is None else _special_tokens(tokenizer)
    rules = CallRules(tools.functions, tools.parallel, special.get, [wanted.part])
    CALL_GRAMMARS[name](rules)
    if rules.left_out:
        warn(
            f"tools: calls of {', '.join(rules.left_out)} cannot be written for the parser {name}, so next to a "
            "response format they are not allowed"
        )
    for place, keywords in rules.not_enforced.items():
        warn(f"{place}: the grammar does not enforce {', '.join(sorted(keywords))}")
    if not rules.openings and not rules.malformed:
        return Constraint(wanted.alone, ())
    start = "start: calls | schema_0" if rules.openings else "start: schema_0"
    return Constraint(_composed(start, rules, wanted.options), tuple(rules.openings))


def _wanted(body: SamplingBody, names: FieldNames) -> _Format | StructuredOutputsParams | None:
    """Return what `body` demands of the content: a JSON schema, another grammar, or None for any text."""
    outputs, wanted = body.structured_outputs, body.response_format
    if wanted is not None and wanted.type != "json_schema" and wanted.json_schema is not None:
        sent = wanted.json_schema.model_dump(by_alias=True, exclude_unset=True)
        raise invalid_request(
            names.json_schema,
            sent.get("schema") if names.json_schema == names.schema else sent,
            f"needs type=json_schema, not {wanted.type}; set the type",
        )
    given = None if outputs is None else StructuredOutputsParams.from_mapping(outputs)
    if wanted is None or wanted.type == "text":
        return given if given is None else _of_outputs(given)
    if given is not None:
        raise invalid_request(
            names.response_format, wanted.type, "is there next to structured_outputs; leave one of them out"
        )
    if wanted.type == "json_object":
        part = _part(names.response_format, {"type": "object"})
    elif wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidRequestError(f"{names.schema}: is missing; type=json_schema needs it")
    else:
        part = _part(names.schema, wanted.json_schema.schema_)
    return _Format(part, {}, _alone(part, {}))


def _of_outputs(given: StructuredOutputsParams) -> _Format | StructuredOutputsParams:
    if given.kind not in ("json", "json_object"):
        return given
    schema = '{"type": "object"}' if given.json is None else str(given.json)
    options = {
        "disable_any_whitespace": given.disable_any_whitespace,
        "whitespace_pattern": given.whitespace_pattern,
    }
    part = SchemaPart(f"structured_outputs.{given.kind}", schema, given.disable_additional_properties)
    return _Format(part, options, given)


def _part(field: str, schema: dict[str, Any]) -> SchemaPart:
    try:
        return SchemaPart(field, json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as fault:
        raise invalid_request(field, schema, f"must be a JSON schema, but is no JSON: {fault}") from None


def _alone(part: SchemaPart, options: dict[str, Any]) -> ComposedGrammar:
    return ComposedGrammar(lark="start: schema_0", parts=(part,), **options)


def _composed(start: str, rules: CallRules, options: dict[str, Any]) -> ComposedGrammar:
    parts = tuple(part if isinstance(part, SchemaPart) else _part(*part) for part in rules.schemas)
    return ComposedGrammar(
        lark="\n".join([start, *rules.lines]),
        parts=parts,
        sources=tuple(_part(function.place, function.parameters) for function in rules.sources),
        checked=tuple(sorted(rules.malformed)),
        **options,
    )


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of special tokens by their text."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special}
