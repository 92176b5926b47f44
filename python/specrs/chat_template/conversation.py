"""Changes the messages of a conversation into those that a chat template can show. Loses none of their text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from specrs.chat_template.message_checks import check_message
from specrs.chat_template.traits import Message, Traits, shows
from specrs.errors import invalid_request

INSTRUCTIONS = ("system", "developer")
"""Roles that instruct the model: `system` and `developer`. A template may support one, both or none of them."""
_MARK = "qzxpart{}end"


def fit(
    messages: list[Message], traits: Traits, render: Callable[[list[Message]], str]
) -> tuple[list[Message], list[str]]:
    """Return the messages in a form for a template with these traits, and a warning for each part that it leaves out.
    Mutates nothing.

    - Arguments of calls become objects, or JSON text if the template shows only text. Text that is no JSON object stays
      text if the template shows text, else it becomes `{}`.
    - A message without content gets `""`, or what the template needs to show the calls of such a message.
    - `developer` becomes `system` if the template does not know it, and the other way round.
    - Instructions become one, the first message, if `render` does not show all of them in their places.
    - Instructions become the beginning of the first user message if the template raises an error for `system`.

    Raises `InvalidRequestError` for malformed calls, for instructions that have no user message to go to, and for
    messages that `check_message` rejects.
    """
    fitted, dropped, warnings = [], [], []
    for i, message in enumerate(messages):
        warnings += check_message(i, message, traits)
        if message["role"] in INSTRUCTIONS:
            role, warning = _role(i, message["role"], traits)
            message = {**message, "role": role}
            dropped += warning
        fitted.append(_with_reasoning(_with_content(_with_calls(i, message, traits), traits)))
    if any(message["role"] in INSTRUCTIONS for message in messages) and not traits.takes_instructions:
        return _folded(messages, fitted), warnings
    # one instruction in the first place is what `traits` are about
    if any(message["role"] in INSTRUCTIONS for message in fitted[1:]):
        if _all_shown(fitted, render):
            dropped = []
        else:
            fitted = _merged(fitted)
    return fitted, dropped + warnings


def _role(index: int, role: str, traits: Traits) -> tuple[str, list[str]]:
    """Return the role under which the template shows an instruction, and a warning if it shows none."""
    if traits.system == "shown":
        return ("developer" if role == "developer" and traits.developer else "system"), []
    if traits.developer:
        return "developer", []
    return "system", [f"messages[{index}]['role']={role!r}: the chat template leaves this message out"]


def _all_shown(messages: list[Message], render: Callable[[list[Message]], str]) -> bool:
    """Return True if the template shows every instruction in its place. Renders the conversation with marks instead of
    the instructions, and looks for the marks."""
    marks: list[str] = []
    marked = []
    for message in messages:
        if message["role"] in INSTRUCTIONS:
            marks.append(_MARK.format(len(marks)))
            message = {**message, "content": marks[-1]}
        marked.append(message)
    try:
        text = render(marked)
    except Exception:  # a template is a program, and raises what it likes
        return False
    return all(shows(text, mark) for mark in marks)


def _merged(messages: list[Message]) -> list[Message]:
    """Return the conversation with all instructions in its first message, in order."""
    first, *others = (message for message in messages if message["role"] in INSTRUCTIONS)
    texts = [text for message in (first, *others) if (text := message["content"])]
    rest = [message for message in messages if message["role"] not in INSTRUCTIONS]
    return [{**first, "content": "\n\n".join(texts)}, *rest]


def _folded(given: list[Message], messages: list[Message]) -> list[Message]:
    """Return the conversation with all instructions at the beginning of its first user message, in order.

    `given` are the messages as the client sent them, for the error if there is no user message.
    """
    texts = [text for message in messages if message["role"] in INSTRUCTIONS and (text := message["content"])]
    rest = [message for message in messages if message["role"] not in INSTRUCTIONS]
    first = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
    if first is None:
        index = next(i for i, message in enumerate(given) if message["role"] in INSTRUCTIONS)
        raise invalid_request(
            f"messages[{index}]['role']",
            given[index]["role"],
            "the model's chat template takes no such message; add a message of the user to put its text into",
        )
    texts += [text for text in [rest[first]["content"]] if text]
    rest[first] = {**rest[first], "content": "\n\n".join(texts)}
    return rest


def _with_content(message: Message, traits: Traits) -> Message:
    if message.get("content"):
        return message
    rest = {key: value for key, value in message.items() if key != "content"}
    return {**rest, **(traits.empty_content if message.get("tool_calls") else {"content": ""})}


def _with_reasoning(message: Message) -> Message:
    """Return a message that has its reasoning under both names."""
    for name in ("reasoning", "reasoning_content"):
        if message.get(name) is not None:
            return {**message, "reasoning": message[name], "reasoning_content": message[name]}
    return message


def _with_calls(index: int, message: Message, traits: Traits) -> Message:
    if "tool_calls" not in message:
        return message
    at, calls = f"messages[{index}]['tool_calls']", message["tool_calls"]
    if not isinstance(calls, list):
        raise invalid_request(at, calls, "must be a list of calls")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    # templates take a list for calls, even an empty one
    return (
        {**rest, "tool_calls": [_call(f"{at}[{i}]", call, traits) for i, call in enumerate(calls)]} if calls else rest
    )


def _call(at: str, call: object, traits: Traits) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid_request(at, call, "must be a call of a function, with its name and arguments")
    given = function.get("arguments")
    if given is not None and not isinstance(given, (str, Mapping)):
        raise invalid_request(f"{at}['function']['arguments']", given, "must be the text of a JSON object")
    return {**call, "function": {**function, "arguments": _arguments(given, traits)}}


def _arguments(given: str | Mapping[str, Any] | None, traits: Traits) -> str | dict[str, Any]:
    value = _object(given) if isinstance(given, str) else dict(given or {})
    if isinstance(given, str) and value is None and traits.text_arguments:
        return given
    value = value or {}
    if traits.object_arguments:
        return value
    return given if isinstance(given, str) and value else json.dumps(value, ensure_ascii=False)


def _object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in `text`; None for any other text. Blank text is an empty object."""
    try:
        value = json.loads(text if text.strip() else "{}")
        plain = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    # JSON may escape half of a character, of which no prompt can be made
    found: dict[str, Any] = json.loads(plain.encode("utf-8", "replace"))
    return found
