"""Call grammars: every text that they allow is parsed as calls that follow their schemas, or as the format's JSON."""

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from specrs.pair import TARGET
from specrs.server.constraints import Constraint, chat_constraint
from specrs.server.dispositions import WARNINGS
from specrs.server.messages import MessageReader
from specrs.server.parsers.grammars import CALL_GRAMMARS
from specrs.server.parsers.table import TOOL_PARSERS
from specrs.server.protocol import ChatCompletionRequest
from specrs.server.tools import CHAT_FIELDS, ToolSettings, ToolUse, read_tools
from specrs.structured import Grammar, compile_grammar
from specrs.tokenizer import Tokenizer
from structured.walks import EOS, VOCAB_SIZE, random_text
from tokenizers import AddedToken

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo", "Nuuk"]},
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"$ref": "#days"},
        "spots": {"type": "array", "items": {"$ref": "#/$defs/spot"}, "minItems": 1, "maxItems": 2},
        "note": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 5}, {"type": "null"}]},
        "daily": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {
        "unit": {"const": "C"},
        "days": {"$anchor": "days", "type": "integer", "minimum": 1, "maximum": 9},
        "spot": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": ["boolean", "null"]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "weather": WEATHER,
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "find": {
        "type": "object",
        "properties": {"type": {"type": "integer", "minimum": 0, "maximum": 5}},
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": FUNCTIONS[name]}} for name in FUNCTIONS]
ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"enum": ["weather(", "<tool_call>", "[TOOL_CALLS]", 7]}, "maxItems": 2}


def asked(parser: str, tokenizer: Tokenizer | None = None, **fields: Any) -> tuple[ToolUse, Constraint]:
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user"}], "tools": TOOLS, **fields})
    tools = read_tools(body, ToolSettings(auto_choice=True, tool_parser=parser))
    return tools, chat_constraint(body, tools, CHAT_FIELDS, tokenizer)


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def read(tools: ToolUse, constraint: Constraint, pieces: list[str]) -> tuple[str, list[list[str]]]:
    """Return content and calls of a text that comes in pieces."""
    make = tools.reader("", constrained=True, openings=constraint.openings)
    assert make is not None
    reader: MessageReader = make()
    content, calls = "", []
    for i, piece in enumerate(pieces):
        reader.feed(piece, final=i == len(pieces) - 1)
        delta = reader.take()
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[-1][1] += call["function"]["arguments"]
    return content, calls


def cut(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randint(0, 8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.fixture(scope="module")
def compiled(tokenizer: Tokenizer) -> Callable[[Constraint], Grammar]:
    def compile_constraint(constraint: Constraint) -> Grammar:
        assert constraint.grammar is not None
        return compile_grammar(constraint.grammar, tokenizer, VOCAB_SIZE)

    return compile_constraint


BEGINNINGS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "gemma4": "<|tool_call>",
    "glm45": "<tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "minimax_m2": "<minimax:tool_call>",
    "openai": "<|channel|>",
    "step3": "<｜tool_calls_begin｜>",
    "hermes": "<tool_call>",
    "llama3_json": '{"name": "weather", "parameters"',
    "mistral": "[TOOL_CALLS]",
    "lfm2": "<|tool_call_start|>",
    "pythonic": "[weather(",
    "qwen3_coder": "<tool_call>",
}


@pytest.mark.parametrize("schema", [ANSWER, LIST], ids=["object", "array"])
@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_every_text_is_calls_or_the_format(
    tokenizer: Tokenizer, compiled: Callable[[Constraint], Grammar], parser: str, schema: dict[str, Any]
) -> None:
    seen = set()
    for parallel in (True, False):
        tools, constraint = asked(parser, response_format=schema_format(schema), parallel_tool_calls=parallel)
        grammar = compiled(constraint)
        for seed in range(16):
            matcher, start = grammar.matcher([EOS]), []
            if seed % 2:
                start = tokenizer.encode(BEGINNINGS[parser], add_special_tokens=False)
                assert all(map(matcher.accept, start))
            rest = random_text(matcher, tokenizer, seed, limit=4000)
            text = tokenizer.decode(start + rest, skip_special_tokens=False)
            content, calls = whole = read(tools, constraint, [text])
            assert read(tools, constraint, cut(text, seed)) == whole, text
            assert bool(content) != bool(calls), text
            if content:
                assert content == text
                jsonschema.validate(json.loads(content), schema)
            for name, arguments in calls:
                jsonschema.validate(json.loads(arguments), FUNCTIONS[name])
            seen |= {name for name, _ in calls} or {"content"}
            assert parallel or len(calls) <= 1, text
    assert seen >= {"content", "weather"}


CALLS = [["weather", {"city": "Rome", "days": 2}], ["now", {}]]
WRITTEN = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Rome", "days": 2}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome", "days": 2}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gemma4": '<|tool_call>call:weather{"city": "Rome", "days": 2}<tool_call|><|tool_call>call:now{}<tool_call|>',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>'
    "{}<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "openai": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome", "days": 2}'
    "<|end|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
    "step3": '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">\n'
    '<steptml:parameter name="city">Rome</steptml:parameter>\n<steptml:parameter name="days">2</steptml:parameter>\n'
    '</steptml:invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">'
    "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome", "days": 2}}, '
    '{"name": "now", "arguments": {}}]',
    "lfm2": '<|tool_call_start|>[weather(city="Rome", days=2), now()]<|tool_call_end|>',
    "pythonic": '[weather(city="Rome", days=2), now()]',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
}
NAMED = '[TOOL_CALLS]weather{"city": "Rome", "days": 2}[TOOL_CALLS]now{}'
FORMATS: list[dict[str, Any]] = [
    {"response_format": schema_format(ANSWER)},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"json": ANSWER}},
    {"structured_outputs": {"json": ANSWER, "disable_any_whitespace": False, "whitespace_pattern": "[ \n]?"}},
    {"structured_outputs": {"json_object": True}},
]


@pytest.mark.parametrize("fields", FORMATS, ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize(("parser", "text"), [*WRITTEN.items(), ("mistral", NAMED)])
def test_calls_as_models_write_them_are_allowed_next_to_any_format(
    tokenizer: Tokenizer, compiled: Callable[[Constraint], Grammar], parser: str, text: str, fields: dict[str, Any]
) -> None:
    tools, constraint = asked(parser, **fields)
    grammar = compiled(constraint)

    def takes(text: str) -> bool:
        matcher = grammar.matcher([EOS])
        return all(map(matcher.accept, [*tokenizer.encode(text, add_special_tokens=False), EOS]))

    assert takes(text)
    content, calls = read(tools, constraint, [text])
    assert (content, [[name, json.loads(arguments)] for name, arguments in calls]) == ("", CALLS)
    answer = '{"name": "Al", "age": 3}'
    assert takes(answer)
    assert read(tools, constraint, [answer]) == (answer, [])
    assert not takes(text.replace("Rome", "Bonn"))  # not of the schema
    assert not takes(text.replace("weather", "waether"))
    assert not takes(f"I look. {text}")
    assert not takes(answer + text)


@pytest.mark.parametrize(("parser", "text"), WRITTEN.items())
def test_without_parallel_calls_a_second_one_is_not_allowed(
    tokenizer: Tokenizer, compiled: Callable[[Constraint], Grammar], parser: str, text: str
) -> None:
    tokens = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    for parallel in (True, False):
        _, constraint = asked(parser, response_format=schema_format(ANSWER), parallel_tool_calls=parallel)
        assert all(map(compiled(constraint).matcher([EOS]).accept, tokens)) == parallel


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_content_streams_as_it_is_written(parser: str) -> None:
    tools, constraint = asked(parser, response_format=schema_format(ANSWER))
    make = tools.reader("", constrained=True, openings=constraint.openings)
    assert make is not None
    reader = make()
    reader.feed('{"who": ', final=False)
    assert reader.take() == {"content": '{"who": '}


def test_options_of_structured_outputs_hold_next_to_tools(
    tokenizer: Tokenizer, compiled: Callable[[Constraint], Grammar]
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    def takes(text: str, **options: Any) -> bool:
        _, constraint = asked("hermes", structured_outputs={"json": schema, **options})
        matcher = compiled(constraint).matcher([EOS])
        return all(map(matcher.accept, [*tokenizer.encode(text, add_special_tokens=False), EOS]))

    assert takes('{"a": 1, "b": 2}')
    assert not takes('{"a": 1, "b": 2}', disable_additional_properties=True)
    assert takes('{"a": 1}', disable_additional_properties=True)
    assert takes('{"a":\n\n\n1}', whitespace_pattern="\n{3}")
    assert not takes('{"a": 1}', whitespace_pattern="\n{3}")
    assert not takes('{"a": 1}', disable_any_whitespace=True)
    compact = '<tool_call>{"name":"now","arguments":{}}</tool_call>'
    assert takes(compact, disable_any_whitespace=True)
    assert not takes(compact.replace(":", ": "), disable_any_whitespace=True)


def test_marks_of_calls_inside_the_content_begin_no_call() -> None:
    for parser in TOOL_PARSERS:
        tools, constraint = asked(parser, response_format={"type": "json_object"})
        for word in (*WRITTEN.values(), "<|python_tag|>", "weather("):
            text = json.dumps({"text": word, "name": "weather"})
            assert read(tools, constraint, [*text]) == (text, [])


@pytest.mark.parametrize("parser", [name for name in TOOL_PARSERS if name not in ("pythonic", "qwen3_coder")])
def test_a_mark_that_is_a_special_token_is_written_as_one(parser: str) -> None:
    marks = BEGINNINGS | {"llama3_json": "<|python_tag|>"}
    own = Tokenizer(str(TARGET))
    own.backend.add_special_tokens([AddedToken(marks[parser], special=True, normalized=False)])
    (mark,) = own.encode(marks[parser], add_special_tokens=False)
    tools, constraint = asked(parser, own, response_format=schema_format(ANSWER))
    assert constraint.grammar is not None
    matcher = compile_grammar(constraint.grammar, own, mark + 1).matcher([EOS])
    text = WRITTEN[parser].removeprefix(marks[parser])
    tokens = [mark, *own.encode(text, add_special_tokens=False), EOS]
    assert all(map(matcher.accept, tokens))
    _, calls = read(tools, constraint, [own.decode(tokens[:-1], skip_special_tokens=False)])
    assert [name for name, _ in calls] == ["weather", "now"]


@pytest.mark.parametrize(
    ("parser", "name", "property_name"),
    [
        *(
            ("pythonic", "get-time", "a"),
            ("lfm2", "get-time", "a"),
            ("pythonic", "f", "a-b"),
            ("pythonic", "f", "class"),
            ("qwen3_coder", "f", "a>b"),
        ),
        *(("glm45", "f", "a<b"), ("minimax_m2", "f", 'a">b'), ("kimi_k2", "a b", "a"), ("openai", "a<b", "a")),
    ],
)
def test_a_function_that_the_format_cannot_write_is_left_out_with_a_warning(
    parser: str, name: str, property_name: str
) -> None:
    WARNINGS.set([])
    parameters = {"type": "object", "properties": {property_name: {"type": "string"}}, "required": [property_name]}
    odd = {"type": "function", "function": {"name": name, "parameters": parameters}}
    _, constraint = asked(parser, response_format={"type": "json_object"}, tools=[odd])
    assert constraint.openings == ()
    told = f"calls of {name} cannot be written for the parser {parser}"
    assert told in "".join(WARNINGS.get())
    _, constraint = asked(parser, response_format={"type": "json_object"}, tools=[odd, *TOOLS])
    assert constraint.openings


def test_every_parser_has_a_grammar() -> None:
    assert CALL_GRAMMARS.keys() == TOOL_PARSERS.keys()
