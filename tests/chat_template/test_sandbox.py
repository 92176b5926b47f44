"""The sandbox of chat templates gives the texts that transformers gives, and fails where it fails."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.chat_template.sandbox import compile_template, plain, show
from sweep import sweep
from transformers.utils.chat_template_utils import render_jinja_template

from .family_templates import TEMPLATES

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEXTS = st.text(alphabet="ab <&'\"\n\t{}%é日", max_size=12) | st.sampled_from(
    ["<think>\nwhy\n</think>\n\nso", " padded \n", "{{ 1 + 1 }}", "</s>", ""]
)
PROPERTIES: dict[str, Any] = {
    "city": {"type": "string", "enum": ["a", "é"]},
    "days": {"type": "array", "items": {"type": "integer"}},
    "unit": {"type": ["string", "null"]},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says <what> it's like.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "é", "days": [1]}}}


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXTS)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXTS)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(TEXTS)}
        for name in draw(st.sets(st.sampled_from(["reasoning", "reasoning_content", "thinking"]), max_size=2)):
            answer[name] = draw(TEXTS)
        if draw(st.integers(0, 3)) == 0:
            calls = [CALL] * draw(st.integers(1, 2))
            messages += [{**answer, "tool_calls": calls}, {"role": "tool", "content": draw(TEXTS)}]
        elif draw(st.booleans()):
            messages.append(answer)
    return messages


def outcome(render: Any, *args: Any, **kwargs: Any) -> str | None:
    """Return the rendered text, or None for an error."""
    try:
        return str(render(*args, **kwargs))
    except Exception:  # a template raises what it likes
        return None


def by_transformers(messages: list[dict[str, Any]], variables: dict[str, Any], **arguments: Any) -> str:
    rendered: Any = render_jinja_template(conversations=[messages], **arguments, **variables)
    return str(rendered[0][0])


@pytest.mark.parametrize("family", TEMPLATES)
@sweep(90)
@given(
    messages=conversations(),
    tools=st.none() | st.just([]) | st.just([TOOL]) | st.just([TOOL, TOOL]),
    last=st.sampled_from(["none", "prompt", "continue"]),
    variables=st.sampled_from([{}, {"enable_thinking": False}, {"controls": {"length": "short"}}, {"bos_token": "!"}]),
)
def test_texts_are_those_of_transformers(
    family: str, messages: list[dict[str, Any]], tools: Any, last: str, variables: dict[str, Any]
) -> None:
    given: dict[str, Any] = {
        "tools": tools,
        "chat_template": TEMPLATES[family],
        "add_generation_prompt": last == "prompt",
        "continue_final_message": last == "continue",
    }
    read = TOKENS | variables
    assert outcome(show, messages, variables=read, **given) == outcome(by_transformers, messages, read, **given)


def test_every_family_shows_a_plain_conversation() -> None:
    """Check that every template renders a plain conversation. `test_texts_are_those_of_transformers` compares outcomes
    only, so it would pass if a template failed everywhere."""
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    for template in TEMPLATES.values():
        text = show(messages, chat_template=template, variables=TOKENS)
        assert "one" in text
        assert "two" in text


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ messages[0].__class__ }}",
        "{{ dict.__class__.mro() }}",
        "{{ dict.mro() }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{% set ns = namespace(_a=1) %}",
        "{% set ns = namespace() %}{% set ns._a = 1 %}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% include 'other' %}",
        "{% if %}",
        "{% generation %}",
    ],
)
def test_what_a_template_may_not_do(template: str) -> None:
    """Check that what transformers rejects is rejected, and that what transformers shows as nothing is shown as
    nothing."""
    messages = [{"role": "user", "content": "one"}]
    ours = outcome(show, messages, chat_template=template)
    assert ours == outcome(by_transformers, messages, {}, chat_template=template)
    assert not ours
    assert messages == [{"role": "user", "content": "one"}]


def test_templates_share_no_state() -> None:
    assert show([], chat_template="{% set leak = 1 %}{% set dict = 2 %}{{ leak }}") == "1"
    assert show([], chat_template="{{ leak is defined }}{{ dict(a=1).a }}") == "False1"
    assert compile_template("a") is compile_template("a")


class Colour(Enum):
    RED = "red"


class Word(str):
    __slots__ = ()


@dataclass
class Point:
    x: int
    inner: Any


def test_templates_get_plain_data_alone() -> None:
    class Model:
        def model_dump(self) -> dict[str, Any]:
            return {"a": (1, Word("b"))}

    given = {"m": Model(), "p": Point(1, np.float32(0.5)), "n": np.int64(3), "b": np.bool_(False), "o": object()}
    made = plain(given | {"c": Colour.RED, "w": Word("w"), "t": True})
    assert made == {
        "m": {"a": (1, "b")}, "p": {"x": 1, "inner": 0.5}, "n": 3, "b": False, "o": "<object>", "c": "<Colour>",
        "w": "w", "t": True,
    }  # fmt: skip
    assert type(made["w"]) is str
    assert type(made["m"]["a"][1]) is str
    assert type(made["n"]) is int
