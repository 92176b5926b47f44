"""Chat templates to text: transformers' own rendering, in its sandbox. Loads no tokenizer, and no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from specrs.chat_template.conversation import fit
from specrs.chat_template.traits import Message, Traits
from specrs.errors import InvalidRequestError

RENDER_ARGUMENTS = frozenset(
    {
        "conversation",
        "conversations",
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
"""Names that no template may have for a variable of its own: they are transformers'."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text. `warnings`: one sentence for each part of the request that the template leaves out."""

    text: str
    warnings: tuple[str, ...] = ()


def render(arguments: Mapping[str, Any]) -> Rendered:
    """Render one conversation; `arguments` are `Tokenizer.chat_arguments`.

    The messages are changed first where the template could not show them as they are (`conversation.fit`).

    Raises `InvalidRequestError` when the template fails, and for messages that it cannot show.
    """
    given = dict(arguments)
    messages, special_tokens = given.pop("messages"), given.pop("special_tokens")
    variables, hints = given.pop("variables"), given.pop("hints")
    traits = _traits(given["chat_template"], json.dumps(special_tokens))
    unread = [name for name in hints if name not in traits.variables] if hints else []
    variables = {**variables, **{name: value for name, value in hints.items() if name not in unread}}

    def show(conversation: list[Message]) -> str:
        return _render(conversation, **{**special_tokens, **variables, **given})

    fitted, warnings = fit(messages, traits, show)
    warnings += [f"{name}={hints[name]!r}: the chat template does not read it" for name in unread]
    try:
        text = show(fitted)
    except Exception as fault:
        # a template is a program: whatever it raises is about this conversation
        lines = str(fault).strip().splitlines()
        reason = lines[0] if lines else type(fault).__name__
        raise InvalidRequestError(f"messages: the chat template refused them: {reason}") from fault
    return Rendered(text, tuple(warnings))


@lru_cache(maxsize=16)
def _traits(chat_template: str, special_tokens: str) -> Traits:
    """The traits of a template; `special_tokens` is JSON, because a dictionary has no hash."""
    tokens = json.loads(special_tokens)

    def show(conversation: list[Message], tools: list[dict[str, Any]] | None) -> str:
        return _render(conversation, chat_template=chat_template, tools=tools, add_generation_prompt=True, **tokens)

    return Traits(show, lambda: _variables(chat_template), lambda: _words(chat_template))


def _render(conversation: list[Message], **arguments: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(conversations=[conversation], **arguments)
    return str(rendered[0][0])


def _variables(chat_template: str) -> frozenset[str]:
    """Names that the template reads from what it is called with. Raises jinja2's errors for a broken template."""
    from jinja2.meta import find_undeclared_variables
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(chat_template).environment
    return frozenset(find_undeclared_variables(environment.parse(chat_template)))


def _words(chat_template: str) -> frozenset[str]:
    """Names and strings of the template's code, not of the text that it writes. Raises jinja2's errors."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(chat_template).environment
    tokens = environment.lex(chat_template)
    return frozenset(value.strip("'\"") for _, kind, value in tokens if kind in ("name", "string"))
