"""Chat templates to text: transformers' own rendering, in its sandbox. Loads no tokenizer, and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def render(arguments: Mapping[str, Any]) -> str:
    """The text that a template makes of one conversation; `arguments` are `Tokenizer.chat_arguments`.

    Raises `InvalidRequestError` when the template fails.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(**arguments)
    except Exception as fault:
        # a template is a program: whatever it raises is about this conversation
        lines = str(fault).strip().splitlines()
        reason = lines[0] if lines else type(fault).__name__
        raise InvalidRequestError(f"messages: the chat template refused them: {reason}") from fault
    return str(rendered[0][0])
