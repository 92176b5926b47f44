"""Parsers of tool calls: they read calls that this file writes in each format, in whatever pieces the text arrives."""

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
from specrs.server.parsers.harmony import HarmonyContent, HarmonyParser
from specrs.server.parsers.table import TOOL_PARSERS, new_call_id, parser_shown_by
from sweep import sweep


@dataclass
class Read:
    """The content and calls that events add up to."""

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


def as_deepseek_v3(made: Calls) -> str:
    bodies = [f"function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```" for name, arguments in made]
    return in_section("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", bodies, "\n")


def as_deepseek_v31(made: Calls) -> str:
    bodies = [f"{name}<｜tool▁sep｜>{json.dumps(arguments, ensure_ascii=False)}" for name, arguments in made]
    return in_section("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", bodies)


def as_kimi(made: Calls) -> str:
    bodies = [
        f"functions.{name}:{i}<|tool_call_argument_begin|>{json.dumps(arguments, indent=1)}"
        for i, (name, arguments) in enumerate(made)
    ]
    return in_section("<|tool_calls_section_begin|>", "<|tool_call_begin|>", bodies)


def in_section(section: str, call: str, bodies: list[str], between: str = "") -> str:
    """Return calls between marks. Marks at the end say `end` where those at the beginning say `begin`."""
    calls = between.join(f"{call}{body}{call.replace('begin', 'end')}" for body in bodies)
    return f"{section}{calls}{section.replace('begin', 'end')}"


def as_gemma(made: Calls) -> str:
    return "".join(f"<|tool_call>call:{name}{as_gemma_value(arguments)}<tool_call|>" for name, arguments in made)


def as_gemma_json(made: Calls) -> str:
    return "\n".join(f"<|tool_call>call:{name}{json.dumps(arguments)}<tool_call|>" for name, arguments in made)


def as_gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(as_gemma_value, value))}]"
    if isinstance(value, dict):
        # keys that a bare word cannot hold are quoted
        keys = {key: key if key.isidentifier() else f'<|"|>{key}<|"|>' for key in value}
        return "{" + ",".join(f"{keys[key]}:{as_gemma_value(value[key])}" for key in value) + "}"
    return json.dumps(value)


def as_harmony(made: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in made
    )


def as_harmony_roles(made: Calls) -> str:
    return "<|start|>assistant".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(arguments)}<|end|>"
        for name, arguments in made
    )


FORMATS: dict[str, tuple[str, Callable[[Calls], str]]] = {
    "deepseek_v3": ("deepseek_v3", as_deepseek_v3),
    "deepseek_v31": ("deepseek_v31", as_deepseek_v31),
    "gemma4": ("gemma4", as_gemma),
    "gemma4 in JSON": ("gemma4", as_gemma_json),
    "hermes": ("hermes", as_hermes),
    "kimi_k2": ("kimi_k2", as_kimi),
    "llama3_json": ("llama3_json", as_llama),
    "llama3_json with a tag": ("llama3_json", lambda made: "<|python_tag|>" + as_llama(made)),
    "mistral, a list": ("mistral", as_mistral_list),
    "mistral, names": ("mistral", as_mistral_names),
    "openai": ("openai", as_harmony),
    "openai, roles": ("openai", as_harmony_roles),
    "pythonic": ("pythonic", as_pythonic),
    "lfm2": ("lfm2", lambda made: f"<|tool_call_start|>{as_pythonic(made)}<|tool_call_end|>"),
    "pythonic with tags": ("pythonic", lambda made: f"<|python_start|>{as_pythonic(made)}<|python_end|>"),
}
BEHIND_TEXT = (
    *("deepseek_v3", "deepseek_v31", "gemma4", "gemma4 in JSON", "hermes", "kimi_k2", "llama3_json with a tag"),
    *("mistral, a list", "mistral, names", "openai", "lfm2"),
)


@pytest.mark.parametrize("form", FORMATS)
@sweep(180)
@given(data=st.data(), made=calls, places=cuts)
def test_calls_are_read_back_from_any_pieces(form: str, data: st.DataObject, made: Calls, places: list[int]) -> None:
    name, write = FORMATS[form]
    before = data.draw(st.sampled_from(["", "Let me see.\n\n"] if form in BEHIND_TEXT else ["", "\n "]))
    found = read(TOOL_PARSERS[name](), cut(before + write(made), places))
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == made
    assert found.content == before.strip()


Texts = list[tuple[str, dict[str, str]]]
texts = st.lists(
    st.tuples(names, st.dictionaries(names, st.text("abé<>/\n {}1", max_size=6), max_size=3)), min_size=1, max_size=3
)


def as_qwen(made: Texts, between: str = "\n", ends: bool = True) -> str:
    end = "</parameter>\n" if ends else ""
    return between.join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n{end}" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in made
    )


def as_glm(made: Texts, line: str = "\n") -> str:
    return "\n".join(
        f"<tool_call>{name}{line}"
        + "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in made
    )


def as_minimax(made: Texts) -> str:
    calls = "".join(f'<invoke name="{name}">\n{_parameters("", arguments)}</invoke>\n' for name, arguments in made)
    return f"<minimax:tool_call>\n{calls}</minimax:tool_call>"


def as_step3(made: Texts, word: str = "function<｜tool_sep｜>") -> str:
    bodies = [
        f'{word}<steptml:invoke name="{name}">{_parameters("steptml:", arguments)}</steptml:invoke>'
        for name, arguments in made
    ]
    return in_section("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", bodies, "\n")


def _parameters(prefix: str, arguments: dict[str, str]) -> str:
    return "".join(f'<{prefix}parameter name="{key}">{value}</{prefix}parameter>\n' for key, value in arguments.items())


TAGGED: dict[str, tuple[str, Callable[[Texts], str]]] = {
    "glm45": ("glm45", as_glm),
    "glm45 on one line": ("glm45", lambda made: as_glm(made, "")),
    "minimax_m2": ("minimax_m2", as_minimax),
    "qwen3_coder": ("qwen3_coder", as_qwen),
    "qwen3_coder without ends": ("qwen3_coder", lambda made: as_qwen(made, ends=False)),
    "qwen3_coder without tags": (
        "qwen3_coder",
        lambda made: as_qwen(made).replace("<tool_call>\n", "").replace("\n</tool_call>", ""),
    ),
    "step3": ("step3", as_step3),
    "step3 without words": ("step3", lambda made: as_step3(made, "")),
}


@pytest.mark.parametrize("form", TAGGED)
@sweep(180)
@given(made=texts, places=cuts)
def test_texts_between_tags_are_read_back(form: str, made: Texts, places: list[int]) -> None:
    name, write = TAGGED[form]
    found = read(TOOL_PARSERS[name](), cut(f"Well. {write(made)}\n", places))
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == made
    assert found.content == "Well."


@pytest.mark.parametrize("form", [*FORMATS, *TAGGED])
def test_a_call_is_read_back_from_any_three_pieces(form: str) -> None:
    """Check that a call is read correctly from any three pieces of its text. The pieces end at every place: within
    marks, after a backslash, and before and after a quote."""
    name, write = (FORMATS | TAGGED)[form]
    made: Any = [("f", {"a": 'x\\"\\', "b": "\n"})]
    text = write(made)
    whole = read(TOOL_PARSERS[name](), [text])
    assert [(called, json.loads(arguments)) for called, arguments in whole.calls] == made
    for start in range(len(text)):
        for end in range(start, len(text)):
            assert read(TOOL_PARSERS[name](), [text[:start], text[start:end], text[end:]]) == whole


KEYS = ("text", "count", "on", "list", "either", "broken", "unknown")


@pytest.mark.parametrize("form", TAGGED)
def test_texts_between_tags_take_types_from_the_schema(form: str) -> None:
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
    name, write = TAGGED[form]
    found = read(TOOL_PARSERS[name]([function]), [write([("f", given_values)])])
    wanted = dict(zip(KEYS, ("12", 12, True, [1, "é"], None, "{no", "3"), strict=True))
    assert json.loads(found.calls[0][1]) == wanted


TAGS = ["</parameter>", "<parameter=", "</function>", "</tool_call>", "<tool_call>"]
ITEMS = Function("f", {"properties": {"a": {"type": ["array", "integer"]}, "b": {"type": "object"}}})


def read_items(text: str, places: Sequence[int] = ()) -> Any:
    """Return the arguments of a call of `ITEMS` whose body is `text`. Checks that all pieces give the same."""
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
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>", "f<｜tool▁sep｜>", "```json", "```"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    *("functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    *("<|tool_call>", "call:f{", '<|"|>', "<tool_call|>", "a:", "<minimax:tool_call>", '<invoke name="', 'f">'),
    *('<parameter name="', "</invoke>", "</minimax:tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", "<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"),
    *('<steptml:invoke name="', '<steptml:parameter name="', "</steptml:parameter>", "</steptml:invoke>"),
    *("<｜tool_call_end｜>", "<｜tool_calls_end｜>", "<|channel|>", "final", "analysis", "commentary to=functions.f"),
    *("<|constrain|>json", "<|message|>", "<|end|>", "<|call|>", "<|start|>", "assistant", "to=functions.f"),
    *('{"name": "f", "arguments": {', '{"name": "f", "parameters": "{}"}', "f(a=1)", "<", "[T"),
    *("<|tool_call_start|>", "[f(a=1)", "[f(a='x')]", ", g(b=[", "<|tool_call_sta"),
]
KEEPS_ALL = ("deepseek_v3", "deepseek_v31", "gemma4", "glm45", "hermes", "kimi_k2", "llama3_json", "minimax_m2")
KEEPS_ALL += ("lfm2", "pythonic", "qwen3_coder", "step3")
anything = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)


@pytest.mark.parametrize("name", [*TOOL_PARSERS, "required", "named"])
@sweep(450)
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
    if not whole.calls and name in KEEPS_ALL:
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
        ("deepseek_v3", "<｜tool▁calls▁begin｜>, as they say"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f and {}"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>"),
        ("gemma4", "<|tool_call>f{}<tool_call|>"),
        ("gemma4", "<|tool_call>call:a b{}"),
        ("glm45", "<tool_call> is a tag"),
        ("glm45", "<tool_call>f\n<b>"),
        ("hermes", "<tool_call>call it"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f:0 {}"),
        ("minimax_m2", "<minimax:tool_call> is a tag"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="a b">'),
        ("openai", "to= is no header"),
        ("step3", "<｜tool_calls_begin｜> function"),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}'),
        ("lfm2", "[f(a=1)]"),
        ("lfm2", "<|tool_call_start|> is a mark"),
        ("lfm2", "So: <|tool_call_start|>[1], as they say<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(a=open('x'))]<|tool_call_end|>\nDone."),
        ("lfm2", "no call<|tool_call_end|>"),
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
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{", ["f", "{"]),
        ("deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "é', ["f", '{"a": "é']),
        ("gemma4", '<|tool_call>call:f{a:<|"|>say "é', ["f", '{"a": "say \\"é']),
        ("gemma4", "<|tool_call>call:f{a:[1,2", ["f", '{"a": [1, 2']),
        ("gemma4", "<|tool_call>call:f{a:{b:tr<tool_call|>", ["f", '{"a": {"b": "tr"']),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b", ["f", '{"a": "1"']),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "b', ["f", '{"a": "b']),
        ("kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1', ["f", '{"a": 1']),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter>', ["f", '{"a": "1"}']),
        ("openai", '<|channel|>commentary to=functions.f<|message|>{"a"', ["f", '{"a"']),
        ("step3", '<steptml:invoke name="f"><steptml:parameter name="a">1</steptml:parameter>', ["f", '{"a": "1"}']),
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


def test_arguments_between_tokens_stream_as_they_are_written() -> None:
    for text, begun in {
        as_kimi([("f", {"a": "lo"})]): '"lo',
        as_deepseek_v3([("f", {"a": "lo"})]): '"lo',
        as_gemma([("f", {"a": "lo"})]): "lo",
        as_harmony([("f", {"a": "lo"})]): '"lo',
    }.items():
        parser = TOOL_PARSERS[parser_shown_by(text) or ""]()
        parser.feed(text.partition(begun)[0] + begun)
        assert parser.feed("ng te") == [Arguments("ng te")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x"}<｜tool▁call▁en'),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_ca'),
        ("kimi_k2", '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": "x"}<|tool_call_e'),
        ("minimax_m2", '<invoke name="f"><parameter name="a">x</parameter></invoke>\n</mini'),
        (
            "step3",
            '<steptml:invoke name="f"><steptml:parameter name="a">x</steptml:parameter></steptml:invoke><｜tool_',
        ),
    ],
)
def test_a_mark_that_the_limit_cut_off_is_no_content(name: str, text: str) -> None:
    assert read(TOOL_PARSERS[name](), [*text]) == Read("", [["f", '{"a": "x"}']])


def test_a_text_that_begins_like_a_header_streams_from_its_second_line() -> None:
    assert TOOL_PARSERS["openai"]().feed("to= is no header\nnext") == [Content("to= is no header"), Content("\nnext")]


def test_calls_without_arguments_have_none() -> None:
    for name, text in {
        "deepseek_v31": "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>",
        "kimi_k2": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|><|tool_call_end|>",
        "openai": "<|channel|>commentary to=functions.f<|message|> <|call|>",
    }.items():
        assert read(TOOL_PARSERS[name](), [*text]) == Read("", [["f", "{}"]])


def test_messages_of_gpt_oss() -> None:
    text = (
        "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.\n"
        "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done."
    )
    assert read(HarmonyParser(), [*text]) == Read("Look it up.I look.Done.", [["f", "{}"]])
    called = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    assert read(HarmonyContent(), [*text]) == Read(f"Look it up.I look.\n{called}Done.")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\n{{ call.name }}\n<arg_key>", "glm45"),
        ("<tool_call>\n<function={{ call.name }}>", "qwen3_coder"),
        ('<tool_call>\n{"name": {{ call.name }}', "hermes"),
        ("{{ '<｜tool▁sep｜>' + name + '\\n```json' }}", "deepseek_v3"),
        ("{{ name + '<｜tool▁sep｜>' }}", "deepseek_v31"),
        ("<|start|>assistant<|channel|>final<|message|>", "openai"),
        ("[TOOL_CALLS]{{ calls }}", "mistral"),
        ("<|im_start|>system\nList of tools: <|tool_list_start|>[{{ tools }}]<|tool_list_end|>", "lfm2"),
        ("<|im_start|>system\nList of tools: [{{ tools }}]", "lfm2"),
        ("List of tools: [{{ tools }}]", None),
        ("{{ messages }}", None),
    ],
)
def test_a_template_shows_its_parser(template: str, name: str | None) -> None:
    assert parser_shown_by(template) == name


def test_every_parser_is_shown_by_the_calls_that_it_reads() -> None:
    templates = {"llama3_json": "<|python_tag|>", "pythonic": "<|python_start|>"}
    made: Any = [("f", {"a": "x"})]
    for name, write in (FORMATS | TAGGED).values():
        assert parser_shown_by(templates.get(name) or f"<tools>{write(made)}") == name
    assert {name for name, _ in (FORMATS | TAGGED).values()} == TOOL_PARSERS.keys()


def test_lists_of_lfm2() -> None:
    """Check several lists, text between them, and arguments of each type."""
    text = (
        'I look. <|tool_call_start|>[f(a="]<|tool_call_end|>", b=[1, {"c": [None, -2.5]}], d=True), g()]'
        "<|tool_call_end|>\nAnd: <|tool_call_start|> [f(a='<|tool_call_start|>')]<|tool_call_end|> Done."
    )
    arguments = {"a": "]<|tool_call_end|>", "b": [1, {"c": [None, -2.5]}], "d": True}
    whole = read(TOOL_PARSERS["lfm2"](), [*text])
    assert [(name, json.loads(own)) for name, own in whole.calls] == [
        ("f", arguments),
        ("g", {}),
        ("f", {"a": "<|tool_call_start|>"}),
    ]
    assert whole.content == "I look.\nAnd: Done."


def test_ids_of_calls() -> None:
    assert len({new_call_id(None, "f", i) for i in range(50)}) == 50
    found = new_call_id("mistral", "f", 0)
    assert len(found) == 9
    assert found.isalnum()
    assert new_call_id("kimi_k2", "f", 3) == "functions.f:3"
