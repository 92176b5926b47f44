"""JSON schema keywords: which ones grammars ignore, which ones they reject, and where a rejected one is."""

import json
import logging
import re
from typing import Any

import jsonschema
import pytest
from specrs.errors import InvalidRequestError
from specrs.structured import StructuredOutputsParams, compile_grammar
from specrs.structured.schemas import FORMATS, drop_ignored, subschemas
from specrs.tokenizer import Tokenizer

from .schemas import make_schema
from .walks import EOS, VOCAB_SIZE, random_text

UNIQUE = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3, "uniqueItems": True}
NAMES = {
    "type": "object",
    "propertyNames": {"pattern": "^[a-z]$"},
    "properties": {"Aa": {"const": 1}},
    "additionalProperties": False,
}
URI = {"type": "string", "format": "uri-reference", "maxLength": 3}
# one of each keyword that could be ignored by mistake
REFUSED: list[dict[str, Any]] = [
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"maxLength": 3}},
    {"type": "array", "contains": {"const": 1}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "unevaluatedProperties": False},
    {"oneOf": [{"type": "string", "minLength": 1}, {"type": "string", "maxLength": 3}]},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"type": "array", "uniqueItems": "yes"},
    {"type": "string", "format": 3},
]


def params(schema: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True)


@pytest.mark.parametrize(
    ("schema", "words"), [(UNIQUE, "uniqueItems"), (NAMES, "propertyNames"), (URI, "format=uri-reference")]
)
def test_an_ignored_keyword_is_the_only_one_that_a_text_may_violate(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, schema: dict[str, Any], words: str
) -> None:
    nested = {"type": "object", "properties": {"format": schema}, "required": ["format"], "additionalProperties": False}
    with caplog.at_level(logging.WARNING):
        grammar = compile_grammar(params(nested), tokenizer, VOCAB_SIZE)
    assert f"structured_outputs.json: the grammar does not enforce {words}" in caplog.text
    kept = {**schema, "uniqueItems": False, "propertyNames": True, "format": "x"}
    for seed in range(10):
        text = tokenizer.decode(random_text(grammar.matcher([EOS]), tokenizer, seed))
        jsonschema.validate(json.loads(text)["format"], kept)


@pytest.mark.parametrize("where", ["items", "properties", "anyOf", "$defs"])
@pytest.mark.parametrize("schema", REFUSED, ids=lambda schema: "-".join(schema))
def test_every_other_keyword_is_rejected_with_its_place(
    tokenizer: Tokenizer, schema: dict[str, Any], where: str
) -> None:
    outer, place = {
        "items": ({"type": "array", "items": schema}, "items"),
        "properties": ({"type": "object", "properties": {"not": schema, "b": {}}}, "properties.not"),
        "anyOf": ({"anyOf": [{"const": 1}, schema]}, "anyOf.1"),
        "$defs": ({"$ref": "#/$defs/a", "$defs": {"a": schema}}, "$defs.a"),
    }[where]
    if where != "$defs" and "minimum" in schema:
        return  # a text without such a value is left
    with pytest.raises(InvalidRequestError) as caught:
        compile_grammar(params(outer), tokenizer, VOCAB_SIZE)
    message = str(caught.value)
    assert message.startswith("structured_outputs.json=")
    assert any(key in message.partition("cannot be compiled: ")[2] for key in schema if key not in ("type",)), message
    if where == "properties":
        assert re.search(rf"cannot be compiled: {re.escape(place)}[.:]", message)


@pytest.mark.parametrize(
    "schema", [{"uniqueItems": False}, {"propertyNames": True}, {"format": "int32", "type": "integer"}]
)
def test_keywords_without_effect_are_taken_silently(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, schema: dict[str, Any]
) -> None:
    compile_grammar(params({"title": str(schema), "items": schema}), tokenizer, VOCAB_SIZE)
    assert not caplog.records


def test_the_formats_are_those_that_the_library_enforces(tokenizer: Tokenizer) -> None:
    for name in FORMATS:
        assert drop_ignored({"type": "string", "format": name}) == []
        compile_grammar(params({"type": "string", "format": name}), tokenizer, VOCAB_SIZE)


def test_data_and_names_are_no_keywords() -> None:
    data = {"uniqueItems": True, "format": "x", "propertyNames": {"const": 1}}
    schema = {"const": dict(data), "enum": [dict(data)], "properties": {name: {"items": {}} for name in data}}
    before = json.dumps(schema)
    assert drop_ignored(schema) == []
    assert json.dumps(schema) == before
    assert drop_ignored({"properties": schema["properties"], "anyOf": [dict(data)]}) == [
        "uniqueItems",
        "propertyNames",
        "format=x",
    ]


def test_generated_schemas_lose_nothing() -> None:
    for seed in range(100):
        schema = make_schema(seed)
        assert drop_ignored(schema) == []
        assert schema == make_schema(seed)
        assert next(subschemas(schema)) is schema
