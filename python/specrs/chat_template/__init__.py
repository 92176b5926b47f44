"""Renders chats to text by a chat template, which runs in a sandbox (`sandbox.py`). Loads no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from specrs.chat_template.conversation import fit
from specrs.chat_template.traits import OTHER_TOOL, Message, Traits
from specrs.errors import InvalidRequestError

RENDER_ARGUMENTS = frozenset(
    {
        "conversation",
        "conversations",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Names that `chat_template_kwargs` may not have: the arguments of transformers' function, and `messages`."""

TOOLS_NOT_SHOWN = (
    "tools: the chat template does not show them, so the model does not know of them; use a chat template that does"
)
"""Warning about tools in whose place another tool gives the same text."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text of a prompt. `warnings` has one sentence for each part of the request that the template leaves out."""

    text: str
    warnings: tuple[str, ...] = ()


def render(arguments: Mapping[str, Any]) -> Rendered:
    """Render one conversation. `arguments` are those of `Tokenizer.chat_arguments`.

    Messages that the template could not show as they are are changed first (`conversation.fit`).

    Raises `InvalidRequestError` if the template fails, and for messages that it cannot show.
    """
    from specrs.chat_template.sandbox import show  # jinja2 is imported when it is needed

    given = dict(arguments)
    messages, special_tokens = given.pop("messages"), given.pop("special_tokens")
    variables, hints = given.pop("variables"), given.pop("hints")
    traits = _traits(given["chat_template"], json.dumps(special_tokens))
    unread = [name for name in hints if name not in traits.variables] if hints else []
    variables = {**variables, **{name: value for name, value in hints.items() if name not in unread}}

    def render_messages(conversation: list[Message], **other: Any) -> str:
        return show(conversation, variables={**special_tokens, **variables}, **{**given, **other})

    fitted, warnings = fit(messages, traits, render_messages)
    warnings += [f"{name}={hints[name]!r}: the chat template does not read it" for name in unread]
    try:
        text = render_messages(fitted)
    except Exception as fault:
        # a template is a program: whatever it raises is about this conversation
        lines = str(fault).strip().splitlines()
        reason = lines[0] if lines else type(fault).__name__
        raise InvalidRequestError(f"messages: the chat template refused them: {reason}") from fault
    if given["tools"] and not traits.tools:
        with suppress(Exception):  # a template may reject the other tool
            if text == render_messages(fitted, tools=[OTHER_TOOL]):
                warnings.append(TOOLS_NOT_SHOWN)
    return Rendered(text, tuple(warnings))


@lru_cache(maxsize=16)
def _traits(chat_template: str, special_tokens: str) -> Traits:
    """Return the cached traits of a template. `special_tokens` is JSON, because a dictionary has no hash."""
    from specrs.chat_template.sandbox import show

    tokens = json.loads(special_tokens)

    def render_probe(conversation: list[Message], tools: list[dict[str, Any]] | None) -> str:
        arguments = {"chat_template": chat_template, "tools": tools, "variables": tokens}
        return show(conversation, add_generation_prompt=True, **arguments)

    return Traits(render_probe, lambda: _variables(chat_template), lambda: _words(chat_template))


def _variables(chat_template: str) -> frozenset[str]:
    """Return the names of variables that the template reads. Raises jinja2's errors for a broken template."""
    from jinja2.meta import find_undeclared_variables

    from specrs.chat_template.sandbox import compile_template

    environment = compile_template(chat_template).environment
    return frozenset(find_undeclared_variables(environment.parse(chat_template)))


def _words(chat_template: str) -> frozenset[str]:
    """Return the names and strings in the template's code, without its literal text. Raises jinja2's errors for a
    broken template."""
    from specrs.chat_template.sandbox import compile_template

    tokens = compile_template(chat_template).environment.lex(chat_template)
    return frozenset(value.strip("'\"") for _, kind, value in tokens if kind in ("name", "string"))
