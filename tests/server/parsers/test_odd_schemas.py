"""Schemas of tools that a parser cannot read or write: errors name the tool, and every text follows the schema."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from specrs.errors import InvalidRequestError
from specrs.server.constraints import Constraint
from specrs.server.dispositions import WARNINGS
from specrs.server.parsers.alternatives import types_of
from specrs.server.parsers.base import Function
from specrs.server.parsers.table import TOOL_PARSERS
from specrs.structured import Grammar, compile_grammar
from specrs.tokenizer import Tokenizer
from structured.walks import EOS, VOCAB_SIZE, random_text

from .test_grammars import ANSWER, asked, read, schema_format

JSON_OBJECT = {"type": "json_object"}


def tool(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def with_a(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}


BAD_ID = {"$id": "http://[bad", "type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}
BAD: list[tuple[dict[str, Any], str]] = [
    (with_a({"type": 5}), "properties.a.type: "),
    (with_a({"type": {}}), "properties.a.type: "),
    (with_a({"type": None}), "properties.a.type: "),
    (with_a({"type": ["string", 5]}), "properties.a.type: "),
    (with_a({"anyOf": [{"type": "string"}, {"type": 5}]}), "properties.a.anyOf"),
    (with_a({"anyOf": 5}), "properties.a.anyOf: "),
    (with_a({"enum": 5}), "properties.a.enum: "),
    (with_a({"type": "string", "minLength": "x"}), "properties.a.minLength: "),
    (with_a({"type": "string", "minLength": 5, "maxLength": 2}), "properties.a"),
    (with_a({"type": "array", "contains": {"type": "string"}}), "properties.a.contains: "),
    (with_a({"$ref": "#/$defs/b"}) | {"$defs": {"b": {"type": "array", "contains": {}}}}, "properties.a.$ref: "),
    (with_a({"type": "string", "not": {"const": "x"}}), "properties.a.not: "),
    (with_a({"allOf": [{"type": "string"}, {"if": {"const": "x"}}]}), "properties.a.allOf"),
    (with_a({"oneOf": [{"type": "string", "maxLength": 5}, {"type": "string", "minLength": 3}]}), "properties.a.oneOf"),
    (with_a({"type": "string", "$ref": 5}), "properties.a.$ref: "),
    (with_a(5), "properties.a"),
    ({"type": "object", "properties": 5}, "properties: "),
    ({"type": "object", "properties": {}, "required": 5}, "required: "),
    ({"type": "object", "properties": {}, "required": [5]}, "required"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, ""),
    ({"type": "object", "required": ["a"], "additionalProperties": 5}, "additionalProperties: "),
    (BAD_ID, "$id: "),
]


@pytest.mark.parametrize("parser", ["hermes", "pythonic", "qwen3_coder"])
@pytest.mark.parametrize(("parameters", "place"), BAD, ids=str)
def test_a_bad_schema_is_an_error_that_shows_the_parameters_and_the_keyword(
    tokenizer: Tokenizer, parser: str, parameters: dict[str, Any], place: str
) -> None:
    _, constraint = asked(parser, response_format=schema_format(ANSWER), tools=[tool(parameters)])
    assert constraint.grammar is not None
    with pytest.raises(InvalidRequestError) as fault:
        compile_grammar(constraint.grammar, tokenizer, VOCAB_SIZE)
    start = re.escape("tools['f'].function.parameters={")
    end = re.escape(f"'type': 'object'}}: cannot be compiled: {place}")
    assert re.match(f"{start}.*{end}", str(fault.value)), fault.value


@pytest.mark.parametrize("parameters", [parameters for parameters, _ in BAD], ids=str)
@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_every_parser_reads_a_call_of_a_bad_schema(name: str, parameters: dict[str, Any]) -> None:
    written = {
        "deepseek_v3": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "x"}\n```<｜tool▁call▁end｜>',
        "deepseek_v31": '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x"}<｜tool▁call▁end｜>',
        "gemma4": '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>',
        "glm45": "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>",
        "hermes": '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>',
        "kimi_k2": '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "x"}<|tool_call_end|>',
        "minimax_m2": '<invoke name="f"><parameter name="a">x</parameter></invoke>',
        "openai": '<|channel|>commentary to=functions.f<|message|>{"a": "x"}<|call|>',
        "step3": '<steptml:invoke name="f"><steptml:parameter name="a">x</steptml:parameter></steptml:invoke>',
        "llama3_json": '{"name": "f", "parameters": {"a": "x"}}',
        "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": "x"}}]',
        "lfm2": '<|tool_call_start|>[f(a="x")]<|tool_call_end|>',
        "pythonic": '[f(a="x")]',
        "qwen3_coder": "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>",
    }
    parser = TOOL_PARSERS[name]([Function("f", parameters)])
    events = [*parser.feed(written[name]), *parser.finish()]
    assert json.loads("".join(getattr(event, "text", "") for event in events)) == {"a": "x"}


WORDS: list[tuple[Any, list[Any]]] = [
    ({"enum": ["celsius", None]}, ["celsius", None]),
    ({"enum": ["a", 1, 2.5, True, None, {"b": [1]}]}, ["a", 1, 2.5, True, None, {"b": [1]}]),
    ({"enum": ["1", 1]}, ["1"]),
    ({"type": ["string", "null"], "enum": ["a", "null"]}, ["a", "null"]),
    ({"type": ["string", "null"], "enum": ["a", None]}, ["a", None]),
    ({"type": ["string", "null"], "minLength": 7, "maxLength": 9}, [None, "sevenor"]),
    ({"anyOf": [{"enum": ["a"]}, {"type": "null"}]}, ["a", None]),
    ({"anyOf": [{"enum": ["a", 3]}, {"const": None}]}, ["a", 3, None]),
    ({"type": "string", "allOf": [{"minLength": 2}, {"maxLength": 3}]}, ["ab", "abc"]),
    ({"allOf": [{"type": "string"}, {"enum": ["a", "b", 1]}, {"enum": ["b", "c", 1]}]}, ["b"]),
    ({"maxLength": 3, "type": ["string", "null"], "anyOf": [{"minLength": 3}, {"const": None}]}, [None, "abc"]),
    ({"type": "string", "anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]}, ["", "a", "1"]),
    ({"type": "string", "minLength": 2, "$ref": "#/properties/a/$defs/b", "$defs": {"b": {"maxLength": 3}}}, ["abc"]),
    (
        {
            "minLength": 2,
            "anyOf": [{"$ref": "#/properties/a/$defs/b"}, {"maxLength": 2, "type": "string"}],
            "$defs": {"b": {"enum": ["a", "abc", None]}},
        },
        [None, "abc", "xy"],
    ),
    ({"anyOf": [True, False], "type": "string", "allOf": [True], "maxLength": 2}, ["", "ab"]),
    ({"enum": ["a", "abc"], "minLength": 2}, ["abc"]),
    ({"enum": ["a", "b"], "const": "b"}, ["b"]),
    ({"oneOf": [{"type": "string", "enum": ["a"]}, {"type": "null"}]}, [None, "a"]),
    ({"enum": ["x</parameter>y", "a"]}, ["a"]),
    ({"enum": ["x<parameter=y", "</function>", "a"]}, ["a"]),
]


@pytest.fixture(scope="module")
def compiled(tokenizer: Tokenizer) -> Callable[[Constraint], Grammar]:
    def compile_constraint(constraint: Constraint) -> Grammar:
        assert constraint.grammar is not None
        return compile_grammar(constraint.grammar, tokenizer, VOCAB_SIZE)

    return compile_constraint


@pytest.mark.parametrize(("schema", "values"), WORDS, ids=str)
def test_words_of_mixed_types_are_written_and_read_as_the_schema_has_them(
    tokenizer: Tokenizer, compiled: Callable[[Constraint], Grammar], schema: Any, values: list[Any]
) -> None:
    parameters = with_a(schema)
    tools, constraint = asked("qwen3_coder", response_format=JSON_OBJECT, tools=[tool(parameters)])
    grammar = compiled(constraint)
    begin = "<tool_call><function=f><parameter=a>\n"
    end = "\n</parameter></function></tool_call>"

    def called(text: str) -> Any:
        content, ((name, arguments),) = read(tools, constraint, [text])
        assert (content, name) == ("", "f")
        jsonschema.validate(json.loads(arguments), parameters)
        return json.loads(arguments)["a"]

    for value in values:
        text = begin + (value if isinstance(value, str) else json.dumps(value)) + end
        tokens = [*tokenizer.encode(text, add_special_tokens=False), EOS]
        assert all(map(grammar.matcher([EOS]).accept, tokens)), value
        found = called(text)
        assert (type(found), found) == (type(value), value)
    start = tokenizer.encode(begin, add_special_tokens=False)
    for seed in range(6):
        matcher = grammar.matcher([EOS])
        assert all(map(matcher.accept, start))
        rest = random_text(matcher, tokenizer, seed)
        text = tokenizer.decode(start + rest, skip_special_tokens=False).split("</tool_call>")[0]
        called(text)


def test_bounds_that_raw_text_is_not_held_to_are_reported() -> None:
    WARNINGS.set([])
    parameters = with_a({"type": "string", "maxLength": 2000, "allOf": [{"pattern": "x"}]})
    asked("qwen3_coder", response_format=JSON_OBJECT, tools=[tool(parameters)])
    wanted = "tools['f'].function.parameters: the grammar does not enforce maxLength, pattern"
    assert wanted in WARNINGS.get()


def test_a_schema_of_many_alternatives_is_taken_apart_in_bounded_time() -> None:
    pair = {"anyOf": [{"minLength": 1}, {"maxLength": 9}]}
    many = {"type": "string", "allOf": [pair] * 40}
    begin = time.perf_counter()
    assert types_of(many, many) <= {"string"}
    tree = {"anyOf": [{"allOf": [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}] * 20}]}] * 20}
    assert types_of(tree, tree) == set()
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize("schema", [{"enum": []}, {"enum": ["</parameter>"]}, False], ids=str)
def test_a_parameter_without_a_text_is_left_out(compiled: Callable[[Constraint], Grammar], schema: Any) -> None:
    parameters = with_a(schema)
    _, constraint = asked("qwen3_coder", response_format=JSON_OBJECT, tools=[tool(parameters)])
    assert constraint.openings == ()
    _, constraint = asked("qwen3_coder", response_format=JSON_OBJECT, tools=[tool(parameters | {"required": []})])
    assert constraint.openings
    compiled(constraint)


MORE: list[tuple[Any, Any]] = [
    ({}, "x"),
    ({"additionalProperties": True}, "x"),
    ({"additionalProperties": {"type": "integer"}}, 7),
    ({"additionalProperties": {"$ref": "#/$defs/b"}, "$defs": {"b": {"enum": ["b"]}}}, "b"),
    ({"additionalProperties": {"$ref": "#/$defs/b"}, "$defs": {"b": {"type": "boolean"}}}, True),
]


@pytest.mark.parametrize("parser", ["hermes", "pythonic", "qwen3_coder"])
@pytest.mark.parametrize(("more", "value"), MORE, ids=str)
def test_a_required_name_that_is_no_property_is_written(
    tokenizer: Tokenizer, compiled: Callable[[Constraint], Grammar], parser: str, more: dict[str, Any], value: Any
) -> None:
    parameters = {"type": "object", "properties": {"c": {"const": 1}}, "required": ["a", "c"], **more}
    tools, constraint = asked(parser, response_format=JSON_OBJECT, tools=[tool(parameters)])
    raw = value if isinstance(value, str) else json.dumps(value)
    begin, rest = {
        "hermes": ('<tool_call>{"name": "f", "arguments": {"c": 1', f', "a": {json.dumps(value)}}}}}</tool_call>'),
        "pythonic": ("[f(c=1", f", a={json.dumps(value)})]"),
        "qwen3_coder": (
            "<tool_call><function=f><parameter=c>1</parameter>",
            f"<parameter=a>\n{raw}\n</parameter></function></tool_call>",
        ),
    }[parser]
    grammar = compiled(constraint)
    assert all(map(grammar.matcher([EOS]).accept, [*tokenizer.encode(begin + rest, add_special_tokens=False), EOS]))
    content, ((name, arguments),) = read(tools, constraint, [begin + rest])
    assert (content, name, json.loads(arguments)) == ("", "f", {"a": value, "c": 1})
    for seed in range(6 if "$defs" in more else 0):  # the others allow endless texts
        matcher = grammar.matcher([EOS])
        start = tokenizer.encode(begin, add_special_tokens=False)
        assert all(map(matcher.accept, start))
        text = tokenizer.decode(start + random_text(matcher, tokenizer, seed), skip_special_tokens=False)
        _, calls = read(tools, constraint, [text])
        jsonschema.validate(json.loads(calls[0][1]), parameters)


def test_a_required_name_without_a_schema_of_its_own_is_not_written(compiled: Callable[[Constraint], Grammar]) -> None:
    by_pattern = {"type": "object", "required": ["a"], "patternProperties": {"^a": {"type": "integer"}}}
    for parser in ("pythonic", "qwen3_coder"):
        WARNINGS.set([])
        _, constraint = asked(parser, response_format=JSON_OBJECT, tools=[tool(by_pattern)])
        assert constraint.openings == ()
        assert f"calls of f cannot be written for the parser {parser}" in "".join(WARNINGS.get())
