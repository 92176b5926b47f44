"""Texts that only look like calls, and calls that are written almost right."""

import json
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.server.parsers.base import Function, ToolParser
from specrs.server.parsers.forced import RequiredParser
from specrs.server.parsers.table import TOOL_PARSERS

from .test_parsers import FORMATS, TAGGED, Calls, Read, Texts, cut, cuts, names, read, values

WEATHER = Function("weather", {"type": "object", "properties": {"city": {"type": "string"}}})
ROME = '{"city": "Rome"}'
CALL = ["weather", ROME]


def as_texts(write: Callable[[Texts], str], made: Calls) -> str:
    return write([(name, {key: json.dumps(value) for key, value in arguments.items()}) for name, arguments in made])


WRITERS: dict[str, tuple[str, Callable[[Calls], str]]] = {
    **FORMATS,
    **{form: (name, partial(as_texts, write)) for form, (name, write) in TAGGED.items() if "without" not in form},
}


def read_alike(parser: str, text: str, places: Sequence[int] = ()) -> Read:
    """Return the events of `parser` for `text` if the function `weather` is offered. Checks that the whole text, single
    characters and pieces give the same events."""

    def make() -> ToolParser:
        return RequiredParser([WEATHER]) if parser == "required" else TOOL_PARSERS[parser]([WEATHER])

    whole = read(make(), [text])
    assert read(make(), [*text]) == whole
    assert read(make(), cut(text, places)) == whole
    return whole


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=40, deadline=None)
@given(
    made=st.lists(
        st.tuples(names.filter(lambda name: name != "weather"), st.dictionaries(names, values, max_size=3)),
        min_size=1,
        max_size=2,
    ),
    places=cuts,
)
def test_a_call_of_what_is_not_offered_is_content(form: str, made: Calls, places: list[int]) -> None:
    parser, write = WRITERS[form]
    found = read_alike(parser, write(made), places)
    assert found.calls == []
    assert found.content == write(made)


@pytest.mark.parametrize("form", WRITERS)
def test_a_call_of_what_is_offered_is_read(form: str) -> None:
    parser, write = WRITERS[form]
    found = read_alike(parser, write([("weather", {"city": "Rome"})]))
    ((name, arguments),) = found.calls
    assert (name, json.loads(arguments)["city"].strip('"'), found.content) == ("weather", "Rome", "")


@pytest.mark.parametrize("text", ['{"name": "Alice", "age": 30}', '{"age": 30, "name": "Alice"}', '{"name": "Alice"}'])
@pytest.mark.parametrize("parser", [*TOOL_PARSERS, "required"])
def test_an_answer_with_a_name_is_no_call(parser: str, text: str) -> None:
    """Check that a JSON answer about a person is content, although it has the key that names a call's function."""
    assert read_alike(parser, text) == Read(text)


@pytest.mark.parametrize(
    "parser",
    [
        "deepseek_v3",
        "deepseek_v31",
        "gemma4",
        "glm45",
        "hermes",
        "kimi_k2",
        "minimax_m2",
        "openai",
        "qwen3_coder",
        "step3",
    ],
)
def test_a_call_of_what_is_not_offered_leaves_the_next_one(parser: str) -> None:
    text = WRITERS[parser][1]([("wether", {"city": "Rome"}), ("weather", {"city": "Rome"})])
    found = read_alike(parser, text)
    assert [name for name, _ in found.calls] == ["weather"]
    assert found.content.count("wether") == 1


HERMES = f'{{"name": "weather", "arguments": {ROME}}}'
LLAMA = f'{{"name": "weather", "parameters": {ROME}}}'
GLM = "weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
KIMI = f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{ROME}<|tool_call_end|>"
MINIMAX = '<invoke name="weather"><parameter name="city">Rome</parameter></invoke>'
QWEN = "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", f"<tool_call>\n<tool_call>\n{HERMES}\n</tool_call>"),
        ("hermes", f"<tool_call><tool_call><tool_call>{HERMES}</tool_call></tool_call></tool_call>"),
        ("hermes", f"<tool_call>{HERMES}\n</tool_call>\n</tool_call>"),
        ("llama3_json", f"<|python_tag|><|python_tag|>{LLAMA}"),
        ("llama3_json", f"<|python_tag|> <|python_tag|>\n{LLAMA}"),
        ("mistral", f"[TOOL_CALLS][TOOL_CALLS][{HERMES}]"),
        ("mistral", f"[TOOL_CALLS] [TOOL_CALLS]weather{ROME}"),
        ("pythonic", '<|python_start|><|python_start|>[weather(city="Rome")]<|python_end|><|python_end|>'),
        ("lfm2", '<|tool_call_start|>\n<|tool_call_start|>[weather(city="Rome")]<|tool_call_end|><|tool_call_end|>'),
        ("qwen3_coder", f"<tool_call>\n<tool_call>\n{QWEN}\n</tool_call>"),
        ("glm45", f"<tool_call>\n<tool_call>{GLM}</tool_call>"),
        ("kimi_k2", f"<|tool_calls_section_begin|><|tool_calls_section_begin|>\n{KIMI}<|tool_calls_section_end|>"),
        ("kimi_k2", f"<|tool_call_begin|>{KIMI}<|tool_call_end|>"),
        ("gemma4", '<|tool_call><|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|><tool_call|>'),
        ("minimax_m2", f"<minimax:tool_call><minimax:tool_call>{MINIMAX}</minimax:tool_call></minimax:tool_call>"),
    ],
)
def test_a_tag_that_is_written_twice_counts_once(parser: str, text: str) -> None:
    assert read_alike(parser, text) == Read("", [CALL])


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", f"<tool_call>\n{HERMES[:-1]}\n</tool_call>"),
        ("hermes", f"<tool_call>\n{HERMES[:-1]}"),
        ("hermes", f"<tool_call>\n{HERMES}}}\n</tool_call>"),
        ("hermes", f"<tool_call>\n{HERMES}\n}} }}</tool_call>"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"</tool_call>'),
        ("llama3_json", LLAMA[:-1]),
        ("llama3_json", LLAMA + "}"),
        ("mistral", f"[TOOL_CALLS][{HERMES[:-1]}]"),
        ("mistral", f"[TOOL_CALLS][{HERMES}}}]"),
        ("mistral", f"[TOOL_CALLS][{HERMES}"),
        ("pythonic", '[weather(city="Rome")'),
        ("kimi_k2", KIMI.replace("<|tool_call_end|>", "} }")),
        ("deepseek_v31", f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ROME}}}<｜tool▁call▁end｜>"),
        ("pythonic", '<|python_start|>[weather(city="Rome")<|python_end|>'),
        ("lfm2", '<|tool_call_start|>[weather(city="Rome")<|tool_call_end|>'),
    ],
)
def test_a_brace_too_few_or_too_many_leaves_no_mark_in_the_content(parser: str, text: str) -> None:
    assert read_alike(parser, text) == Read("", [CALL])


@pytest.mark.parametrize(("parser", "mark"), [("pythonic", "python"), ("lfm2", "tool_call")])
def test_a_list_without_its_bracket_ends_at_the_mark(parser: str, mark: str) -> None:
    start, end = f"<|{mark}_start|>", f"<|{mark}_end|>"
    assert read_alike(parser, f'{start}[weather(city="Rome"){end}\nIt is <warm>.') == Read("\nIt is <warm>.", [CALL])
    broken = f'{start}[weather(city="Rome"{end}\nIt is warm.'
    assert read_alike(parser, broken) == Read(broken)
    if parser == "lfm2":
        text = f'{start}[weather(city="Rome"){end}{start}[weather(city="Rome")]{end}'
        assert read_alike(parser, text) == Read("", [CALL, CALL])


def test_arguments_without_their_braces_end_where_the_tag_begins() -> None:
    found = read_alike("hermes", f'<tool_call>{{"name": "weather", "arguments": {ROME[:-1]}\n</tool_call>\nIt is warm.')
    assert found == Read("\nIt is warm.", [["weather", ROME[:-1] + "\n"]])


def test_a_brace_too_few_leaves_the_next_call() -> None:
    assert read_alike("llama3_json", f"{LLAMA[:-1]}; {LLAMA}") == Read("", [CALL, CALL])
    assert read_alike("llama3_json", f"{LLAMA}}}; {LLAMA}") == Read("", [CALL, CALL])
    text = f"<tool_call>{HERMES[:-1]}</tool_call>\n<tool_call>{HERMES}</tool_call>"
    assert read_alike("hermes", text) == Read("", [CALL, CALL])


def test_text_after_a_call_keeps_its_line() -> None:
    assert read_alike("hermes", f"<tool_call>{HERMES}</tool_call>\nDone.") == Read("\nDone.", [CALL])
    assert read_alike("llama3_json", f"{LLAMA}\nDone.") == Read("\nDone.", [CALL])
