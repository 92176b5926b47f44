"""Messages that clients send, rendered by templates of many forms: no text is lost, and none is invented."""

import json
import logging
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.chat_template import TOOLS_NOT_SHOWN, Rendered, render
from specrs.errors import InvalidRequestError

from .shapes import (
    ALTERNATING,
    CONCATENATING,
    DEVELOPER,
    FOLDING,
    HEADERS,
    LAST_MESSAGE,
    LOOKING_AT_ROLES,
    NULL_CONTENT,
    SHAPES,
    SHOUTING,
    SHOUTING_ROLES,
    WITHOUT_SYSTEM,
)

USER = {"role": "user", "content": "How warm is it in Rome?"}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "31 degrees"}
CALLING = (LOOKING_AT_ROLES, HEADERS, ALTERNATING, NULL_CONTENT, DEVELOPER)
"""Templates that show calls."""
TEXTS = (LOOKING_AT_ROLES, NULL_CONTENT)
"""Templates that show arguments of calls as the text that clients sent."""
STRAY = ("{", '{"city": "Ro', "not JSON", '{"city": "Rome"} {', "[1, 2]", "5", "null", '"text"', "true", "[" * 100_000)
"""Arguments of calls that are no JSON object."""


def rendered(template: str, messages: list[dict[str, Any]], tools: Any = None, **hints: str) -> Rendered:
    return render(
        {
            "messages": messages,
            "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"},
            "variables": {},
            "hints": hints,
            "tools": tools,
            "chat_template": template,
            "add_generation_prompt": False,
            "continue_final_message": False,
        }
    )


def calling(arguments: object, **message: Any) -> list[dict[str, Any]]:
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [USER, {"role": "assistant", **message, "tool_calls": [call]}, RESULT]


@pytest.mark.parametrize("template", [CONCATENATING, WITHOUT_SYSTEM, *CALLING])
@pytest.mark.parametrize("content", [{}, {"content": ""}], ids=["no content", "empty content"])
def test_a_message_of_calls_alone_is_shown(template: str, content: dict[str, str]) -> None:
    text = rendered(template, calling('{"city": "Rome"}', **content)).text
    assert "31 degrees" in text
    assert "None" not in text
    if template in CALLING:
        assert "weather" in text
        assert '{"city": "Rome"}' in text


@pytest.mark.parametrize("template", CALLING)
def test_calls_next_to_content_and_reasoning(template: str) -> None:
    text = rendered(template, calling('{"city": "Rome"}', content="I look.", reasoning="Hm.")).text
    assert ('{"city": "Rome"}' in text) is (template != NULL_CONTENT)  # which shows one of content and calls
    assert ("Hm." in text) is (template in (LOOKING_AT_ROLES, DEVELOPER))


@pytest.mark.parametrize("template", CALLING)
@pytest.mark.parametrize("arguments", STRAY, ids=lambda text: text[:10])
def test_arguments_that_are_no_object(template: str, arguments: str) -> None:
    text = rendered(template, calling(arguments)).text
    assert "weather" in text
    assert (arguments if template in TEXTS else "{}") in text
    assert json.dumps(arguments) not in text


@pytest.mark.parametrize("template", CALLING)
@pytest.mark.parametrize("arguments", [None, "", " \n", "{}", {}], ids=repr)
def test_calls_without_arguments(template: str, arguments: object) -> None:
    text = rendered(template, calling(arguments)).text
    assert "{}" in text
    assert "null" not in text


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner))


@settings(max_examples=25)
@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=3))
def test_objects_arrive_whole(arguments: dict[str, Any]) -> None:
    for template in CALLING:
        text = rendered(template, calling(json.dumps(arguments))).text
        assert json.dumps(arguments) in text or json.dumps(arguments, ensure_ascii=False) in text


def test_half_a_character_in_arguments_can_be_encoded() -> None:
    for template in CALLING:
        text = rendered(template, calling(r'{"city": "\ud83d", "sun": "\ud83c\udf1e"}')).text
        assert text.encode()
        assert "\U0001f31e" in text or r"\ud83c\udf1e" in text


@pytest.mark.parametrize(
    "calls", ["x", [3], [{"name": "f"}], [{"function": {}}], [{"function": {"name": "f", "arguments": [1]}}]]
)
def test_calls_that_are_none(calls: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"^messages\[1\]\['tool_calls'\]"):
        rendered(CONCATENATING, [USER, {"role": "assistant", "tool_calls": calls}])


@pytest.mark.parametrize("template", SHAPES.values(), ids=SHAPES)
def test_an_empty_list_of_calls_is_none(template: str) -> None:
    messages = [USER, {"role": "assistant", "content": "Warm."}, USER]
    listed = [USER, {"role": "assistant", "content": "Warm.", "tool_calls": []}, USER]
    assert rendered(template, listed) == rendered(template, messages)


@pytest.mark.parametrize(
    ("template", "role"),
    [
        (CONCATENATING, "system"),
        (LOOKING_AT_ROLES, "system"),
        (HEADERS, "system"),
        (ALTERNATING, "system"),
        (FOLDING, "system"),
        (NULL_CONTENT, "system"),
        (DEVELOPER, "developer"),
    ],
)
def test_developers_are_shown(template: str, role: str) -> None:
    told = rendered(template, [{"role": "developer", "content": "Be brief."}, USER])
    assert told == rendered(template, [{"role": role, "content": "Be brief."}, USER])
    assert "Be brief." in told.text
    assert not told.warnings


INSTRUCTED = {
    "two at first": [{"role": "system", "content": "One."}, {"role": "system", "content": "Two."}, USER],
    "two roles": [{"role": "system", "content": "One."}, {"role": "developer", "content": "Two."}, USER],
    "the other way": [{"role": "developer", "content": "One."}, {"role": "system", "content": "Two."}, USER],
    "later": [
        {"role": "system", "content": "One."},
        USER,
        {"role": "assistant", "content": "Warm."},
        {"role": "developer", "content": "Two."},
        USER,
    ],
    "later alone": [
        USER,
        {"role": "assistant", "content": "Warm."},
        {"role": "system", "content": "One."},
        {"role": "system", "content": "Two."},
        USER,
    ],
}


@pytest.mark.parametrize("messages", INSTRUCTED.values(), ids=INSTRUCTED)
@pytest.mark.parametrize(
    "template", [CONCATENATING, LOOKING_AT_ROLES, HEADERS, ALTERNATING, FOLDING, NULL_CONTENT, DEVELOPER]
)
def test_several_instructions_are_all_shown(template: str, messages: list[dict[str, Any]]) -> None:
    told = rendered(template, messages)
    assert told.text.count("One.") == told.text.count("Two.") == 1
    assert told.text.index("One.") < told.text.index("Two.")
    assert not told.warnings


def test_instructions_stay_where_the_template_shows_them() -> None:
    messages = INSTRUCTED["later"]
    assert rendered(CONCATENATING, messages).text.endswith("[system]Two.\n[user]How warm is it in Rome?\n")
    assert rendered(ALTERNATING, messages).text.endswith("[user]One.\n\nTwo.\n\nHow warm is it in Rome?\n")


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize(
    "template", [CONCATENATING, LOOKING_AT_ROLES, HEADERS, ALTERNATING, FOLDING, NULL_CONTENT, DEVELOPER, SHOUTING]
)
def test_one_instruction_is_shown_wherever_it_stands(template: str, index: int, role: str) -> None:
    messages: list[dict[str, Any]] = [USER, {"role": "assistant", "content": "Warm."}, USER]
    messages.insert(index, {"role": role, "content": "Be brief."})
    told = rendered(template, messages)
    assert told.text.casefold().count("be brief.") == 1
    assert told.text.casefold().count("warm.") == 1
    assert not told.warnings


@pytest.mark.parametrize(("upper", "plain"), [(SHOUTING_ROLES, CONCATENATING)])
@pytest.mark.parametrize("messages", INSTRUCTED.values(), ids=INSTRUCTED)
def test_capitals_change_nothing_else(upper: str, plain: str, messages: list[dict[str, Any]]) -> None:
    """Check a template that shows roles and contents in capitals: its prompt is that of the plain template in capitals,
    without warnings."""
    told = rendered(upper, messages)
    assert told.text == rendered(plain, messages).text.upper()
    assert not told.warnings


def test_an_instruction_that_only_its_place_shows_stays_there() -> None:
    told = rendered(LAST_MESSAGE, [USER, {"role": "system", "content": "Be brief."}])
    assert told == Rendered("Be brief.")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_that_the_template_refuses_begin_the_first_user_message(role: str) -> None:
    warm = {"role": "assistant", "content": "Warm."}
    told = rendered(WITHOUT_SYSTEM, [{"role": role, "content": "Be brief."}, USER, warm, USER])
    assert told == rendered(WITHOUT_SYSTEM, [{**USER, "content": "Be brief.\n\n" + USER["content"]}, warm, USER])
    first, second = ({"role": role, "content": text} for text in ("One.", "Two."))
    told = rendered(WITHOUT_SYSTEM, [warm, first, {"role": "user", "content": ""}, second, USER])
    assert told == rendered(WITHOUT_SYSTEM, [warm, {"role": "user", "content": "One.\n\nTwo."}, USER])


def test_an_instruction_without_a_place_is_an_error() -> None:
    for role in ("system", "developer"):
        messages = [{"role": "assistant", "content": "Warm."}, {"role": role, "content": "Be brief."}]
        with pytest.raises(InvalidRequestError, match=rf"^messages\[1\]\['role'\]='{role}': .*; add a message of"):
            rendered(WITHOUT_SYSTEM, messages)


def test_an_instruction_that_is_left_out_is_named() -> None:
    told = rendered(LAST_MESSAGE, [{"role": "developer", "content": "Be brief."}, USER])
    assert told.text == USER["content"]
    assert told.warnings == ("messages[0]['role']='developer': the chat template leaves this message out",)


def test_hints_reach_templates_that_read_them() -> None:
    told = rendered(DEVELOPER, [USER], reasoning_effort="high", verbosity="low")
    assert "Reasoning: high" in told.text
    assert told.warnings == ("verbosity='low': the chat template does not read it",)
    assert "Reasoning: medium" in rendered(DEVELOPER, [USER]).text
    assert rendered(HEADERS, [USER], reasoning_effort="none").warnings == (
        "reasoning_effort='none': the chat template does not read it",
    )


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_earlier_reasoning_has_two_names(name: str) -> None:
    messages = [USER, {"role": "assistant", "content": "Warm.", name: "Hm."}, USER]
    for key in ("reasoning", "reasoning_content"):
        template = "{% for m in messages %}{{ m." + key + " }}{% endfor %}"
        assert rendered(template, messages).text == "Hm."


@pytest.mark.parametrize("template", ["{% if %}", "{{ raise_exception('never') }}", "{{ 1 / 0 }}"])
def test_broken_templates_tell_their_own_error(template: str) -> None:
    messages = [{"role": "developer", "content": "x"}, *calling("{"), {"role": "system", "content": "x"}]
    with pytest.raises(InvalidRequestError, match=r"^messages: the chat template refused them: "):
        rendered(template, messages, reasoning_effort="high")


def test_nothing_is_mutated() -> None:
    messages = [*INSTRUCTED["later"], *calling("{")]
    before = json.dumps(messages)
    for template in (LOOKING_AT_ROLES, NULL_CONTENT):
        rendered(template, messages)
        assert json.dumps(messages) == before


def test_warnings_of_a_local_chat_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    from specrs.pair import TARGET
    from specrs.tokenizer import Tokenizer

    with caplog.at_level(logging.WARNING, logger="specrs"):
        text = Tokenizer(str(TARGET)).render_chat(
            [{"role": "system", "content": "x"}, USER], chat_template=LAST_MESSAGE
        )
    assert text == USER["content"]
    assert "leaves this message out" in caplog.text


@pytest.mark.parametrize("template", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("role", "meant"), [("usr", "; did you mean user?"), ("User", "; did you mean user?"), ("robot", "")]
)
def test_roles_that_no_template_knows(template: str, role: str, meant: str) -> None:
    says = rf"^messages\[1\]\['role'\]='{role}': must be one of system, .*, tool{re.escape(meant)}$"
    with pytest.raises(InvalidRequestError, match=says):
        rendered(template, [USER, {"role": role, "content": "x"}])


def test_roles_of_a_template_are_taken() -> None:
    text = rendered(ALTERNATING, [USER, {"role": "tool_results", "content": "31 degrees"}]).text
    assert text.endswith("[results]31 degrees\n")
    known = "{% for m in messages %}{{ '<ctx>' if m.role == 'context' else m.role }}{{ m.content }}{% endfor %}"
    for messages in ([{"role": "context", "content": "x"}, USER], [USER, {"role": "context", "content": "x"}]):
        assert "<ctx>x" in rendered(known, messages).text


@pytest.mark.parametrize("template", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("key", "meant"), [("contents", "content"), ("toolcalls", "tool_calls"), ("extra", None)])
def test_unknown_keys_of_messages(template: str, key: str, meant: str | None) -> None:
    near = f"; did you mean {meant}?" if meant else ""
    with pytest.raises(InvalidRequestError, match=rf"^messages\[0\]=.*'{key}' and no content; .*{re.escape(near)}$"):
        rendered(template, [{"role": "user", key: "x"}])
    told = rendered(template, [{**USER, key: "x"}])
    assert told.text == rendered(template, [USER]).text
    assert told.warnings == (f"messages[0]['{key}']: the chat template does not read it{near}",)


@pytest.mark.parametrize("code", ["m.prefix", "m['prefix']", "m.get('prefix')"])
def test_keys_that_a_template_reads(code: str) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ " + code + " }}{% endfor %}"
    told = rendered(template, [{**USER, "prefix": "yes"}])
    assert told == Rendered(f"{USER['content']}yes")
    only_text = "prefix {% for m in messages %}{{ m.content }}{% endfor %}"
    assert rendered(only_text, [{**USER, "prefix": "yes"}]).warnings


def test_messages_of_clients_come_back_without_warnings() -> None:
    """Check that messages which the openai package, litellm and langchain copy from an answer into the next request are
    accepted without warnings."""
    copied = {
        "annotations": [{"type": "url_citation"}],
        "audio": None,
        "function_call": None,
        "provider_specific_fields": {"refusal": None, "x": 1},
        "images": [{"url": "x"}],
        "refusal": None,
        "thinking_blocks": [{"type": "thinking"}],
        "name": "example",
        "whatever": None,
        "other": [],
    }
    for message in ({"content": "Warm."}, {**calling("{}")[1], "content": None}):
        given: dict[str, Any] = {"role": "assistant", **copied, **message}
        assert not rendered(LOOKING_AT_ROLES, [USER, given, USER]).warnings


TOOL = {"type": "function", "function": {"name": "weather", "description": "Degrees.", "parameters": {}}}
SHOWS = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""Template without tools. The cases add what it does with them."""


@pytest.mark.parametrize(
    ("template", "left_out"),
    [
        (SHOWS, True),
        (SHOWS + "{# tools #}{% set known = tools %}", True),
        (SHOWS + "{% for tool in tools %}{% endfor %}{% if tools and false %}{{ tools }}{% endif %}", True),
        (SHOWS + "{{ tools }}", False),
        (SHOWS + "{% if tools %}You have functions.{% endif %}", True),
        (SHOWS + "{% if tools[0].function.name != 'weather' %}{{ raise_exception('unknown') }}{% endif %}", False),
        (
            "{% set known = tools %}" + SHOWS + "{% for tool in known or [] %}{{ tool.function.name }}{% endfor %}",
            False,
        ),
        (SHOWS + "{% if messages[0].role == 'system' %}{{ tools }}{% endif %}", False),
        (SHOWS + "{% if tools %}{{ raise_exception('one message') if messages | length == 1 }}{% endif %}", True),
    ],
)
def test_tools_that_change_no_text_are_a_warning(template: str, left_out: bool) -> None:
    """Check the text itself: a template may name tools and show none, and may show them in some conversations alone."""
    chat = [{"role": "system", "content": "Be brief."}, USER]
    assert (TOOLS_NOT_SHOWN in rendered(template, chat, [TOOL]).warnings) == left_out
    assert TOOLS_NOT_SHOWN not in rendered("{{ messages[0].content }}", chat).warnings
