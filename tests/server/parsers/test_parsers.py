"""Parsers of tool calls: calls written here in each format are read back, however the text is cut into pieces."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from specrs.server.parsers.base import Arguments, CallStart, Content, Event, Function, ToolParser
from specrs.server.parsers.forced import NamedParser, RequiredParser
from specrs.server.parsers.table import TOOL_PARSERS, new_call_id


@dataclass
class Read:
    """What events add up to."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name, arguments


def read(parser: ToolParser, pieces: Sequence[str]) -> Read:
    found = Read()
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    for event in events:
        if isinstance(event, Content):
            assert event.text
            found.content += event.text
        elif isinstance(event, CallStart):
            found.calls.append([event.name, ""])
        else:
            assert isinstance(event, Arguments)
            assert event.text
            found.calls[-1][1] += event.text
    return found


def cut(text: str, places: Sequence[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(bounds)]


words = st.text("abcé _\"'\\{}[](),;:<>/=日", max_size=8)
names = st.text("abc_", min_size=1, max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
calls = st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3)
cuts = st.lists(st.integers(0, 10_000), max_size=12)
Calls = list[tuple[str, dict[str, Any]]]


def as_hermes(made: Calls) -> str:
    bodies = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in made]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def as_llama(made: Calls) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}, indent=1) for name, arguments in made)


def as_mistral_list(made: Calls) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"arguments": arguments, "name": name} for name, arguments in made])


def as_mistral_names(made: Calls) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}{'[CALL_ID]abcdefghi[ARGS]' if i else ''}{json.dumps(arguments, ensure_ascii=False)}"
        for i, (name, arguments) in enumerate(made)
    )


def as_pythonic(made: Calls) -> str:
    return f"[{', '.join(f'{name}({pairs(arguments)})' for name, arguments in made)}]"


def pairs(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


FORMATS: dict[str, tuple[str, Callable[[Calls], str]]] = {
    "hermes": ("hermes", as_hermes),
    "llama3_json": ("llama3_json", as_llama),
    "llama3_json with a tag": ("llama3_json", lambda made: "<|python_tag|>" + as_llama(made)),
    "mistral, a list": ("mistral", as_mistral_list),
    "mistral, names": ("mistral", as_mistral_names),
    "pythonic": ("pythonic", as_pythonic),
    "pythonic with tags": ("pythonic", lambda made: f"<|python_start|>{as_pythonic(made)}<|python_end|>"),
}
BEHIND_TEXT = ("hermes", "llama3_json with a tag", "mistral, a list", "mistral, names")


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), made=calls, places=cuts)
def test_calls_are_read_back_from_any_pieces(form: str, data: st.DataObject, made: Calls, places: list[int]) -> None:
    name, write = FORMATS[form]
    before = data.draw(st.sampled_from(["", "Let me see.\n\n"] if form in BEHIND_TEXT else ["", "\n "]))
    found = read(TOOL_PARSERS[name](), cut(before + write(made), places))
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == made
    assert found.content == before.strip()


@settings(max_examples=100, deadline=None)
@given(
    made=st.lists(st.tuples(names, st.dictionaries(names, st.text("ab<>/\n {}1", max_size=6), max_size=3)), min_size=1),
    places=cuts,
    tags=st.booleans(),
    ends=st.booleans(),
)
def test_qwen3_coder_is_read_back(
    made: list[tuple[str, dict[str, str]]], places: list[int], tags: bool, ends: bool
) -> None:
    end = "</parameter>\n" if ends else ""
    text = "Well. "
    for name, arguments in made:
        body = "".join(f"<parameter={key}>\n{value}\n{end}" for key, value in arguments.items())
        text += f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>\n"
    if not tags:
        text = text.replace("<tool_call>\n", "").replace("\n</tool_call>", "")
    found = read(TOOL_PARSERS["qwen3_coder"](), cut(text, places))
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == made
    assert found.content == "Well."


KEYS = ("text", "count", "on", "list", "either", "broken", "unknown")


def test_qwen3_coder_takes_types_from_the_schema() -> None:
    kinds: dict[str, Any] = {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "on": {"type": "boolean"},
        "list": {"type": "array"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "broken": {"type": "object"},
    }
    function = Function("f", {"type": "object", "properties": kinds})
    given_values = dict(zip(KEYS, ("12", "12", "True", '[1, "é"]', "null", "{no", "3"), strict=True))
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given_values.items())
    found = read(TOOL_PARSERS["qwen3_coder"]([function]), [f"<tool_call>\n<function=f>\n{body}</function></tool_call>"])
    wanted = dict(zip(KEYS, ("12", 12, True, [1, "é"], None, "{no", "3"), strict=True))
    assert json.loads(found.calls[0][1]) == wanted


TAGS = ["</parameter>", "<parameter=", "</function>", "</tool_call>", "<tool_call>"]
ITEMS = Function("f", {"properties": {"a": {"type": ["array", "integer"]}, "b": {"type": "object"}}})


def read_items(text: str, places: Sequence[int] = ()) -> Any:
    """The arguments of a call of `ITEMS` whose body is `text`; the same from all pieces."""
    text = f"<tool_call>\n<function=f>\n{text}"
    found = read(TOOL_PARSERS["qwen3_coder"]([ITEMS]), [text])
    assert read(TOOL_PARSERS["qwen3_coder"]([ITEMS]), [*text]) == found
    assert read(TOOL_PARSERS["qwen3_coder"]([ITEMS]), cut(text, places)) == found
    return json.loads(found.calls[0][1])


@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.lists(st.sampled_from([*TAGS, '"', "\\", "\n", "x"]), max_size=5).map("".join)), places=cuts)
def test_qwen3_coder_reads_tags_inside_strings_of_json(words: list[str], places: list[int]) -> None:
    values = {"a": words, "b": {word: [word] for word in words}}
    for between, indent in (("\n", None), ("", None), ("\n", 2)):
        written = [
            f"<parameter={key}>{between}{json.dumps(value, indent=indent)}{between}</parameter>"
            for key, value in values.items()
        ]
        text = between.join([*written, "</function>", "</tool_call>"])
        assert read_items(text, places) == values


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<parameter=a>\n[5"]\n</parameter>\n<parameter=b>\n{"x": 1}\n</parameter>\n</function>', ['[5"]', {"x": 1}]),
        ('<parameter=a>[5"]</parameter><parameter=b>{"x": 1}</parameter></function>', ['[5"]', {"x": 1}]),
        ('<parameter=a>["x</parameter><parameter=b>{}</parameter></function>', ['["x', {}]),
        ('<parameter=a>\n["x\n<parameter=b>\n{}\n</function>', ['["x', {}]),
        ('<parameter=a>\n["</function>\\\n<parameter=b>', ['["']),
        ('<parameter=a>\n["</parameter>"', ['["']),
    ],
)
def test_qwen3_coder_ends_a_value_that_is_not_json_at_the_first_tag(text: str, arguments: list[Any]) -> None:
    assert list(read_items(text).values()) == arguments


PARTS = [
    *("<tool_call>", "</tool_call>", "<function=", "f>", "</function>", "<parameter=", "</parameter>", "[TOOL_CALLS]"),
    *("[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "[", "]", "{", "}", "(", ")", ","),
    *(
        ";",
        '"name": ',
        '"f"',
        '"arguments": ',
        '"parameters": ',
        '{"a": 1}',
        "null",
        "\\",
        '"',
        "'",
        " ",
        "\n",
        "a=1",
        "x",
    ),
    *('{"name": "f", "arguments": {', '{"name": "f", "parameters": "{}"}', "f(a=1)", "<", "[T"),
]
anything = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)


@pytest.mark.parametrize("name", [*TOOL_PARSERS, "required", "named"])
@settings(max_examples=150, deadline=None)
@given(text=anything, places=cuts)
@example(text='{"name": "f"} ; x', places=[1, 3])
@example(text='<tool_call>{"name": "f", "arguments": ["\\', places=[5])
@example(text="[f(), ", places=[])
def test_any_text_is_read_alike_from_any_pieces(name: str, text: str, places: list[int]) -> None:
    def parser() -> ToolParser:
        if name in TOOL_PARSERS:
            return TOOL_PARSERS[name]()
        return RequiredParser() if name == "required" else NamedParser([Function("f", {})])

    whole = read(parser(), [text])
    assert read(parser(), cut(text, places)) == whole
    assert read(parser(), [*text]) == whole
    if not whole.calls and name in ("hermes", "pythonic", "llama3_json"):
        assert whole.content == text


@pytest.mark.parametrize("name", TOOL_PARSERS)
@settings(max_examples=50, deadline=None)
@given(text=st.text("ab é\n.,!<[", max_size=30), places=cuts)
def test_text_without_calls_is_unchanged(name: str, text: str, places: list[int]) -> None:
    found = read(TOOL_PARSERS[name](), cut(text, places))
    assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>call it"),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}'),
        ("llama3_json", '{"a": 1} is JSON, too'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS]two words{"),
        ("pythonic", "[1], as they say"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(a=open('x'))]"),
        ("qwen3_coder", "<tool_call> is a tag"),
        ("qwen3_coder", "<function=a b>"),
    ],
)
def test_what_begins_like_a_call_and_is_none_is_content(name: str, text: str) -> None:
    assert read(TOOL_PARSERS[name](), [*text]) == Read(text)


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "b', ["f", '{"a": "b']),
        ("llama3_json", '{"name": "f", "parameters": {"a": [1, ', ["f", '{"a": [1, ']),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {', ["f", "{"]),
        ("mistral", '[TOOL_CALLS]f{"a"', ["f", '{"a"']),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter><parameter=b>2", ["f", '{"a": "1"']),
        ("required", '[{"name": "f", "parameters": {"a', ["f", '{"a']),
        ("named", '{"a": ', ["f", '{"a": ']),
    ],
)
def test_a_call_that_is_cut_off_has_what_was_written(name: str, text: str, call: list[str]) -> None:
    forced: dict[str, ToolParser] = {"required": RequiredParser(), "named": NamedParser([Function("f", {})])}
    parser = forced[name] if name in forced else TOOL_PARSERS[name]()
    assert read(parser, [text]) == Read("", [call])


def test_arguments_stream_as_they_are_written() -> None:
    parser = TOOL_PARSERS["hermes"]()
    parser.feed('<tool_call>{"name": "f", "arguments": {"a": "lo')
    assert parser.feed("ng te") == [Arguments("ng te")]


def test_ids_of_calls() -> None:
    assert len({new_call_id(None) for _ in range(50)}) == 50
    found = new_call_id("mistral")
    assert len(found) == 9
    assert found.isalnum()
