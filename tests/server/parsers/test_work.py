"""Work of the parsers is linear in the length of the text, and for ordinary text they take no step: it becomes an event
at once."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from specrs.server.parsers import base, harmony
from specrs.server.parsers.base import Arguments, Content, Function, ToolParser
from specrs.server.parsers.forced import NamedParser, RequiredParser
from specrs.server.parsers.table import REASONING_PARSERS, TOOL_PARSERS, new_reasoning_parser

from .test_parsers import FORMATS, TAGGED, as_llama, read
from .test_reasoning import ANALYSIS

LENGTH = 200_000
MOST = 20
"""Maximum number of characters that a parser may read for each character of the text."""
LONG = ("<a href='x'>é</a> \\ & \n" * LENGTH)[:LENGTH]
"""A value in which what ends a value seems to begin again and again."""


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that tells how many characters were in buffers when a parser took a step, or searched for
    marks. Far too many fail the test."""
    count = 0

    def counted(name: str, of: Any, length: Callable[..., int]) -> None:
        original = getattr(of, name)

        def count_and_do(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += length(*arguments)
            assert count < 3 * MOST * LENGTH, "work that is not linear would take minutes"
            return original(*arguments, **named)

        monkeypatch.setattr(of, name, count_and_do)

    counted("_step", ToolParser, lambda parser: len(parser._buffer))
    counted("_step", harmony.Messages, lambda messages, parts: len(messages._buffer))
    for module in (base, harmony):
        counted("split_at", module, lambda text, *_: len(text))
    monkeypatch.setattr("specrs.server.parsers.reasoning.split_at", base.split_at)
    return lambda: count


def pieces(text: str) -> list[str]:
    return [text[i : i + 4] for i in range(0, len(text), 4)]


@pytest.mark.parametrize("form", [*FORMATS, *TAGGED])
def test_a_long_value_is_read_once(form: str, looked_at: Callable[[], int]) -> None:
    name, write = (FORMATS | TAGGED)[form]
    made: Any = [("f", {"a": LONG})]
    text = write(made)
    found = read(TOOL_PARSERS[name](), pieces(text))
    assert [(called, json.loads(arguments)) for called, arguments in found.calls] == made
    assert looked_at() < MOST * len(text)


KINDS = Function("f", {"properties": {"a": {"type": "array"}}})


@pytest.mark.parametrize("form", TAGGED)
@pytest.mark.parametrize("value", [[LONG], LONG.split("\n"), [" " + "</parameter></arg_value>" * (LENGTH // 24)]])
def test_a_long_value_of_json_is_read_once(form: str, value: list[str], looked_at: Callable[[], int]) -> None:
    name, write = TAGGED[form]
    text = write([("f", {"a": json.dumps(value)})])
    found = read(TOOL_PARSERS[name]([KINDS]), pieces(text))
    assert [(called, json.loads(arguments)) for called, arguments in found.calls] == [("f", {"a": value})]
    assert looked_at() < MOST * len(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deepseek_v31", "<｜tool▁call▁begin｜>" + "<a " * (LENGTH // 3)),
        ("gemma4", "<|tool_call>call:" + "a" * LENGTH),
        ("hermes", '<tool_call>{"arguments": {"a": "' + "a" * LENGTH),
        ("hermes", "<tool_call>" + " " * LENGTH),
        ("llama3_json", '{"a": "' + "a" * LENGTH),
        ("llama3_json", " " * LENGTH),
        ("minimax_m2", '<invoke name="' + '"a' * (LENGTH // 2)),
        ("minimax_m2", '<invoke name="f"><parameter name="' + '"a' * (LENGTH // 2)),
        ("mistral", "[TOOL_CALLS]" + "a" * LENGTH),
        ("openai", "<|channel|>" + "<a " * (LENGTH // 3)),
        ("lfm2", "<|tool_call_start|>[" + "[1, " * (LENGTH // 4)),
        ("pythonic", "[" + "[1, " * (LENGTH // 4)),
        ("qwen3_coder", "<tool_call>" + "\n" * LENGTH),
        ("qwen3_coder", "<function=" + "a" * LENGTH),
        ("step3", "<｜tool_call_begin｜>" + " " * LENGTH),
    ],
)
def test_what_may_become_a_call_for_long_is_read_once(name: str, text: str, looked_at: Callable[[], int]) -> None:
    parser = TOOL_PARSERS[name]()
    for piece in pieces(text):
        parser.feed(piece)
    parser.finish()
    assert looked_at() < MOST * len(text)


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_long_reasoning_is_read_once(name: str, looked_at: Callable[[], int]) -> None:
    text = (ANALYSIS if name == "openai_gptoss" else "") + LONG
    parser = new_reasoning_parser(name, opened=True)
    found = "".join(parser.feed(piece, final=False)[0] for piece in pieces(text))
    assert found + parser.feed("", final=True)[0] == LONG
    assert looked_at() < MOST * len(text)


@pytest.mark.parametrize("name", [*TOOL_PARSERS, "required", "named"])
def test_ordinary_text_takes_no_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forced: dict[str, ToolParser] = {"required": RequiredParser(), "named": NamedParser([Function("f", {})])}
    parser = forced[name] if name in forced else TOOL_PARSERS[name]()
    parser.feed("It is")
    monkeypatch.setattr(ToolParser, "_take_steps", None)
    kind = Arguments if name == "named" else Content
    assert parser.feed(" a fine") == [kind(" a fine")]


AT_ONCE = ("mistral, a list", "lfm2", "pythonic", "pythonic with tags")
"""Forms whose arguments are reported all at once: the name follows them, or they are not JSON."""


@pytest.mark.parametrize("form", [form for form in FORMATS if form not in AT_ONCE])
def test_ordinary_text_in_a_string_of_arguments_takes_no_step(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, write = FORMATS[form]
    text = write([("f", {"a": "It is"})])
    parser = TOOL_PARSERS[name]()
    parser.feed(text[: text.index("It is") + 5])
    monkeypatch.setattr(ToolParser, "_take_steps", None)
    assert parser.feed(" a fine") == [Arguments(" a fine")]


def test_a_second_object_of_arguments_is_skipped_wherever_the_text_is_cut() -> None:
    text = as_llama([("f", {"a": 1})])[:-1] + ', "arguments": {"b": 2}}'
    found = read(TOOL_PARSERS["llama3_json"](), [text])
    assert [(called, json.loads(arguments)) for called, arguments in found.calls] == [("f", {"a": 1})]
    assert read(TOOL_PARSERS["llama3_json"](), [*text]) == found
